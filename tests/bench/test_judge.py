"""A result is right if it is about as near to float64 as the torch backend in the same type."""

from dataclasses import replace

import pytest
import torch

from affinear.bench import judge as judging
from affinear.bench.cases import FORWARD, TRAINING, Case, Shape, draw
from affinear.bench.contenders import ours, step
from affinear.bench.judge import Judge, budget, finite, relative_error

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("direction", [FORWARD, TRAINING])
def test_the_torch_backend_is_right(case: Case, dtype: torch.dtype, direction: str):
    case = replace(case, dtype=dtype, causal=True, rotary=True)
    inputs = draw(case, CPU, 0)
    finding = Judge(case, inputs).find(step(ours(case, CPU, "torch"), inputs, direction)())
    assert finding.right
    assert 0 < finding.error < {torch.float32: 1e-5}.get(dtype, 2e-2)


@pytest.mark.parametrize("which", range(4))
def test_one_wrong_head_of_the_answer_or_of_a_gradient_is_found(case: Case, which: int):
    inputs = draw(case, CPU, 0)
    results = [x.clone() for x in step(ours(case, CPU, "torch"), inputs, TRAINING)()]
    results[which][1, :, 1] *= 1.001
    finding = Judge(case, inputs).find(results)
    assert not finding.right
    assert finding.error == pytest.approx(1e-3, rel=0.01)


def test_nan_is_wrong(case: Case):
    inputs = draw(case, CPU, 0)
    results = step(ours(case, CPU, "torch"), inputs, FORWARD)()
    results[0][0, 0, 0, 0] = float("nan")
    assert not Judge(case, inputs).find(results).right


def test_of_large_inputs_the_corners_are_compared(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(judging, "LARGE", 100)
    case = Case(Shape(3, 3, 24, 8), torch.float32)
    inputs = draw(case, CPU, 0)
    results = [x.clone() for x in step(ours(case, CPU, "torch"), inputs, TRAINING)()]
    results[0][1, :, 1] = 0  # neither first nor last
    assert Judge(case, inputs).find(results).right
    results[3][2, :, 2] = 0
    finding = Judge(case, inputs).find(results)
    assert not finding.right
    assert finding.error == pytest.approx(1.0)


def test_twice_the_error_of_the_torch_backend_is_allowed_and_hardly_more():
    assert budget(1e-3) == pytest.approx(2e-3, rel=1e-3)
    assert budget(0.0) == pytest.approx(4.8e-7, rel=0.01)


def test_the_error_is_that_of_the_worst_head():
    want = torch.ones(2, 4, 2, 3)
    got = want.clone()
    got[1, :, 0] = 1.25
    assert relative_error(got, want) == pytest.approx(0.25)


def test_one_infinity_anywhere_is_not_finite():
    assert finite([torch.ones(3)])
    assert not finite([torch.ones(3), torch.tensor([1.0, float("inf")])])

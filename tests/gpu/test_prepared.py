"""Plain calls that were prepared, at real sizes; and kernels that were built beforehand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import affinear as af
from affinear.ops.triton import plain, plans

CUDA = torch.cuda.is_available()
BRAIN, HALF, WHOLE = torch.bfloat16, torch.float16, torch.float32
pytestmark = pytest.mark.skipif(not CUDA, reason="the interpreter builds nothing, so nothing is prepared")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[plans.Plan]:
    """The plans that ran, from an empty memory on."""
    found, run = list[plans.Plan](), plans.run

    def noted(plan: plans.Plan, *rest: Any) -> Any:
        made = run(plan, *rest)
        found.append(plan)
        return made

    monkeypatch.setattr(plain, "MEMORY", plain.Memory(plain.MOST))
    monkeypatch.setattr(plans, "run", noted)
    return found


@pytest.mark.parametrize(
    ("mechanism", "batch", "tokens", "heads", "width", "dtype"),
    [
        ("mala", 128, 196, 3, 64, BRAIN),
        ("mala", 2, 1000, 2, 64, HALF),
        ("mala", 2, 9000, 2, 96, BRAIN),
        ("nala", 2, 196, 2, 64, WHOLE),
    ],
)
def test_prepared_calls_have_the_bits_of_the_first(
    mechanism: str, batch: int, tokens: int, heads: int, width: int, dtype: torch.dtype, planned: Any, make: Any,
    same_bits: Any, judge: Any,
):  # fmt: skip
    problem = make(mechanism, batch=batch, tokens=tokens, heads=heads, width=width, dtype=dtype)
    first = problem.answers()
    judge(problem, first)
    for number in (1, 3, 5):  # forward; forward and back from then on
        same_bits(problem.answers(), first)
        assert len(planned) == number
    other = make(mechanism, batch=batch, tokens=tokens, heads=heads, width=width, dtype=dtype)
    judge(other)
    assert len(planned) == 7


def test_prepared_calls_do_not_answer_for_others(planned: Any, make: Any, judge: Any):
    problem = make(batch=4, tokens=196, heads=2)
    for _ in range(3):
        judge(problem)
    ran = len(planned)
    judge(make(batch=4, tokens=195, heads=2))
    judge(make(batch=4, tokens=196, heads=2, dtype=HALF))
    judge(problem.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)))
    assert len(planned) == ran


def test_prepared_calls_can_be_captured_and_follow_the_current_stream(planned: Any, make: Any):
    query, key, value, _ = make(batch=4, tokens=196, heads=2).tokens
    with torch.no_grad():
        expected = af.attention(query, key, value)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.equal(af.attention(query, key, value), expected)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            out = af.attention(query, key, value)
        out.zero_()
        graph.replay()
    assert torch.equal(out, expected)
    assert len(planned) == 2


def test_what_was_built_beforehand_is_not_built_again():
    options: dict[str, Any] = {"mechanism": "inline", "dtype": HALF, "key_heads": 1}
    told = af.warm_up((2, 100, 2, 48), (2, 2000, 2, 48), **options)
    assert {"attention_kernel", "summarize_kernel", "summarize_backward_kernel"} <= set(told.kernels)
    assert told.seconds > 0
    assert af.warm_up((3, 101, 2, 48), (2, 1999, 2, 48), **options).kernels == ()
    assert "causal_kernel" in af.warm_up((2, 100, 2, 48), causal=True, backward=False, **options).kernels
    assert "float64" in str(af.warm_up((2, 100, 2, 48), dtype=torch.float64))

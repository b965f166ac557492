"""A row has times only if its result is right; one that fails says why in a word and stops nobody else."""

import pytest
import torch
from torch import Tensor

from affinear.bench import timing
from affinear.bench.cases import DIRECTIONS, FORWARD, TRAINING, Case, Shape
from affinear.bench.contenders import Contender, ours, sdpa
from affinear.bench.measure import Clock, Problem, why
from affinear.ops import attention

CPU = torch.device("cpu")


def test_a_right_result_is_timed_and_its_error_kept(case: Case, clock: Clock):
    for direction in DIRECTIONS:
        row = Problem(case, clock).measure("non-causal", ours(case, CPU, "torch"), direction)
        assert row.status == "ok"
        assert row.call is not None
        assert row.call.median > 0
        assert row.graph is None
        assert row.error is not None
        assert row.budget is not None
        assert row.error <= row.budget
        assert row.traffic == case.traffic(direction)
        assert row.held == (4 if direction == FORWARD else 8) * 2 * 2 * 24 * 8 * 4


def test_a_wrong_result_gets_no_time(case: Case, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "time_calls", lambda *_: pytest.fail("a wrong result was timed"))
    broken = Contender("broken", lambda q, k, v: 1.01 * attention(q, k, v))
    row = Problem(case, clock).measure("non-causal", broken, FORWARD)
    assert (row.status, row.reason) == ("wrong", "wrong (error 1.0e-02)")
    assert row.call is None
    assert row.graph is None
    assert row.ms is None
    assert row.gb_per_s is None


def test_a_wrong_gradient_gets_no_time(case: Case, clock: Clock):
    class Deaf(torch.autograd.Function):
        """The right answer whose gradient is nothing."""

        @staticmethod
        def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v)

        @staticmethod
        def backward(ctx, grad: Tensor):
            return torch.zeros_like(grad), torch.zeros_like(grad), torch.zeros_like(grad)

    deaf = Contender("deaf", Deaf.apply)
    problem = Problem(case, clock)
    assert problem.measure("non-causal", deaf, FORWARD).status == "ok"
    row = problem.measure("non-causal", deaf, TRAINING)
    assert row.reason == "wrong (error 1.0e+00)"
    assert row.call is None


def test_a_rival_that_computes_something_else_only_has_to_be_finite(case: Case, clock: Clock):
    problem = Problem(case, clock)
    row = problem.measure("non-causal", sdpa(case), TRAINING)
    assert (row.status, row.error) == ("ok", None)
    endless = Contender("endless", lambda q, k, v: q / 0, exact=False)
    row = problem.measure("non-causal", endless, FORWARD)
    assert (row.status, row.reason, row.call) == ("wrong", "wrong (not finite)", None)


def test_softmax_in_bfloat16_on_a_processor_fails_a_row_and_not_the_run(clock: Clock):
    case = Case(Shape(1, 2, 40, 8), torch.bfloat16, causal=True)
    problem = Problem(case, clock)
    assert problem.measure("causal", sdpa(case), FORWARD).status == "ok"
    assert problem.measure("causal", sdpa(case), TRAINING).reason == "cannot serve"


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB\nand more"), "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "out of memory"),
        (ValueError("backend: this version has no Triton kernels"), "cannot serve"),
        (NotImplementedError("later"), "cannot serve"),
        (RuntimeError("an illegal memory access"), "RuntimeError"),
    ],
)
def test_a_failing_row_says_why_in_a_word_and_survives(case: Case, clock: Clock, error: Exception, word: str):
    def fail(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise error

    row = Problem(case, clock).measure("non-causal", Contender("failing", fail), FORWARD)
    assert (row.status, row.reason) == ("failed", word)
    assert row.detail == str(error).partition("\n")[0]
    assert why(error) == word


def test_inputs_that_do_not_fit_into_memory_fail_the_row_only(clock: Clock):
    case = Case(Shape(2**20, 2**10, 2**20, 2**10), torch.float32)
    row = Problem(case, clock).measure("non-causal", sdpa(case), FORWARD)
    assert row.status == "failed"


def test_ctrl_c_is_not_taken_for_a_failing_row(case: Case, clock: Clock):
    def stop(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Problem(case, clock).measure("non-causal", Contender("stopped", stop), FORWARD)


def test_a_backend_that_has_no_kernel_for_a_width_cannot_serve(clock: Clock):
    case = Case(Shape(2, 2, 24, 4), torch.float32)
    row = Problem(case, clock).measure("non-causal", ours(case, CPU, "triton"), FORWARD)
    assert row.reason == "cannot serve"
    assert "wide" in row.detail


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_on_a_gpu_a_row_has_a_graph_and_a_peak(direction: str):
    gpu = torch.device("cuda")
    case = Case(Shape(8, 2, 512, 64), torch.bfloat16)
    for contender in (ours(case, gpu, "torch"), sdpa(case)):
        row = Problem(case, Clock(gpu, 0.02)).measure("non-causal", contender, direction)
        assert row.status == "ok", row
        assert row.graph is not None, row.detail
        assert row.call is not None
        assert row.graph.median < 1.5 * row.call.median
        assert row.peak is not None
        assert row.peak >= 0

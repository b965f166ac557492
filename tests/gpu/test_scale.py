"""Long, large, and lean."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import affinear as af
from affinear.ops.triton.causal.calls import shape_for

CUDA = torch.cuda.is_available()
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
MEGABYTE = 2**20


@pytest.mark.alone
@CAUSAL
def test_a_million_tokens(causal: bool, make: Any, judge: Any):
    judge(make(batch=1, tokens=2**20, heads=2, causal=causal))


@pytest.mark.alone
@CAUSAL
def test_more_numbers_than_32_bits_can_count_in_a_batch(
    causal: bool, make: Any, same_bits: Any, size: Callable[[int, int], int]
):
    problem = make(batch=33, tokens=2**14, heads=64, causal=causal)
    assert problem.query.numel() > size(2**31, 0)
    answers = problem.answers()
    for sample in (0, problem.query.shape[0] - 1):
        alone = problem.map(lambda x, i=sample: x[i : i + 1]).answers()
        same_bits([x[sample : sample + 1] for x in answers], alone)


@pytest.mark.alone
@CAUSAL
def test_more_numbers_than_32_bits_can_count_in_a_sequence(
    causal: bool, make: Any, same_bits: Any, size: Callable[[int, int], int]
):
    problem = make(batch=1, tokens=530_000, heads=64, causal=causal)
    assert problem.query.numel() > size(2**31, 0)
    answers = problem.answers()
    head = problem.query.shape[2] - 1
    same_bits([x[:, :, head:] for x in answers], problem.map(lambda x: x[:, :, head:]).answers())


@pytest.mark.alone
@pytest.mark.skipif(not CUDA, reason="memory is measured on a GPU")
@CAUSAL
def test_any_strides_are_read_without_a_copy(causal: bool, make: Any):
    problem = make(batch=4, tokens=2**15, heads=8, causal=causal)
    problem = problem.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    warm = problem.map(lambda x: x[:1]).answers()
    del warm
    answer = problem.query.nbytes
    extra = 0.1 * answer + 4 * MEGABYTE
    if causal:
        # A state before every segment, and the means of each.
        batch, tokens, heads, width = problem.query.shape
        segment = shape_for(width, width, 1, problem.query.element_size()).segment
        extra = 1.05 * batch * heads * -(-tokens // segment) * 4 * (width * width + 4 * width)

    def peak(function: Callable[[], Any]) -> tuple[int, Any]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        return torch.cuda.max_memory_allocated() - before, result

    with torch.no_grad():
        taken, _ = peak(lambda: af.attention(*problem.tokens[:3], causal=causal, backend="triton"))
        assert taken <= answer + extra
    tokens = [x.detach().requires_grad_() for x in problem.tokens[:3]]
    taken, out = peak(lambda: af.attention(*tokens, causal=causal, backend="triton"))
    assert taken <= answer + extra
    taken, _ = peak(lambda: torch.autograd.grad(out, tokens, problem.grad))
    assert taken <= 3.3 * answer + 4 * MEGABYTE


@pytest.mark.alone
@CAUSAL
def test_a_new_length_starts_at_once(causal: bool, make: Any, size: Callable[[int, int], int]):
    make(tokens=1000, causal=causal).answers()
    make(tokens=2000, causal=causal).answers()  # several segments
    for tokens in (1001, 1024, 2048, 50, 1, 4099, 777, 784):
        problem = make(tokens=tokens, causal=causal)
        start = time.perf_counter()
        problem.answers()
        if CUDA:
            torch.cuda.synchronize()
        assert time.perf_counter() - start < size(1, 10), tokens


@pytest.mark.skipif(not CUDA, reason="graphs are captured on a GPU")
@CAUSAL
def test_a_cuda_graph_replays_with_new_tokens(causal: bool, make: Any, same_bits: Any):
    static, fresh = make(causal=causal), make(causal=causal)
    static.answers()  # compiled before the capture
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        static.answers()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = static.answers()
    for old, new in zip(static.tokens, fresh.tokens, strict=True):
        old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    same_bits(captured, fresh.answers())


@pytest.mark.skipif(not CUDA, reason="graphs are captured on a GPU")
@torch.no_grad()
def test_a_cuda_graph_decodes(make: Any, same_bits: Any):
    tokens = make(tokens=1).tokens[:3]
    options: Any = {"causal": True, "return_state": True, "backend": "triton"}
    state = af.summarize(tokens[1], tokens[2], backend="triton")
    af.attention(*tokens, initial_state=state, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured: Any = af.attention(*tokens, initial_state=state, **options)
    for x in tokens:
        x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    eager: Any = af.attention(*tokens, initial_state=state, **options)
    same_bits([captured[0], captured[1].covariance], [eager[0], eager[1].covariance])


@CAUSAL
def test_a_compiled_program_serves_every_length(causal: bool, make: Any, same_bits: Any):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return 2 * af.attention(query.sin(), key, value, causal=causal, backend="triton")

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (40, 45, 33, 48):
        problem = make(tokens=tokens, causal=causal)
        results = []
        for function in (attend, compiled):
            query, key, value = (x.detach().requires_grad_() for x in problem.tokens[:3])
            out = function(query, key, value)
            results.append((out.detach(), *torch.autograd.grad(out, (query, key, value), problem.grad)))
        same_bits(*results)
    assert counter.frame_count == 1


@pytest.mark.skipif(not CUDA, reason="compiled for a GPU")
def test_inductor_compiles_it(make: Any, judge: Any):
    torch._dynamo.reset()
    compiled = torch.compile(af.attention, fullgraph=True, dynamic=True)
    problem = make()
    query, key, value = (x.detach().requires_grad_() for x in problem.tokens[:3])
    out = compiled(query, key, value, backend="triton")
    judge(problem, (out.detach(), *torch.autograd.grad(out, (query, key, value), problem.grad)))


def test_queries_and_keys_of_other_numbers(make: Any):
    problem = make(tokens=1100)
    short = replace(problem, query=problem.query[:, :17], grad=problem.grad[:, :17])
    truth, rival = short.answers("torch", torch.float64), short.answers("torch")
    for ours, theirs, exact in zip(short.answers(), rival, truth, strict=True):
        assert (ours.double() - exact).norm() <= 2 * (theirs.double() - exact).norm() + 1e-6 * exact.norm()

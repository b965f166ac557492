"""At real sizes, answers and gradients are as good as those of the torch backend in the same dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import affinear as af
from affinear.ops.triton import decode

MECHANISMS = [name for name in af.mechanisms() if name != "softmax"]
TURNED = ["mala", "nala", "mala_released", "nala_released"]
BRAIN, HALF, WHOLE = torch.bfloat16, torch.float16, torch.float32
CUDA = torch.cuda.is_available()


@pytest.mark.parametrize("dtype", [BRAIN, HALF, WHOLE], ids=str)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism(mechanism: str, dtype: torch.dtype, make: Any, judge: Any):
    judge(make(mechanism, dtype=dtype), oracle="reference")


@pytest.mark.parametrize("mechanism", TURNED)
def test_images_with_rotary_positions(mechanism: str, make: Any, judge: Any):
    judge(make(mechanism, rotary=2), oracle="reference")


@pytest.mark.parametrize("mechanism", ["mala", "inline", "nala_released"])
def test_batches_that_one_launch_serves(mechanism: str, make: Any, judge: Any):
    judge(make(mechanism, batch=128, tokens=196, heads=8, rotary=2))


@pytest.mark.parametrize(
    ("mechanism", "width", "values"),
    [("mala", 32, 32), ("mala", 96, 96), ("mala", 128, 128), ("nala", 96, 64), ("mala", 256, 256)],
)
def test_other_widths(mechanism: str, width: int, values: int, make: Any, judge: Any):
    judge(make(mechanism, width=width, values=values, tokens=1100))


@pytest.mark.parametrize("rotary", [0, 1], ids=["plain", "rotary"])
@pytest.mark.parametrize("width", [96, 128])
@pytest.mark.parametrize("mechanism", ["mala", "nala"])
def test_wide_heads(mechanism: str, width: int, rotary: int, make: Any, judge: Any):
    judge(make(mechanism, width=width, tokens=2100, heads=2, rotary=rotary))


@pytest.mark.parametrize("factor", [30, 300])
@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_large_norms(mechanism: str, dtype: torch.dtype, factor: int, make: Any, judge: Any):
    problem = make(mechanism, dtype=dtype)
    judge(replace(problem, query=problem.query * factor, key=problem.key * factor, value=problem.value * factor))


def test_masked_keys_may_hold_anything(make: Any, judge: Any):
    problem = make(tokens=1500, groups=2)
    mask = torch.rand(problem.key.shape[:2], device=problem.key.device) > 0.3
    mask[0] = False
    problem.key[~mask], problem.value[~mask] = float("nan"), float("inf")
    problem = replace(problem, mask=mask)
    answers = problem.answers()
    assert (answers.out[0] == 0).all()
    assert all((gradient[0] == 0).all() for gradient in answers[1:])
    judge(problem, answers)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_of_all_lengths(causal: bool, make: Any, judge: Any, size: Callable[[int, int], int]):
    lengths = torch.tensor([0, 1, 15, 16, 17, 0, 64, 65, 1000, 1024, 2049, 0][: size(12, 6)])
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    problem = make(batch=1, tokens=int(bounds[-1]), causal=causal, rotary=1)
    judge(replace(problem, bounds=bounds.to(problem.query.device)))


@pytest.mark.parametrize(
    ("mechanism", "dtype", "rotary"),
    [
        ("mala", BRAIN, 0),
        ("mala", HALF, 0),
        ("mala", WHOLE, 0),
        ("inline", BRAIN, 0),
        ("nala", BRAIN, 0),
        ("mala_released", BRAIN, 1),
    ],
)
def test_causal(mechanism: str, dtype: torch.dtype, rotary: int, make: Any, judge: Any):
    judge(make(mechanism, tokens=3000, causal=True, dtype=dtype, rotary=rotary), oracle="reference")


@pytest.mark.skipif(not CUDA, reason="what differs is what compilers make of each width")
@pytest.mark.parametrize(
    ("width", "values", "dtype"),
    [
        *((width, values, HALF) for width, values in [(8, 8), (24, 16), (40, 16), (32, 32), (96, 96), (128, 128)]),
        *((width, values, BRAIN) for width, values in [(8, 8), (16, 32), (40, 16), (32, 32), (96, 96), (136, 72)]),
    ],
)
def test_causal_at_other_widths(width: int, values: int, dtype: torch.dtype, make: Any, judge: Any):
    judge(make(tokens=1500, width=width, values=values, dtype=dtype, causal=True), oracle="reference")


def test_causal_over_shared_heads(make: Any, judge: Any):
    judge(make(tokens=1500, heads=8, groups=2, causal=True, width=128))


@pytest.mark.parametrize("causal", [False, True])
def test_a_state_carries_what_came_before(causal: bool, make: Any, judge: Any):
    problem = make(tokens=3000, causal=causal)
    middle = problem.query.shape[1] // 3
    query, key, value = (x.detach().requires_grad_() for x in problem.tokens[:3])
    if causal:
        first, state = af.attention(
            query[:, :middle], key[:, :middle], value[:, :middle], causal=True, return_state=True, backend="triton"
        )
        rest = af.attention(
            query[:, middle:], key[:, middle:], value[:, middle:], causal=True, initial_state=state, backend="triton"
        )
        out = torch.cat((first, rest), dim=1)
    else:
        state = af.summarize(key[:, :middle], value[:, :middle], backend="triton")
        state = state + af.summarize(key[:, middle:], value[:, middle:], backend="triton")
        out = af.attend(query, state, backend="triton")
    judge(problem, (out.detach(), *torch.autograd.grad(out, (query, key, value), problem.grad)))


@pytest.mark.parametrize("mechanism", ["mala", "nala"])
@torch.no_grad()
def test_decoding_continues_a_text(mechanism: str, make: Any, size: Callable[[int, int], int]):
    problem = make(mechanism, batch=3, tokens=300, causal=True)
    start = problem.query.shape[1] - size(60, 5)
    options: dict[str, Any] = {"mechanism": mechanism, "causal": True}
    truth = af.attention(*(x.double() for x in problem.tokens[:3]), **options, backend="torch")[:, start:]
    rival = af.attention(*problem.tokens[:3], **options, backend="torch")[:, start:]
    _, state = af.attention(*(x[:, :start] for x in problem.tokens[:3]), **options, return_state=True, backend="triton")
    steps = []
    for i in range(start, problem.query.shape[1]):
        query, key, value = (x[:, i : i + 1] for x in problem.tokens[:3])
        out, state = decode(query, key, value, state, in_place=True)
        steps.append(out)
    error, bound = ((x.double() - truth).norm() for x in (torch.cat(steps, dim=1), rival))
    assert error <= 2 * bound
    assert (state.count == problem.query.shape[1]).all()


@pytest.mark.parametrize("in_place", [False, True], ids=["anew", "in place"])
@torch.no_grad()
def test_decoding_a_long_text_far_from_zero_is_as_good_as_one_call(
    in_place: bool, make: Any, size: Callable[[int, int], int]
):
    problem = make("mala", batch=1, tokens=size(3000, 60), causal=True)
    query, key, value = (x.float() for x in problem.tokens[:3])
    value = value + 1000
    truth = af.attention(query.double(), key.double(), value.double(), causal=True, backend="torch")
    once = af.attention(query, key, value, causal=True, backend="triton")
    state, steps = af.summarize(key[:, :1], value[:, :1], backend="triton"), [once[:, :1]]
    for i in range(1, query.shape[1]):
        now = slice(i, i + 1)
        out, state = decode(query[:, now], key[:, now], value[:, now], state, in_place=in_place)
        steps.append(out)
    error, bound = ((x.double() - truth).abs().max() for x in (torch.cat(steps, dim=1), once))
    # One call may be lucky; a rounding of the answer, which is about 1000, is no mistake.
    assert error <= 1.5 * max(bound, 1000 * torch.finfo(torch.float32).eps)

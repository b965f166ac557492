"""Kernels touch elements of their tensors and nothing else, at sizes of which no machine here has the memory.

See `watching`: a few programs of every launch run in the interpreter, over tensors that take no room.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.runtime import interpreter
from watching import Watch, modules, tensors_of

import affinear as af
from affinear.ops.triton import (
    adding,
    attend,
    blocks,
    causal,
    convolving,
    decoding,
    launch,
    library,
    passes,
    summarize,
    turns,
)
from affinear.ops.triton.causal import rows
from affinear.ops.triton.causal import tokens as causal_tokens
from affinear.ops.triton.rules import Rule, rule_of
from affinear.ops.triton.statistics import Rest, Statistics

pytestmark = [
    pytest.mark.skipif(not knobs.runtime.interpret, reason="compiled kernels are not watched"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, about what is not finite
]
Randn = Callable[..., Tensor]
SHORT, HALF, WHOLE = torch.bfloat16, torch.float16, torch.float32
PROCESSORS = 132
MECHANISMS = [name for name in af.mechanisms() if name != "softmax"]
LAYOUTS = ["dense", "heads first", "tokens first", "channels first", "among others", "every other"]
WIDTHS = 8, 24, 40, 64, 72, 96, 128, 136
exhaustive = pytest.mark.exhaustive


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """A watch over all launches, on a GPU with many processors."""
    monkeypatch.setattr(launch, "processors", lambda _device: PROCESSORS)
    return Watch(monkeypatch)


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        mechanism: Its name.
        batch: Sequences, one if they are packed.
        length: Tokens.
        heads: Of queries.
        groups: Heads of keys.
        width: Channels of a key.
        values: Of a value.
        dtype: Of tokens.
        layout: How tokens lie: see `tokens`.
        rotary: Whether they turn.
        masked: Whether some keys take no part.
        bounds: Where packed sequences begin and end.
        state: Whether there is one before the tokens, and a gradient of the one after them.
        wild: Whether tokens are not finite, which sends kernels down ways of their own.
    """

    mechanism: str = "mala"
    batch: int = 2
    length: int = 300
    heads: int = 2
    groups: int = 1
    width: int = 64
    values: int = 64
    dtype: torch.dtype = SHORT
    layout: str = "dense"
    rotary: bool = False
    masked: bool = False
    bounds: tuple[int, ...] | None = None
    state: bool = False
    wild: bool = False

    @property
    def rule(self) -> Rule:
        """The mechanism as kernels know it."""
        rule = rule_of(af.mechanisms()[self.mechanism])
        assert rule is not None
        return rule

    @property
    def sequences(self) -> int:
        """How many there are."""
        return self.batch if self.bounds is None else len(self.bounds) - 1


def tokens(watch: Watch, case: Case, heads: int, width: int) -> Tensor:
    """Tokens (B, N, H, width) whose neighbours in memory belong to nobody, but for dense ones."""
    batch, length = case.batch, case.length

    def new(*shape: int) -> Tensor:
        made = watch.memory.empty(*shape, dtype=case.dtype)
        return made.fill_(torch.nan) if case.wild else made

    if case.layout == "heads first":
        return new(batch, heads, length, width).transpose(1, 2)
    if case.layout == "tokens first":
        return new(length, batch, heads, width).transpose(0, 1)
    if case.layout == "channels first":
        return new(batch, heads, width, length).permute(0, 3, 1, 2)
    if case.layout == "among others":
        return new(batch, length + 3, 3, heads, width + 8)[:, 1:-2, 1, :, 4:-4]
    if case.layout == "every other":
        return new(batch, length, heads, 2 * width)[..., ::2]
    assert case.layout == "dense"
    return new(batch, length, heads, width)


def tables(watch: Watch, case: Case, length: int) -> Tensor | None:
    """What turns tokens."""
    dtype = HALF if case.dtype == SHORT else WHOLE
    return watch.memory.empty(length, case.width, dtype=dtype) if case.rotary else None


def mask(watch: Watch, case: Case) -> Tensor | None:
    """Which keys take part, in memory that has tokens first."""
    if not case.masked:
        return None
    drawn = watch.memory.empty(case.length, case.batch, dtype=torch.bool).T
    drawn.view(torch.uint8).random_(2)
    return drawn


def bounds(watch: Watch, case: Case) -> Tensor | None:
    """Where packed sequences begin and end."""
    if case.bounds is None:
        return None
    return watch.memory.empty(len(case.bounds), dtype=torch.int32).copy_(torch.tensor(case.bounds))


def state(watch: Watch, case: Case) -> Statistics:
    """A state of every sequence."""
    features = case.width * case.rule.blocks
    shapes = (features,), (case.values,), (features, case.values), (features,)
    parts = [watch.memory.empty(case.sequences, case.groups, *shape, dtype=WHOLE) for shape in shapes]
    count = watch.memory.empty(case.sequences, case.groups, dtype=torch.int64)
    return Statistics(count, *parts[:3], parts[3] if case.rotary else None)


def inputs(watch: Watch, case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, and the gradient of answers."""
    shapes = (case.heads, case.width), (case.groups, case.width), (case.groups, case.values), (case.heads, case.values)
    query, key, value, grad = (tokens(watch, case, *shape) for shape in shapes)
    return query, key, value, grad


def run_causal(watch: Watch, case: Case, segment: int | None = None) -> None:
    """Causal attention and its gradients."""
    query, key, value, grad = inputs(watch, case)
    before = state(watch, case) if case.state else None
    call = (
        query, key, value, case.rule, case.width**-0.5, mask(watch, case), bounds(watch, case),
        tables(watch, case, case.length), before,
    )  # fmt: skip
    precision = launch.precision_of(case.dtype)
    _out, final, saved = causal.forward(*call, precision, segment)
    grad_final = state(watch, case) if case.state else None
    causal.backward(grad, grad_final, *call, final, saved, precision, segment)


def run_full(watch: Watch, case: Case) -> None:
    """Attention over all tokens and its gradients; its two halves, each by itself."""
    query, key, value, grad = inputs(watch, case)
    packed = bounds(watch, case)
    table, scale = tables(watch, case, case.length), case.width**-0.5
    call = launch.Call(case.rule, scale, mask(watch, case), packed, packed, table)
    launch.attention(query, key, value, call, keep=False)
    _out, kept = launch.attention(query, key, value, call, keep=True)
    launch.attention_backward(grad, query, key, value, kept, call)
    made = launch.summarize_tokens(key, value, call)
    launch.attend_tokens(query, made, call)


def run_decode(watch: Watch, case: Case) -> None:
    """One more token, into a state of its own and in place."""
    query, key, value, _grad = inputs(watch, replace(case, length=1))
    before, table = state(watch, case), tables(watch, case, 1)
    given = query, key, value, before, case.rule, case.width**-0.5, table
    decoding.decode(*given, False, keep=True)
    rest = Rest(*(None if x is None else watch.memory.empty_like(x) for x in before[1:]))
    decoding.decode(*given, True, rest)


def run_everything(watch: Watch, case: Case) -> None:
    """All of it, causal attention in segments."""
    run_full(watch, case)
    run_causal(watch, case, segment=64)
    if case.bounds is None:
        run_decode(watch, case)


def is_kernel(x: Any, name: str, module: Any) -> bool:
    """Whether something by this name is a kernel that a module defines."""
    return name.endswith("_kernel") and getattr(getattr(x, "fn", None), "__module__", None) == module.__name__


RUNS = {"causal": run_causal, "full": run_full}


def run_depthwise(watch: Watch, size: tuple[int, int, int, int], side: int, turned: bool = False) -> None:
    """A depthwise convolution with all that goes with it, and its gradients, of maps (B, H, W, C) inside wider ones."""
    batch, height, width, channels = size
    rows = (width, height) if turned else (height, width)
    maps = (watch.memory.empty(batch, *rows, channels + 8, dtype=WHOLE)[..., 1 : channels + 1] for _ in range(4))
    x, added, gate, grad = (x.transpose(1, 2) if turned else x for x in maps)
    weight, bias = watch.memory.empty(channels, 1, side, side, dtype=WHOLE), watch.memory.empty(channels, dtype=WHOLE)
    convolving.convolve(x, weight, bias, itself=True)
    convolving.convolve(x, weight, None, added=added, gate=gate, flip=True)
    convolving.gate_gradients(grad, x, weight, bias, added, gate)
    convolving.taps_gradient(grad, x, weight)


def run_add_norm(watch: Watch, rows: int, channels: int) -> None:
    """A sum and its norm, and the gradients of both."""
    x, other, grad, grad_total = (watch.memory.empty(rows, channels, dtype=WHOLE) for _ in range(4))
    weight, bias = (watch.memory.empty(channels, dtype=WHOLE) for _ in range(2))
    total, _ = adding.add(x, other, weight, bias, 1e-5, WHOLE)
    adding.gradients(grad, grad_total, total, weight, 1e-5)


# The watch itself


@triton.jit
def copy_kernel(p_x, p_y, s_x, number, MORE: tl.constexpr, BN: tl.constexpr):
    """Copy some numbers, and more."""
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    b_x = tl.load(p_x + o_n * s_x, mask=o_n < number + MORE, other=0.0)
    tl.store(p_y + o_n, b_x, mask=o_n < number)


@triton.jit
def write_kernel(p_y, number, MORE: tl.constexpr, BN: tl.constexpr):
    """Write some numbers, and more."""
    o_n = tl.arange(0, BN)
    tl.store(p_y + o_n, o_n.to(tl.float32), mask=o_n < number + MORE)


@triton.jit
def unmasked(p_x, o_n, m_n, s_n, o_d, s_d, D, WHOLE: tl.constexpr = False):
    """`blocks.load_block` with a mask taken out."""
    return tl.load(p_x + o_n[:, None] * s_n + o_d[None, :] * s_d, mask=m_n[:, None] & (o_d < 0)[None, :] | True)


def copied(watch: Watch, number: int, step: int = 1, more: int = 0) -> None:
    """Copy every so manieth number."""
    x, y = watch.memory.empty(number, step, dtype=WHOLE)[:, 0], watch.memory.empty(number, dtype=WHOLE)
    copy_kernel[(triton.cdiv(number, 64),)](x, y, step, number, MORE=more, BN=64)


def test_what_lies_in_its_tensors_is_no_fault(watch: Watch):
    copied(watch, 100)
    copied(watch, 100, step=3)
    assert watch.faults == []
    assert watch.ran == {"copy_kernel": 4}


@pytest.mark.parametrize("step", [1, 3])
def test_a_number_past_the_end_is_told_when_it_is_read(step: int, watch: Watch):
    copied(watch, 100, step, more=1)
    (told,) = watch.faults
    assert told.startswith("copy_kernel, program (1, 0, 0): reads 1 of 37 addresses beside its tensors")


def test_a_number_past_the_end_is_told_when_it_is_written(watch: Watch):
    y = watch.memory.empty(50, dtype=WHOLE)
    write_kernel[(1,)](y, 50, MORE=1, BN=64)
    (told,) = watch.faults
    assert "writes 1 of 51 addresses beside its tensors, +0 bytes from the nearest beginning or end" in told
    assert "test_bounds.py" in told


def test_a_number_between_those_of_a_tensor_is_told(watch: Watch):
    x, y = watch.memory.empty(100, 2, dtype=WHOLE)[:, 0], watch.memory.empty(100, dtype=WHOLE)
    copy_kernel[(1,)](x, y, 1, 64, MORE=0, BN=64)
    (told,) = watch.faults
    assert "reads 32 of 64 addresses" in told


def test_numbers_that_32_bits_do_not_hold_are_told(watch: Watch):
    copied(watch, 2**20, step=2**12)
    assert watch.faults
    assert any("multiply of 32-bit integers makes" in told for told in watch.faults)
    assert any("reads 64 of 64 addresses beside its tensors" in told for told in watch.faults)


@pytest.mark.parametrize(
    ("module", "run"),
    [
        (attend, "full"),
        pytest.param(summarize, "full", marks=exhaustive),
        pytest.param(causal_tokens, "causal", marks=exhaustive),
        pytest.param(rows, "causal", marks=exhaustive),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_mask_that_is_left_out_of_the_library_is_told(
    module: Any, run: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
):
    assert module.load_block is blocks.load_block
    monkeypatch.setattr(module, "load_block", unmasked)
    RUNS[run](watch, Case(length=20, width=40))
    assert any("reads" in told for told in watch.faults)


# The library


LANGUAGE = Case("nala", length=16384, heads=16, groups=16, rotary=True)  # a step of training with 340M parameters
LARGE = Case(batch=40, length=9001, heads=96, groups=48, layout="among others")
LONG = Case(length=1_000_003, heads=16, groups=4, width=128, values=96, layout="heads first", rotary=True)


@pytest.mark.parametrize(
    ("run", "case"),
    [
        ("causal", LANGUAGE),
        pytest.param("full", LANGUAGE, marks=exhaustive),
        ("full", LARGE),
        pytest.param("causal", LARGE, marks=exhaustive),
        pytest.param("full", LONG, marks=exhaustive),
        pytest.param("causal", LONG, marks=exhaustive),
    ],
    ids=["language", "language full", "large", "large causal", "long", "long causal"],
)
def test_large_calls_read_and_write_their_own_memory(run: str, case: Case, watch: Watch):
    RUNS[run](watch, case)
    assert (watch.farthest >= 2**31) == (case is not LANGUAGE)
    assert watch.faults == []


@pytest.mark.parametrize(
    "case",
    [
        Case(length=1),
        Case("nala", batch=1, length=130, width=40, values=72, layout="heads first", bounds=(0, 0, 1, 66, 130)),
        pytest.param(
            Case(length=70, width=96, values=40, layout="among others", rotary=True, masked=True, state=True),
            marks=exhaustive,
        ),
        pytest.param(
            Case("nala_released", length=260, heads=4, groups=2, width=128, values=128, layout="every other"),
            marks=exhaustive,
        ),
    ],
    ids=["one token", "packed", "masked", "doubled"],
)
def test_any_call_reads_and_writes_its_own_memory(case: Case, watch: Watch):
    run_everything(watch, case)
    assert watch.faults == []


@pytest.mark.parametrize("side", [3, *(pytest.param(side, marks=exhaustive) for side in (5, 7))])
def test_maps_are_read_and_written_within_their_borders(side: int, watch: Watch):
    run_depthwise(watch, (2, 9, 5, 40), side)
    assert watch.faults == []


@pytest.mark.parametrize("length", [70, pytest.param(2**24 + 5, marks=exhaustive)])
def test_tables_are_read_and_written_within_their_borders(length: int, watch: Watch):
    cos, sin = (watch.memory.empty(length, 3, 136, dtype=WHOLE)[:, 1, 4:-4] for _ in range(2))
    turns.pack_turns(cos, sin, HALF)
    assert (watch.farthest >= 2**31) == (length > 70)
    assert watch.faults == []


@pytest.mark.parametrize(("rows", "channels"), [(77, 24), (3, 4096), pytest.param(9_000_001, 264, marks=exhaustive)])
def test_rows_are_read_and_written_within_their_borders(rows: int, channels: int, watch: Watch):
    run_add_norm(watch, rows, channels)
    assert (watch.farthest >= 2**31) == (rows > 77)
    assert watch.faults == []


@exhaustive
@pytest.mark.parametrize("turned", [False, True])
def test_large_maps_are_read_and_written_within_their_borders(turned: bool, watch: Watch):
    run_depthwise(watch, (3, 450_000, 12, 136), 3, turned)
    assert watch.farthest >= 2**31
    assert watch.faults == []


@exhaustive
def test_no_kernel_is_left_out(watch: Watch):
    for case in (Case(length=20), Case("nala", length=2500), Case(length=2500, rotary=True)):
        run_everything(watch, case)
    run_depthwise(watch, (1, 4, 4, 16), 3)
    run_add_norm(watch, 20, 16)
    turns.pack_turns(*watch.memory.empty(2, 9, 16, dtype=WHOLE), HALF)
    names = {name for module in modules() for name, kernel in vars(module).items() if is_kernel(kernel, name, module)}
    assert names
    assert set(watch.ran) == names
    assert watch.faults == []


@exhaustive
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_program_reads_and_writes_its_own_memory(mechanism: str, run: str, watch: Watch, seed: int):
    watch.few, draw = False, random.Random(seed)
    packed, groups = draw.random() < 0.3, draw.choice((1, 2))
    length = draw.choice((1, 15, 16, 17, 63, 64, 65, 130))
    case = Case(
        mechanism, 1 if packed else 2, length, groups * draw.choice((1, 2)), groups, draw.choice(WIDTHS),
        draw.choice(WIDTHS), draw.choice((SHORT, HALF, WHOLE)), draw.choice(LAYOUTS), rotary=draw.random() < 0.5,
        masked=draw.random() < 0.5, bounds=(0, 0, length // 2, length) if packed else None,
        state=draw.random() < 0.5, wild=draw.random() < 0.3,
    )  # fmt: skip
    RUNS[run](watch, case)
    assert watch.faults == [], case


# What 32 bits do not count


def tokens_first(length: int, batch: int) -> Tensor:
    """Tokens (B, N, 8, 64) whose neighbours in a sequence have all others between them; of no memory."""
    return torch.empty(length, batch, 8, 64, dtype=SHORT, device="meta").transpose(0, 1)


@pytest.mark.parametrize("run", ["full", pytest.param("causal", marks=exhaustive)])
def test_tokens_far_apart_are_read_where_they_lie(run: str, watch: Watch):
    case = Case(batch=65_535, length=70, heads=8, groups=8, layout="tokens first")
    assert library.near(there := tokens_first(case.length, case.batch)) is there
    RUNS[run](watch, case)
    assert watch.faults == []


def test_tokens_farther_apart_are_copied():
    assert library.near(tokens_first(70, 65_537)).is_contiguous()
    assert library.near(alone := tokens_first(70, 65_537)[:, :1]) is alone
    channels = torch.empty(1, 8, 64, 2**25, dtype=SHORT, device="meta").permute(0, 3, 1, 2)
    assert library.near(channels).is_contiguous()


def test_a_mask_whose_tokens_are_far_apart_is_copied():
    near, far = (torch.empty(3000, 2**20 + more, dtype=torch.bool, device="meta").T for more in (-1, 1))
    assert library.near(near) is near
    assert library.near(far).is_contiguous()


def test_maps_whose_columns_are_far_apart_are_copied():
    near, far = (torch.empty(1, 4096, 2**19 + more, 1, device="meta").transpose(1, 2) for more in (-1, 1))
    assert passes._dense(near) is near
    assert passes._dense(far).is_contiguous()


@pytest.mark.parametrize("is_causal", [False, True])
def test_operators_give_kernels_the_copies(is_causal: bool, randn: Randn, monkeypatch: pytest.MonkeyPatch):
    query, key, value, grad = (randn(9, 2, 1, 16, dtype=WHOLE).transpose(0, 1) for _ in range(4))
    mask = torch.rand(9, 2).T > 0.2
    seen: list[Tensor] = []

    def spied(kernel: Any, *args: Any, given: Any = interpreter.InterpretedFunction.run, **constants: Any) -> Any:
        seen.extend(x for x in tensors_of(args) if x.dtype == WHOLE)
        return given(kernel, *args, **constants)

    def answers() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        out = af.attention(*leaves, causal=is_causal, key_mask=mask, backend="triton")
        return [out, *torch.autograd.grad(out, leaves, grad)]

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", spied)
    expected = answers()
    assert not all(x.is_contiguous() for x in seen)
    seen.clear()
    monkeypatch.setattr(library, "FARTHEST", 1)
    for ours, theirs in zip(answers(), expected, strict=True):
        assert torch.equal(ours, theirs)
    assert seen
    assert all(x.is_contiguous() for x in seen)

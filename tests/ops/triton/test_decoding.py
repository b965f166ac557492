"""The decoding kernel: token by token the same as causal attention over all of them, in float64, by definition."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from triton import knobs

import affinear as af
from affinear.ops.rotary import Rotary, rotary_1d
from affinear.ops.state import State
from affinear.ops.triton.decoding import decode
from affinear.ops.triton.rules import rule_of
from affinear.ops.triton.statistics import Rest, Statistics

Randn = Callable[..., Tensor]
Error = Callable[[Tensor, Tensor], float]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = not knobs.runtime.interpret
MECHANISMS = [name for name in af.mechanisms() if name != "softmax"]
BATCH, STEPS = 2, 4

interpreted = pytest.mark.skipif(COMPILED, reason="only constants differ, and compiling them takes long")
pytestmark = [
    pytest.mark.skipif(COMPILED and DEVICE == "cpu", reason="needs a GPU, or TRITON_INTERPRET=1"),
    pytest.mark.usefixtures("rounding"),
]


def nothing(mechanism: str, groups: int, width: int, values: int, rotary: bool) -> Statistics:
    """States of no token. What lies in their place is nobody's business."""
    features = width * (2 if mechanism.startswith("nala") else 1)
    shapes = (features,), (values,), (features, values), (features,) if rotary else None
    count = torch.zeros(BATCH, groups, dtype=torch.int64, device=DEVICE)
    parts = (None if x is None else torch.full((BATCH, groups, *x), math.nan, device=DEVICE) for x in shapes)
    return Statistics(count, *parts)


def step(tokens: list[Tensor], state: Statistics, mechanism: str, turns: Tensor | None, in_place: bool):
    """Decode one token."""
    rule, scale = rule_of(af.mechanisms()[mechanism]), af.mechanisms()[mechanism].scale_for(tokens[0].shape[3])
    assert rule is not None
    return decode(tokens[0], tokens[1], tokens[2], state, rule, scale, turns, in_place)[:2]


def defined(tokens: list[Tensor], tables: Rotary | None, mechanism: str) -> tuple[Tensor, State]:
    """Causal attention over all tokens in float64, and the state after them, by definition."""
    wide = None if tables is None else (tables[0].double(), tables[1].double())
    tokens = [x.double() for x in tokens]
    return af.attention(*tokens, mechanism, causal=True, rotary=wide, return_state=True, backend="reference")


def decoded(tokens: list[Tensor], tables: Rotary | None, mechanism: str) -> Tensor:
    """Answers of the torch backend, token by token as well."""
    state, outs = None, []
    for i in range(STEPS):
        one = [x[:, i : i + 1] for x in tokens]
        turns = None if tables is None else (tables[0][i : i + 1], tables[1][i : i + 1])
        given = {"causal": True, "rotary": turns, "initial_state": state, "return_state": True}
        out, state = af.attention(*one, mechanism, **given, backend="torch")
        outs.append(out)
    return torch.cat(outs, dim=1)


def neighbour(x: Tensor, randn: Randn) -> Tensor:
    """Numbers about one rounding away, up or down."""
    return x * (1 + torch.finfo(x.dtype).eps * randn(*x.shape).sign().to(x))


def check(
    randn: Randn,
    relative_error: Error,
    mechanism: str = "mala",
    *,
    heads: int = 2,
    groups: int = 1,
    width: int = 24,
    values: int = 40,
    dtype: torch.dtype = torch.float32,
    rotary: bool = False,
    in_place: bool = False,
) -> None:
    """Decode a few tokens, and compare with causal attention over all of them."""
    shapes = (heads, width), (groups, width), (groups, values)
    tokens = [randn(BATCH, STEPS, *shape, dtype=dtype).to(DEVICE) for shape in shapes]
    tables = rotary_1d(STEPS, width, device=DEVICE) if rotary else None
    turns = None if tables is None else torch.stack((tables[0][:, ::2], tables[1][:, ::2]), dim=2).flatten(1)
    state, outs = nothing(mechanism, groups, width, values, rotary), []
    for i in range(STEPS):
        before = [None if x is None else x.clone() for x in state]
        out, after = step(
            [x[:, i : i + 1] for x in tokens], state, mechanism, None if turns is None else turns[i : i + 1], in_place
        )
        for old, x, new in zip(before, state, after, strict=True):
            assert x is None or (x is new if in_place else torch.allclose(x, old, rtol=0, atol=0, equal_nan=True))
        outs.append(out)
        state = after
    out = torch.cat(outs, dim=1)
    assert out.dtype == dtype

    truth, exact = defined(tokens, tables, mechanism)
    # Where turned products cancel, an error is a matter of luck: the rival's is its worst of inputs one rounding away.
    rivals = [tokens, *([neighbour(x, randn) for x in tokens] for _ in range(4))]
    errors = [relative_error(decoded(x, tables, mechanism), defined(x, tables, mechanism)[0]) for x in rivals]
    eps = torch.finfo(torch.float32).eps
    assert relative_error(out, truth) <= 2 * max(errors) + eps
    assert torch.equal(state.count, exact.count)
    for name in ("key_mean", "value_mean", "covariance", "rotated_key_mean"):
        ours, theirs = getattr(state, name), getattr(exact, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or relative_error(ours, theirs) <= 2 * eps, name


@interpreted
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_is_its_definition(mechanism: str, rotary: bool, randn: Randn, relative_error: Error):
    check(randn, relative_error, mechanism, rotary=rotary, in_place=rotary)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_any_dtype(dtype: torch.dtype, in_place: bool, randn: Randn, relative_error: Error):
    check(randn, relative_error, heads=4, groups=2, dtype=dtype, in_place=in_place)


@interpreted
@pytest.mark.parametrize(
    ("mechanism", "width", "values"), [("inline", 8, 8), ("mala", 96, 24), ("mala", 40, 200), ("nala", 136, 72)]
)
def test_any_width(mechanism: str, width: int, values: int, randn: Randn, relative_error: Error):
    check(randn, relative_error, mechanism, width=width, values=values, rotary=True, in_place=True)


def test_a_count_beyond_float32_is_exact(randn: Randn):
    state = nothing("mala", 1, 24, 16, False)
    state.count.fill_(2**25 + 1)
    tokens = [randn(BATCH, 1, 1, width, dtype=torch.float32).to(DEVICE) for width in (24, 24, 16)]
    assert (step(tokens, state, "mala", None, False)[1].count == 2**25 + 2).all()


def test_any_strides_and_nothing_beside_them(randn: Randn):
    tokens = [randn(BATCH, 1, 2, width, dtype=torch.float32).to(DEVICE) for width in (24, 24, 16)]
    spread = []
    for x in tokens:
        memory = torch.full((BATCH, 1, x.shape[3], 4), math.nan, device=DEVICE)
        spread.append(memory[..., ::2].transpose(2, 3).copy_(x))
    state = nothing("mala", 2, 24, 16, False)
    for ours, others in zip(
        step(tokens, state, "mala", None, False), step(spread, state, "mala", None, False), strict=True
    ):
        for x, y in zip(
            (ours,) if isinstance(ours, Tensor) else ours,
            (others,) if isinstance(others, Tensor) else others,
            strict=True,
        ):
            assert x is None or torch.equal(x, y)


@pytest.mark.parametrize(
    ("kept", "rotary"),
    [
        ("means", True),
        *(
            pytest.param(kept, rotary, marks=(interpreted, pytest.mark.exhaustive))
            for kept, rotary in (("nothing", False), ("means", False), ("everything", False), ("everything", True))
        ),
    ],
)
def test_what_a_step_rounds_off_is_taken_in_by_the_next(kept: str, rotary: bool, randn: Randn):
    steps, width, values = 100, 8, 8
    tokens = [randn(1, steps, 1, size, dtype=torch.float32).to(DEVICE) for size in (width, width, values)]
    tokens[2] += 1000
    tables = rotary_1d(steps, width, device=DEVICE) if rotary else None
    turns = None if tables is None else torch.stack((tables[0][:, ::2], tables[1][:, ::2]), dim=2).flatten(1)
    rule = rule_of(af.mechanisms()["mala"])
    assert rule is not None
    state = Statistics(*(None if x is None else x[:1] for x in nothing("mala", 1, width, values, rotary)))
    rest = Rest(covariance=torch.zeros_like(state.covariance)) if kept == "everything" else Rest()
    for i in range(steps):
        one, turn = [x[:, i : i + 1] for x in tokens], None if turns is None else turns[i : i + 1]
        _, state, rest = decode(one[0], one[1], one[2], state, rule, 0.3, turn, False, rest, kept != "nothing")
    parts = {"nothing": 0, "means": 2 + rotary, "everything": 3 + rotary}
    assert sum(x is not None for x in rest) == parts[kept]
    _, truth = defined(tokens, tables, "mala")
    for name, off in zip(Rest._fields, rest, strict=True):
        exact, ours = getattr(truth, name), getattr(state, name)
        if off is None or exact is None:
            continue
        # With what was rounded off, a mean is known to more digits than it has.
        bound = torch.finfo(torch.float32).eps / 4 if name != "covariance" else 2e-6
        assert (ours.double() + off.double() - exact).abs().max() <= bound * exact.abs().max(), name
    if kept != "nothing":
        plain = (state.value_mean.double() - truth.value_mean).abs().max()
        assert plain <= torch.finfo(torch.float32).eps * 1000


def test_what_is_rounded_off_may_be_written_over(randn: Randn):
    tokens = [randn(BATCH, 1, 1, width, dtype=torch.float32).to(DEVICE) for width in (8, 8, 8)]
    rule = rule_of(af.mechanisms()["mala"])
    assert rule is not None
    state = nothing("mala", 1, 8, 8, False)
    state.count.fill_(3)
    for part in (state.key_mean, state.value_mean, state.covariance):
        part.normal_()
    rest = Rest(*(1e-9 * torch.randn_like(x) for x in state[1:4]))
    anew = decode(*tokens, state, rule, 0.3, None, False, rest)
    copied = [Statistics(*(None if x is None else x.clone() for x in state)), Rest(*(x.clone() for x in rest[:3]))]
    over = decode(*tokens, copied[0], rule, 0.3, None, True, copied[1])
    assert over[1] is copied[0]
    assert over[2] is copied[1]
    for ours, others in ((anew[1], over[1]), (anew[2], over[2])):
        for x, y in zip(ours, others, strict=True):
            assert (x is None) == (y is None)
            assert x is None or torch.equal(x, y)

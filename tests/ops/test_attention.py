"""The linear-time backend against the definitions, and the identities that attention obeys."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import affinear as af
from affinear.ops import rotary_1d, rotary_2d, tiles
from affinear.ops.causal import causal_attention
from affinear.ops.rotary import Rotary

LINEAR = (
    "linear",
    "relu",
    "focused",
    "inline",
    "mala",
    "nala",
    "nala_cosine",
    "mala_released",
    "nala_released",
)
MECHANISMS = (*LINEAR, "softmax")
LENGTHS = (0, 1, 2, 7, 15, 16, 17, 63, 300)
WIDTHS = (1, 8, 24, 64, 96)
PAST = 5  # keys in an initial state

# ||out - truth|| / ||truth||, the truth being the reference in float64.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}

# Feature maps with zeros. Where a query and the keys share no channel, z is zero though rotated scores need not be, and
# the guarded gain of 1e12 leaves nothing to compare: beside rotary tables their tokens agree in each channel's sign.
WITH_ZEROS = ("relu", "focused", "nala", "nala_cosine", "nala_released")

Randn = Callable[..., Tensor]
Error = Callable[[Tensor, Tensor], float]
Tokens = tuple[Tensor, Tensor, Tensor]

every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)
every_linear_mechanism = pytest.mark.parametrize("mechanism", LINEAR)
causal_or_not = pytest.mark.parametrize("causal", [False, True])
with_and_without_rotary = pytest.mark.parametrize("rotated", [False, True])


def cu_seqlens(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


def draw_tokens(
    randn: Randn,
    mechanism: str,
    *,
    batch: int = 2,
    queries: int = 63,
    keys: int | None = None,
    heads: int = 6,
    key_heads: int = 3,
    width: int = 24,
    value_width: int = 10,
    rotated: bool = False,
) -> Tokens:
    """Gaussian queries (B, N, H, D), keys (B, M, G, D) and values (B, M, G, E)."""
    keys = queries if keys is None else keys
    query, key = randn(batch, queries, heads, width), randn(batch, keys, key_heads, width)
    if rotated and mechanism in WITH_ZEROS:
        sign = torch.where(randn(width) < 0, -1.0, 1.0)
        query, key = sign * (query.abs() + 0.5), sign * (key.abs() + 0.5)
    return query, key, randn(batch, keys, key_heads, value_width)


def leaves(*tensors: Tensor) -> Tokens:
    query, key, value = (x.detach().clone().requires_grad_() for x in tensors)
    return query, key, value


# The torch backend against the reference.


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of every kind there is. Packed sequences have their lengths in `queries` and `keys`; others have one."""

    mechanism: str
    seed: int
    batch: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: int
    key_heads: int
    width: int
    value_width: int
    causal: bool
    rotated: bool
    layout: str
    started: bool
    tile: int

    def tokens(self) -> tuple[Tensor, ...]:
        """Query, key, value, and the keys and values of the past, in float64 but exact in float32 too."""
        generator = torch.Generator().manual_seed(self.seed)
        sequences = len(self.queries) if self.layout == "packed" else self.batch
        one_sign = self.rotated and self.mechanism in WITH_ZEROS

        def sign(*shape: int) -> Tensor:
            return torch.randint(0, 2, shape, generator=generator) * 2.0 - 1

        channel = sign(self.width)

        def features(batch: int, length: int, heads: int) -> Tensor:
            # Away from zero: a divided row forgets the length of its query by a cancellation of terms in 1 / |q|.
            shape = (batch, length, heads, self.width)
            magnitude = 0.25 + 1.75 * torch.rand(shape, generator=generator)
            return (magnitude * (channel if one_sign else sign(*shape))).double()

        def values(batch: int, length: int) -> Tensor:
            return torch.randn(batch, length, self.key_heads, self.value_width, generator=generator).double()

        n, m = sum(self.queries), sum(self.keys)
        return (
            features(self.batch, n, self.heads),
            features(self.batch, m, self.key_heads),
            values(self.batch, m),
            features(sequences, PAST, self.key_heads),
            values(sequences, PAST),
        )

    def call(self, tokens: tuple[Tensor, ...], backend: str) -> tuple[Tensor, af.State | None]:
        query, key, value, past_key, past_value = tokens
        options: dict[str, Any] = {"causal": self.causal, "backend": backend}
        past_tables = None
        if self.rotated:
            cos, sin = rotary_1d(PAST + query.shape[1], self.width)
            past_tables, options["rotary"] = (cos[:PAST], sin[:PAST]), (cos[PAST:], sin[PAST:])
        if self.layout == "masked":
            generator = torch.Generator().manual_seed(self.seed)
            mask = torch.rand(key.shape[:2], generator=generator) < 0.7
            mask[:1] &= self.seed % 2 == 0  # half of the time the first batch entry sees nothing at all
            options["key_mask"] = mask
        if self.layout == "packed":
            options["cu_seqlens_q"], options["cu_seqlens_k"] = cu_seqlens(self.queries), cu_seqlens(self.keys)
        if self.started:
            options["initial_state"] = af.summarize(
                past_key, past_value, self.mechanism, rotary=past_tables, backend=backend
            )
        if self.mechanism == "softmax":
            return af.attention(query, key, value, self.mechanism, **options), None
        return af.attention(query, key, value, self.mechanism, return_state=True, **options)


@st.composite
def cases(draw: st.DrawFn, mechanism: str) -> Case:
    layout = draw(st.sampled_from(("plain", "masked", "packed")))
    causal, rotated = draw(st.booleans()), draw(st.booleans())
    number = draw(st.integers(1, 5)) if layout == "packed" else 1
    length = st.sampled_from((0, 1, 2, 7, 17, 63) if layout == "packed" else LENGTHS)
    lengths = st.lists(length, min_size=number, max_size=number).map(tuple)
    queries = draw(lengths)
    keys = queries if causal or rotated else draw(lengths)
    large = max(*queries, *keys) > 100
    widths = WIDTHS[1:] if rotated else WIDTHS
    if rotated and mechanism == "mala_released":
        # It weighs the mean value by beta * rotated z - z: over few keys a small difference of numbers like sqrt(D).
        widths = (8, 24)
    heads, key_heads = draw(st.sampled_from(((3, 3), (4, 2), (6, 3), (5, 1))))
    return Case(
        mechanism=mechanism,
        seed=draw(st.integers(0, 2**32 - 1)),
        batch=1 if large or layout == "packed" else draw(st.integers(1, 3)),
        queries=queries,
        keys=keys,
        heads=heads,
        key_heads=key_heads,
        width=draw(st.sampled_from(widths)),
        value_width=draw(st.sampled_from((2, 5) if large else (2, 5, 40))),
        causal=causal,
        rotated=rotated,
        layout=layout,
        started=mechanism != "softmax" and draw(st.booleans()),
        tile=draw(st.sampled_from((16, 10_000))),
    )


def flat(state: af.State) -> Tensor:
    """All statistics of a state in one vector."""
    means = (state.key_mean, state.value_mean, state.covariance, state.rotated_key_mean)
    return torch.cat([x.flatten() for x in means if x is not None])


@every_mechanism
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_torch_backend_computes_what_the_papers_define(mechanism: str, relative_error: Error, data: st.DataObject):
    case = data.draw(cases(mechanism))
    tokens = [x.requires_grad_() for x in case.tokens()]
    truth, truth_state = case.call(tuple(tokens), "reference")
    cotangent = torch.randn(truth.shape, generator=torch.Generator().manual_seed(case.seed)).double()
    truths = torch.autograd.grad(truth, tokens, cotangent, materialize_grads=True)
    # A gradient may vanish by cancellation (one key is the whole row, one channel drops out of a divided row), so all
    # are measured together here; the next test measures each by itself, where none vanishes.
    truth_gradient = torch.cat([x.flatten() for x in truths])

    for dtype, tolerance in TOLERANCE.items():
        inputs = [x.detach().to(dtype).requires_grad_() for x in tokens]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "tile_length", lambda _: case.tile)
            out, state = case.call(tuple(inputs), "torch")
            gradients = torch.autograd.grad(out, inputs, cotangent.to(dtype), materialize_grads=True)
        assert out.dtype == dtype
        assert relative_error(out, truth) <= tolerance
        if state is not None and truth_state is not None:
            assert torch.equal(state.count, truth_state.count)
            assert relative_error(flat(state), flat(truth_state)) <= tolerance
        gradient = torch.cat([x.flatten() for x in gradients])
        assert relative_error(gradient, truth_gradient) <= tolerance


@every_mechanism
@causal_or_not
@with_and_without_rotary
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_each_gradient_by_itself_is_as_exact_as_the_answer(
    mechanism: str, causal: bool, rotated: bool, dtype: torch.dtype, randn: Randn, relative_error: Error
):
    tokens = [x.to(dtype) for x in draw_tokens(randn, mechanism, rotated=rotated)]
    cotangent = randn(2, 63, 6, 10, dtype=dtype)
    rotary = rotary_1d(63, 24) if rotated else None
    inputs, exact = leaves(*tokens), leaves(*(x.double() for x in tokens))
    out = af.attention(*inputs, mechanism, causal=causal, rotary=rotary)
    truth = af.attention(*exact, mechanism, causal=causal, rotary=rotary, backend="reference")
    out.backward(cotangent)
    truth.backward(cotangent.double())
    assert relative_error(out, truth) <= TOLERANCE[dtype]
    for x, expected in zip(inputs, exact, strict=True):
        assert x.grad is not None
        assert expected.grad is not None
        assert relative_error(x.grad, expected.grad) <= TOLERANCE[dtype]


@every_mechanism
@causal_or_not
@with_and_without_rotary
def test_calls_larger_than_the_cache_are_no_different(
    mechanism: str, causal: bool, rotated: bool, randn: Randn, relative_error: Error
):
    tokens = draw_tokens(randn, mechanism, batch=3, queries=300, heads=4, key_heads=4, width=96, rotated=rotated)
    mask, cotangent = randn(3, 300) < 1, randn(3, 300, 4, 10)
    rotary = rotary_1d(300, 96) if rotated else None
    inputs, exact = leaves(*tokens), leaves(*tokens)
    out = af.attention(*inputs, mechanism, causal=causal, key_mask=mask, rotary=rotary)
    truth = af.attention(*exact, mechanism, causal=causal, key_mask=mask, rotary=rotary, backend="reference")
    assert relative_error(out, truth) <= 1e-12
    for gradient, expected in zip(
        torch.autograd.grad(out, inputs, cotangent), torch.autograd.grad(truth, exact, cotangent), strict=True
    ):
        assert relative_error(gradient, expected) <= 1e-12


@every_mechanism
@causal_or_not
def test_every_length_goes_with_every_width(mechanism: str, causal: bool, randn: Randn, relative_error: Error):
    for length, width in itertools.product(LENGTHS, WIDTHS):
        tokens = draw_tokens(
            randn, mechanism, batch=1, queries=length, heads=3, key_heads=3, width=width, value_width=5
        )
        out = af.attention(*tokens, mechanism, causal=causal)
        truth = af.attention(*tokens, mechanism, causal=causal, backend="reference")
        assert relative_error(out, truth) <= 1e-12, (length, width)


@every_mechanism
@causal_or_not
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_answers_are_the_exact_ones_rounded_once(
    mechanism: str, causal: bool, dtype: torch.dtype, randn: Randn
):
    query, key, value = (x.to(dtype) for x in draw_tokens(randn, mechanism))
    out = af.attention(query, key, value, mechanism, causal=causal)
    truth = af.attention(query.double(), key.double(), value.double(), mechanism, causal=causal, backend="reference")
    assert out.dtype == dtype
    # Half a unit in the last place, and the rounding of float32 sums that happen to cancel.
    half_a_unit = torch.finfo(dtype).eps / 2 * truth.abs() + torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((out.double() - truth).abs() <= half_a_unit + 2e-6 * truth.abs().max()).all()


@every_mechanism
def test_auto_is_the_torch_backend(mechanism: str, randn: Randn):
    tokens = draw_tokens(randn, mechanism)
    assert torch.equal(af.attention(*tokens, mechanism), af.attention(*tokens, mechanism, backend="torch"))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_mala_is_the_default_and_the_scale_that_of_the_head_width(backend: str, randn: Randn):
    tokens = draw_tokens(randn, "mala")
    expected = af.attention(*tokens, "mala", scale=24**-0.5, backend=backend)
    assert torch.equal(af.attention(*tokens, backend=backend), expected)


@pytest.mark.parametrize("mechanism", ["inline", "mala", "mala_released", "softmax"])
@causal_or_not
def test_a_scale_multiplies_the_scores(mechanism: str, causal: bool, randn: Randn, relative_error: Error):
    tokens = draw_tokens(randn, mechanism)
    out = af.attention(*tokens, mechanism, causal=causal, scale=0.7)
    truth = af.attention(*tokens, mechanism, causal=causal, scale=0.7, backend="reference")
    assert relative_error(out, truth) <= 1e-12
    assert relative_error(out, af.attention(*tokens, mechanism, causal=causal)) > 1e-2


# What a call may be split into.


@every_mechanism
@causal_or_not
def test_packed_sequences_equal_separate_calls(mechanism: str, causal: bool, randn: Randn, relative_error: Error):
    lengths = (7, 0, 70, 1, 15, 130)
    bounds = cu_seqlens(lengths)
    query, key, value = draw_tokens(randn, mechanism, batch=1, queries=sum(lengths))
    out = af.attention(query, key, value, mechanism, causal=causal, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    separate = [
        af.attention(q, k, v, mechanism, causal=causal)
        for q, k, v in zip(*(x.split(lengths, dim=1) for x in (query, key, value)), strict=True)
    ]
    assert relative_error(out, torch.cat(separate, dim=1)) <= 1e-12


@every_mechanism
def test_packed_sequences_may_ask_about_more_or_fewer_keys_than_they_have_queries(
    mechanism: str, randn: Randn, relative_error: Error
):
    queries, keys = (7, 0, 70, 5, 15), (16, 3, 65, 0, 1)
    query, key, value = draw_tokens(randn, mechanism, batch=1, queries=sum(queries), keys=sum(keys))
    out = af.attention(
        query, key, value, mechanism, cu_seqlens_q=cu_seqlens(queries), cu_seqlens_k=cu_seqlens(keys).int()
    )
    separate = [
        af.attention(q, k, v, mechanism)
        for q, k, v in zip(query.split(queries, 1), key.split(keys, 1), value.split(keys, 1), strict=True)
    ]
    assert relative_error(out, torch.cat(separate, dim=1)) <= 1e-12
    assert (out[:, 77:82] == 0).all()  # the five queries of the sequence without keys


@every_linear_mechanism
@pytest.mark.parametrize("chunk", [1, 7, 16, 200])
@pytest.mark.parametrize("packed", [False, True])
def test_the_chunk_size_does_not_matter(mechanism: str, chunk: int, packed: bool, randn: Randn, relative_error: Error):
    query, key, value = draw_tokens(randn, mechanism, batch=1, queries=150, rotated=True)
    bounds = cu_seqlens((70, 0, 1, 79)) if packed else None
    rule, rotary = af.mechanisms()[mechanism], rotary_1d(150, 24)
    out, state = causal_attention(query, key, value, rule, 0.2, cu_seqlens=bounds, rotary=rotary, chunk=chunk)
    expected, expected_state = af.attention(
        query,
        key,
        value,
        mechanism,
        scale=0.2,
        causal=True,
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        rotary=rotary,
        return_state=True,
    )
    assert relative_error(out, expected) <= 1e-12
    assert relative_error(flat(state), flat(expected_state)) <= 1e-12


@every_mechanism
@with_and_without_rotary
def test_causal_attention_is_attention_over_each_prefix(
    mechanism: str, rotated: bool, randn: Randn, relative_error: Error
):
    query, key, value = draw_tokens(randn, mechanism, queries=17, rotated=rotated)
    tables = rotary_1d(17, 24) if rotated else None

    def last_of(n: int) -> Tensor:
        rotary = None if tables is None else (tables[0][:n], tables[1][:n])
        return af.attention(query[:, :n], key[:, :n], value[:, :n], mechanism, rotary=rotary)[:, -1]

    prefixes = torch.stack([last_of(n) for n in range(1, 18)], dim=1)
    assert relative_error(af.attention(query, key, value, mechanism, causal=True, rotary=tables), prefixes) <= 1e-12


@every_mechanism
def test_causal_attention_knows_nothing_of_the_future(mechanism: str, randn: Randn, relative_error: Error):
    query, key, value = draw_tokens(randn, mechanism, queries=150)
    before = af.attention(query, key, value, mechanism, causal=True)
    key[:, 100:], value[:, 100:] = 3 * randn(2, 50, 3, 24), 3 * randn(2, 50, 3, 10)
    after = af.attention(query, key, value, mechanism, causal=True)
    assert relative_error(after[:, :100], before[:, :100]) <= 1e-12


@every_linear_mechanism
@with_and_without_rotary
@pytest.mark.parametrize("masked", [False, True])
def test_decoding_one_token_at_a_time_equals_the_causal_call(
    mechanism: str, rotated: bool, masked: bool, randn: Randn, relative_error: Error
):
    query, key, value = draw_tokens(randn, mechanism, queries=70, rotated=rotated)
    tables = rotary_1d(70, 24) if rotated else None
    mask = randn(2, 70) < 0.5 if masked else None
    state, steps = None, []
    for t in range(70):
        token = slice(t, t + 1)
        step, state = af.attention(
            query[:, token],
            key[:, token],
            value[:, token],
            mechanism,
            causal=True,
            key_mask=None if mask is None else mask[:, token],
            rotary=None if tables is None else (tables[0][token], tables[1][token]),
            initial_state=state,
            return_state=True,
        )
        steps.append(step)
    assert state is not None
    for backend in ("torch", "reference"):
        whole, final = af.attention(
            query,
            key,
            value,
            mechanism,
            causal=True,
            key_mask=mask,
            rotary=tables,
            return_state=True,
            backend=backend,
        )
        assert relative_error(torch.cat(steps, dim=1), whole) <= 1e-12
        assert torch.equal(state.count, final.count)
        assert relative_error(flat(state), flat(final)) <= 1e-12


@every_linear_mechanism
@causal_or_not
@with_and_without_rotary
@pytest.mark.parametrize("cut", [0, 1, 64, 90])
def test_continuing_from_a_state_equals_one_call(
    mechanism: str, causal: bool, rotated: bool, cut: int, randn: Randn, relative_error: Error
):
    query, key, value = draw_tokens(randn, mechanism, queries=90, rotated=rotated)
    tables = rotary_1d(90, 24) if rotated else None

    def half(part: slice, state: af.State | None) -> tuple[Tensor, af.State]:
        return af.attention(
            query[:, part],
            key[:, part],
            value[:, part],
            mechanism,
            causal=causal,
            rotary=None if tables is None else (tables[0][part], tables[1][part]),
            initial_state=state,
            return_state=True,
        )

    first, state = half(slice(0, cut), None)
    rest, final = half(slice(cut, 90), state)
    whole, whole_state = af.attention(
        query, key, value, mechanism, causal=causal, rotary=tables, return_state=True, backend="reference"
    )
    assert relative_error(rest, whole[:, cut:]) <= 1e-12
    assert relative_error(flat(final), flat(whole_state)) <= 1e-12
    if causal:
        assert relative_error(first, whole[:, :cut]) <= 1e-12


@every_linear_mechanism
@with_and_without_rotary
def test_attention_is_summarize_then_attend(mechanism: str, rotated: bool, randn: Randn, relative_error: Error):
    query, key, value = draw_tokens(randn, mechanism, rotated=rotated)
    tables = rotary_1d(63, 24) if rotated else None
    for backend in ("torch", "reference"):
        state = af.summarize(key, value, mechanism, rotary=tables, backend=backend)
        out = af.attend(query, state, rotary=tables, backend=backend)
        whole = af.attention(query, key, value, mechanism, rotary=tables, backend=backend)
        assert relative_error(out, whole) <= 1e-12


@every_linear_mechanism
def test_a_state_answers_queries_at_positions_of_their_own(mechanism: str, randn: Randn, relative_error: Error):
    query, key, value = draw_tokens(randn, mechanism, rotated=True)
    cos, sin = rotary_1d(63, 24)
    state = af.summarize(key[:, :40], value[:, :40], mechanism, rotary=(cos[:40], sin[:40]))
    out = af.attend(query[:, 40:], state, rotary=(cos[40:], sin[40:]))
    first = (torch.arange(63) < 40).expand(2, -1)
    truth = af.attention(query, key, value, mechanism, key_mask=first, rotary=(cos, sin), backend="reference")
    assert relative_error(out, truth[:, 40:]) <= 1e-12


# What does not matter to the answer.


@every_mechanism
@with_and_without_rotary
def test_the_order_of_keys_does_not_matter(mechanism: str, rotated: bool, randn: Randn, relative_error: Error):
    query, key, value = draw_tokens(randn, mechanism, rotated=rotated)
    if not rotated:
        order = randn(63).argsort()
        shuffled = af.attention(query, key[:, order], value[:, order], mechanism)
        assert relative_error(shuffled, af.attention(query, key, value, mechanism)) <= 1e-12
        return
    # With positions the tokens move together with theirs.
    order, tables = randn(63).argsort(), rotary_1d(63, 24)
    moved: Rotary = (tables[0][order], tables[1][order])
    shuffled = af.attention(query[:, order], key[:, order], value[:, order], mechanism, rotary=moved)
    assert relative_error(shuffled, af.attention(query, key, value, mechanism, rotary=tables)[:, order]) <= 1e-12


@every_mechanism
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_masked_key_is_an_absent_key_whatever_it_holds(
    mechanism: str, backend: str, randn: Randn, relative_error: Error
):
    query, key, value = draw_tokens(randn, mechanism)
    present = randn(63).argsort() < 40
    key[:, ~present], value[:, ~present] = torch.nan, torch.inf
    out = af.attention(query, key, value, mechanism, key_mask=present.expand(2, -1), backend=backend)
    absent = af.attention(query, key[:, present], value[:, present], mechanism, backend=backend)
    assert relative_error(out, absent) <= 1e-12


@every_mechanism
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_masked_token_is_absent_from_causal_attention_too(
    mechanism: str, backend: str, randn: Randn, relative_error: Error
):
    query, key, value = draw_tokens(randn, mechanism, queries=100)
    present = randn(100).argsort() < 60
    key[:, ~present], value[:, ~present] = torch.nan, torch.nan
    mask = present.expand(2, -1)
    out = af.attention(query, key, value, mechanism, causal=True, key_mask=mask, backend=backend)
    absent = af.attention(
        query[:, present], key[:, present], value[:, present], mechanism, causal=True, backend=backend
    )
    assert relative_error(out[:, present], absent) <= 1e-12
    assert out.isfinite().all()


@every_mechanism
@causal_or_not
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_masked_tokens_get_a_gradient_of_exactly_zero(mechanism: str, causal: bool, backend: str, randn: Randn):
    query, key, value = draw_tokens(randn, mechanism)
    mask = randn(2, 63) < 0.5
    mask[1, :9] = False  # queries that see nothing, in the causal call
    hidden = ~mask
    key[hidden], value[hidden] = torch.nan, torch.nan
    query, key, value = leaves(query, key, value)
    af.attention(query, key, value, mechanism, causal=causal, key_mask=mask, backend=backend).square().sum().backward()
    assert query.grad is not None
    assert key.grad is not None
    assert value.grad is not None
    assert (key.grad[hidden] == 0).all()
    assert (value.grad[hidden] == 0).all()
    assert key.grad.isfinite().all()
    assert value.grad[mask].ne(0).any()
    assert query.grad.isfinite().all()


@every_mechanism
@causal_or_not
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_row_without_keys_is_zero_and_passes_no_gradient(mechanism: str, causal: bool, backend: str, randn: Randn):
    query, key, value = leaves(*draw_tokens(randn, mechanism))
    mask = torch.ones(2, 63, dtype=torch.bool)
    mask[0] = False
    out = af.attention(query, key, value, mechanism, causal=causal, key_mask=mask, backend=backend)
    assert (out[0] == 0).all()
    assert out[1].ne(0).any()
    out.sum().backward()
    for x in (query, key, value):
        assert x.grad is not None
        assert (x.grad[0] == 0).all()
        assert x.grad.isfinite().all()


@every_mechanism
@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 5), (5, 0)])
def test_nothing_asks_and_nothing_answers(mechanism: str, backend: str, queries: int, keys: int, randn: Randn):
    query, key, value = leaves(*draw_tokens(randn, mechanism, queries=queries, keys=keys))
    out = af.attention(query, key, value, mechanism, backend=backend)
    assert torch.equal(out, torch.zeros(2, queries, 6, 10, dtype=torch.float64))
    for gradient in torch.autograd.grad(out.sum(), (query, key, value), materialize_grads=True):
        assert (gradient == 0).all()


@every_mechanism
@causal_or_not
def test_any_strides_are_read_as_they_are(mechanism: str, causal: bool, randn: Randn):
    def same(*tokens: Tensor) -> None:
        out = af.attention(tokens[0], tokens[1], tokens[2], mechanism, causal=causal)
        contiguous = [x.contiguous() for x in tokens]
        expected = af.attention(contiguous[0], contiguous[1], contiguous[2], mechanism, causal=causal)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)

    same(*randn(3, 2, 6, 40, 24).transpose(2, 3).unbind())  # heads before tokens
    same(*randn(2, 40, 3, 6, 24).unbind(2))  # a fused projection
    same(*randn(3, 24, 6, 40, 2).permute(0, 4, 3, 2, 1).unbind())  # everything backwards
    same(*randn(3, 2, 80, 6, 48)[:, :, 5:75:2, :, ::2].unbind())  # every other token and channel
    same(*randn(3, 2, 40, 6, 25)[..., 1:].unbind())  # not aligned
    same(randn(2, 40, 6, 24), randn(1, 40, 1, 24).expand(2, -1, 6, -1), randn(2, 1, 6, 10).expand(-1, 40, -1, -1))


@every_mechanism
@causal_or_not
def test_a_shared_key_head_is_a_repeated_one(mechanism: str, causal: bool, randn: Randn, relative_error: Error):
    query, key, value = draw_tokens(randn, mechanism, heads=6, key_heads=2)
    out = af.attention(query, key, value, mechanism, causal=causal)
    repeated = [x.repeat_interleave(3, dim=2) for x in (key, value)]
    assert relative_error(out, af.attention(query, repeated[0], repeated[1], mechanism, causal=causal)) <= 1e-12


@every_mechanism
@causal_or_not
def test_heads_and_batch_entries_do_not_mix(mechanism: str, causal: bool, randn: Randn, relative_error: Error):
    query, key, value = draw_tokens(randn, mechanism, heads=3, key_heads=3)
    out = af.attention(query, key, value, mechanism, causal=causal)
    one = [x[1:, :, 2:] for x in (query, key, value)]
    assert relative_error(out[1:, :, 2:], af.attention(one[0], one[1], one[2], mechanism, causal=causal)) <= 1e-12


@every_mechanism
def test_queries_may_be_more_or_fewer_than_keys(mechanism: str, randn: Randn, relative_error: Error):
    for queries, keys in ((1, 300), (300, 1), (17, 63), (63, 16)):
        tokens = draw_tokens(randn, mechanism, queries=queries, keys=keys)
        out = af.attention(*tokens, mechanism)
        assert out.shape == (2, queries, 6, 10)
        assert relative_error(out, af.attention(*tokens, mechanism, backend="reference")) <= 1e-12


@every_mechanism
def test_answers_are_linear_in_the_values(mechanism: str, randn: Randn, relative_error: Error):
    query, key, value = draw_tokens(randn, mechanism)
    other = randn(2, 63, 3, 10)

    def answer(values: Tensor) -> Tensor:
        return af.attention(query, key, values, mechanism, causal=True)

    assert relative_error(answer(2 * value - 3 * other), 2 * answer(value) - 3 * answer(other)) <= 1e-12


@every_mechanism
def test_two_dimensional_positions_work_like_any_other(mechanism: str, randn: Randn, relative_error: Error):
    tokens = draw_tokens(randn, mechanism, queries=7 * 9, rotated=True)
    rotary = rotary_2d(7, 9, 24)
    out = af.attention(*tokens, mechanism, rotary=rotary)
    assert relative_error(out, af.attention(*tokens, mechanism, rotary=rotary, backend="reference")) <= 1e-12
    assert relative_error(out, af.attention(*tokens, mechanism)) > 1e-3


# Mechanisms of one's own.


def cosh_gain(z: Tensor) -> Tensor:
    return 0.3 + z.square()


def a_third_of_the_mean(z: Tensor, rotated_z: Tensor) -> Tensor:
    return 1 / 3 + 0.1 * z - 0.2 * rotated_z


def odd_and_even(x: Tensor) -> Tensor:
    return torch.cat((x.sin(), x.square(), x), dim=-1)


OWN = af.Mechanism("own", odd_and_even, odd_and_even, cosh_gain, nonnegative=False, paper="none", scale=0.1)


@pytest.mark.parametrize("mechanism", [OWN, dataclasses.replace(OWN, mean_weight=a_third_of_the_mean)])
@causal_or_not
@with_and_without_rotary
def test_a_mechanism_of_your_own_works_with_both_backends(
    mechanism: af.Mechanism, causal: bool, rotated: bool, randn: Randn, relative_error: Error
):
    tokens = draw_tokens(randn, mechanism.name)
    rotary = rotary_1d(63, 24) if rotated else None
    inputs, exact = leaves(*tokens), leaves(*tokens)
    out = af.attention(*inputs, mechanism, causal=causal, rotary=rotary)
    truth = af.attention(*exact, mechanism, causal=causal, rotary=rotary, backend="reference")
    assert relative_error(out, truth) <= 1e-12
    for gradient, expected in zip(
        torch.autograd.grad(out.square().sum(), inputs), torch.autograd.grad(truth.square().sum(), exact), strict=True
    ):
        assert relative_error(gradient, expected) <= 1e-12


@causal_or_not
def test_a_mechanism_is_known_by_its_gain_and_not_by_its_name(causal: bool, randn: Randn, relative_error: Error):
    tokens = draw_tokens(randn, "inline")
    louder = dataclasses.replace(af.mechanisms()["inline"], gain=cosh_gain)
    out = af.attention(*tokens, louder, causal=causal)
    assert relative_error(out, af.attention(*tokens, louder, causal=causal, backend="reference")) <= 1e-12


# Softmax.


def heads_first(*tokens: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tokens]


@causal_or_not
def test_softmax_is_torch_s_own(causal: bool, randn: Randn, relative_error: Error):
    query, key, value = draw_tokens(randn, "softmax")
    q, k, v = heads_first(query, key, value)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True).transpose(1, 2)
    assert relative_error(af.attention(query, key, value, "softmax", causal=causal), expected) <= 1e-12


def test_softmax_takes_a_mask_as_torch_does(randn: Randn, relative_error: Error):
    query, key, value = draw_tokens(randn, "softmax", key_heads=6)
    mask = randn(2, 63) < 0.5
    q, k, v = heads_first(query, key, value)
    expected = F.scaled_dot_product_attention(q, k, v, mask[:, None, None]).transpose(1, 2)
    assert relative_error(af.attention(query, key, value, "softmax", key_mask=mask), expected) <= 1e-12


@pytest.mark.parametrize("learns", [False, True])
def test_softmax_writes_no_mask_of_all_pairs(learns: bool):
    class Largest(TorchDispatchMode):
        entries = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **kwargs or {})
            found = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
            self.entries = max([self.entries, *(x.untyped_storage().nbytes() // x.itemsize for x in found)])
            return out

    tokens = 600
    query, key, value = (torch.randn(2, tokens, 2, 8, requires_grad=learns) for _ in range(3))
    mask = torch.rand(2, tokens) > 0.5
    with Largest() as seen:
        out = af.attention(query, key, value, "softmax", key_mask=mask)
        if learns:
            torch.autograd.grad(out.sum(), (query, key, value))
    assert seen.entries < tokens**2

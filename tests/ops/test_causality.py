"""A later token does not reach an earlier row, whatever it holds; nor does a packed neighbour."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import affinear as af
from affinear.ops import rotary_1d, softmax, tiles

Randn = Callable[..., Tensor]
Tokens = tuple[Tensor, Tensor, Tensor]

LENGTH, WIDTH = 90, 4  # two chunks
WILD = [math.nan, math.inf, -math.inf, 3e38]
MECHANISMS = list(af.mechanisms())


def draw(randn: Randn, dtype: torch.dtype = torch.float32) -> Tokens:
    """Two queries to a key."""
    query, key, value = (randn(1, LENGTH, heads, WIDTH, dtype=dtype) for heads in (4, 2, 2))
    return query, key, value


def answers(tokens: Tokens, rows: slice, **options: Any) -> list[Tensor]:
    """Some rows, and the gradients of a loss over them that they can have a part in."""
    tokens = tuple(x.clone().requires_grad_() for x in tokens)  # pyright: ignore[reportAssignmentType]
    out = af.attention(*tokens, **options)[:, rows]
    return [out, *(x[:, rows] for x in torch.autograd.grad(out.square().sum(), tokens))]


def with_wild_token(tokens: Tokens, place: int, wild: float, token: int) -> Tokens:
    """The same, with one number of one query, key or value made wild."""
    changed = [x.clone() for x in tokens]
    changed[place][:, token, 0, 1] = wild
    return tuple(changed)  # pyright: ignore[reportReturnType]


def assert_bits_are_kept(tokens: Tokens, wild: float, place: int, rows: slice, token: int, **options: Any) -> None:
    expected = answers(tokens, rows, **options)
    got = answers(with_wild_token(tokens, place, wild, token), rows, **options)
    for x, truth in zip(got, expected, strict=True):
        assert torch.equal(x, truth)


@pytest.mark.parametrize("wild", WILD)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_earlier_rows_and_their_gradients_keep_their_bits(mechanism: str, wild: float, randn: Randn):
    tokens = draw(randn)
    for place in range(3):
        for token in (9, 80):
            rows = slice(0, token)
            assert_bits_are_kept(tokens, wild, place, rows, token, mechanism=mechanism, causal=True)
            rotary = rotary_1d(LENGTH, WIDTH)
            assert_bits_are_kept(tokens, wild, place, rows, token, mechanism=mechanism, causal=True, rotary=rotary)


@pytest.mark.parametrize("wild", WILD)
@pytest.mark.parametrize("mechanism", ["mala", "nala_released"])
def test_so_they_do_tile_by_tile_and_behind_a_state(
    mechanism: str, wild: float, randn: Randn, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tiles, "CPU_TILE", 1)
    tokens = draw(randn)
    state = af.summarize(*tokens[1:], mechanism)
    for place in range(3):
        options = {"mechanism": mechanism, "causal": True, "initial_state": state}
        assert_bits_are_kept(tokens, wild, place, slice(0, 40), 40, **options)


@pytest.mark.parametrize("wild", WILD[:3])
@pytest.mark.parametrize("mechanism", ["mala", "inline", "nala", "softmax"])
def test_so_they_do_by_definition(mechanism: str, wild: float, randn: Randn):
    tokens = draw(randn)
    for place in range(3):
        options = {"mechanism": mechanism, "causal": True, "backend": "reference"}
        assert_bits_are_kept(tokens, wild, place, slice(0, 40), 40, **options)


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mechanism", ["mala", "nala", "softmax"])
def test_packed_neighbours_keep_their_bits(mechanism: str, causal: bool, backend: str, randn: Randn):
    tokens, bounds = draw(randn), torch.tensor([0, 30, 62, LENGTH])
    options = {"mechanism": mechanism, "causal": causal, "backend": backend}
    for place in range(3):
        for rows in (slice(0, 30), slice(62, None)):
            assert_bits_are_kept(tokens, math.nan, place, rows, 40, cu_seqlens_q=bounds, cu_seqlens_k=bounds, **options)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_rows_that_see_it_do_not_hide_it(mechanism: str, randn: Randn):
    tokens = draw(randn)
    for place in range(3):
        wild = with_wild_token(tokens, place, math.nan, 9)
        out = af.attention(*wild, mechanism, causal=True)
        seen = out[:, 9:, :2] if place else out[:, 9:10, :1]  # the first key has the first two queries
        if place == 2:
            seen = seen[..., 1]
        assert seen.isnan().all()
        assert out[:, :, 2:].isfinite().all()
        if af.mechanisms()[mechanism].gain is not None and place:
            _, state = af.attention(*wild, mechanism, causal=True, return_state=True)
            assert state.covariance[:, 0].isnan().any()


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens as on a GPU: nobody looks at their numbers before the answers are there."""
    monkeypatch.setattr(softmax, "can_be_read", lambda x: False)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize("wild", WILD[:3])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_softmax_keeps_the_bits_of_what_it_cannot_look_at(masked: bool, wild: float, randn: Randn):
    tokens = draw(randn)
    mask = torch.arange(LENGTH)[None] % 7 != 3 if masked else None
    for place in range(3):
        options: dict[str, Any] = {"mechanism": "softmax", "causal": True, "key_mask": mask}
        assert_bits_are_kept(tokens, wild, place, slice(0, 40), 40, **options)
        out = af.attention(*with_wild_token(tokens, place, wild, 40), **options)
        seen = out[:, 40:, :2] if place else out[:, 40:41, :1]
        assert (seen[..., 1] if place == 2 else seen).isnan().all()
        assert out[:, 41:, 2:].isfinite().all()
        assert out[:, 41:].isfinite().all() or place


@pytest.mark.usefixtures("unread")
def test_a_masked_token_reaches_nobody_and_a_row_without_a_key_is_zero(randn: Randn):
    tokens = draw(randn)
    mask = torch.arange(LENGTH)[None] > 20
    options: dict[str, Any] = {"mechanism": "softmax", "causal": True, "key_mask": mask}
    for place in (1, 2):
        assert_bits_are_kept(tokens, math.nan, place, slice(0, LENGTH), 10, **options)
    assert not af.attention(*with_wild_token(tokens, 0, math.nan, 10), **options)[:, :21].any()


COMPILED = [
    ("mala", 0),
    ("softmax", 2),
    *(pytest.param("mala", place, marks=pytest.mark.exhaustive) for place in (1, 2)),
]


@pytest.mark.parametrize(("mechanism", "place"), COMPILED)
def test_compiled_rows_keep_their_bits_too(mechanism: str, place: int, randn: Randn):
    tokens = draw(randn)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return af.attention(query, key, value, mechanism, causal=True)

    def gradients(tokens: Tokens) -> list[Tensor]:
        tokens = tuple(x.clone().requires_grad_() for x in tokens)  # pyright: ignore[reportAssignmentType]
        out = run(*tokens)[:, :80]
        return [out, *(x[:, :80] for x in torch.autograd.grad(out.square().sum(), tokens))]

    for x, truth in zip(gradients(with_wild_token(tokens, place, math.nan, 80)), gradients(tokens), strict=True):
        assert torch.equal(x, truth)


def test_half_precision_keeps_its_bits(randn: Randn):
    for dtype in (torch.float16, torch.bfloat16):
        assert_bits_are_kept(draw(randn, dtype), math.inf, 2, slice(0, 80), 80, causal=True)


@pytest.mark.parametrize("wild", WILD)
@pytest.mark.parametrize("queries", [LENGTH, 40])
@pytest.mark.parametrize("masked", [False, True])
def test_so_they_do_where_the_latest_tokens_ask_softmax(wild: float, queries: int, masked: bool, randn: Randn):
    def latest(tokens: Tokens) -> list[Tensor]:
        query, key, value = (x.clone().requires_grad_() for x in tokens)
        out = softmax.attend_latest(query[:, -queries:], key, value, mask)[:, : 80 - LENGTH]
        return [out, *(x[:, :80] for x in torch.autograd.grad(out.square().sum(), (query, key, value)))]

    tokens = draw(randn)
    mask = torch.arange(LENGTH)[None] != 7 if masked else None
    expected = latest(tokens)
    for place in range(3):
        for got, truth in zip(latest(with_wild_token(tokens, place, wild, 80)), expected, strict=True):
            torch.testing.assert_close(got, truth, atol=1e-5, rtol=1e-5)

"""Sequences laid end to end answer as they would alone, and chunks lose no token."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import affinear as af
from affinear.ops import rotary_1d
from affinear.ops.packing import packed_chunks, plain_chunks, sequence_of_each_token, visibility

MECHANISMS = list(af.mechanisms())
LINEAR = [name for name, mechanism in af.mechanisms().items() if mechanism.gain is not None]
HEADS, KEY_HEADS, WIDTH, VALUES = 4, 2, 6, 3
LENGTHS = (5, 0, 1, 64, 130, 0, 0, 63, 65, 2, 0)

causal_or_not = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def starts(lengths: tuple[int, ...]) -> Tensor:
    """Where each sequence begins, and the end of the last."""
    return torch.tensor([0, *itertools.accumulate(lengths)])


def tokens(queries: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Packed queries, keys and values in float64; channels of one sign, so that z does not cancel."""
    keys = queries if keys is None else keys
    query, key = torch.rand(1, queries, HEADS, WIDTH), torch.rand(1, keys, KEY_HEADS, WIDTH)
    return query.double() + 0.1, key.double() + 0.1, torch.randn(1, keys, KEY_HEADS, VALUES).double()


def alone(
    inputs: tuple[Tensor, Tensor, Tensor],
    queries: tuple[int, ...],
    keys: tuple[int, ...],
    mechanism: str,
    past: af.State | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """Each sequence in a call of its own, laid end to end afterwards."""
    answers = []
    pieces = zip(*(x.split(n, dim=1) for x, n in zip(inputs, (queries, keys, keys), strict=True)), strict=True)
    for number, (query, key, value) in enumerate(pieces):
        if past is not None:
            options["initial_state"] = past.map(lambda x, i=number: x[i : i + 1])
        if rotary is not None:
            own = slice(int(starts(queries)[number]), int(starts(queries)[number + 1]))
            options["rotary"] = (rotary[0][own], rotary[1][own])
        answers.append(af.attention(query, key, value, mechanism, **options))
    return torch.cat(answers, dim=1)


def assert_same(out: Tensor, expected: Tensor) -> None:
    """Equal to the rounding of float64."""
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@causal_or_not
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_packed_is_separate(mechanism: str, causal: bool, dtype: torch.dtype):
    inputs, where = tokens(sum(LENGTHS)), starts(LENGTHS).to(dtype)
    out = af.attention(*inputs, mechanism, causal=causal, cu_seqlens_q=where, cu_seqlens_k=where)
    assert_same(out, alone(inputs, LENGTHS, LENGTHS, mechanism, causal=causal))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), min_size=1, max_size=6),
    mechanism=st.sampled_from(LINEAR),
    causal=st.booleans(),
    number=st.integers(0, 2**32 - 1),
)
def test_packed_is_separate_whatever_the_lengths(
    lengths: list[tuple[int, int]], mechanism: str, causal: bool, number: int
):
    torch.manual_seed(number)
    queries, keys = (tuple(pair[side] for pair in lengths) for side in (0, 1))
    keys = queries if causal else keys
    inputs = tokens(sum(queries), sum(keys))
    out = af.attention(*inputs, mechanism, causal=causal, cu_seqlens_q=starts(queries), cu_seqlens_k=starts(keys))
    assert_same(out, alone(inputs, queries, keys, mechanism, causal=causal))


@causal_or_not
@pytest.mark.parametrize("mechanism", LINEAR)
def test_packed_is_separate_with_rotary_and_a_past(mechanism: str, causal: bool):
    inputs, where = tokens(sum(LENGTHS)), starts(LENGTHS)
    rotary = rotary_1d(sum(LENGTHS), WIDTH)
    old_keys, old_values = tokens(7 * len(LENGTHS))[1:]
    old = (old_keys.view(len(LENGTHS), 7, KEY_HEADS, WIDTH), old_values.view(len(LENGTHS), 7, KEY_HEADS, VALUES))
    past = af.summarize(*old, mechanism, rotary=rotary_1d(7, WIDTH))
    out, state = af.attention(
        *inputs,
        mechanism,
        causal=causal,
        cu_seqlens_q=where,
        cu_seqlens_k=where,
        rotary=rotary,
        initial_state=past,
        return_state=True,
    )
    assert_same(out, alone(inputs, LENGTHS, LENGTHS, mechanism, past=past, rotary=rotary, causal=causal))
    assert state.count[:, 0].tolist() == [7 + n for n in LENGTHS]
    whole = past + af.summarize(inputs[1], inputs[2], mechanism, cu_seqlens_k=where, rotary=rotary)
    assert_same(state.covariance, whole.covariance)


@causal_or_not
@pytest.mark.parametrize("mechanism", ["mala", "nala", "softmax"])
def test_packed_gradients_are_the_separate_ones(mechanism: str, causal: bool):
    inputs = tokens(sum(LENGTHS))
    where, target = starts(LENGTHS), torch.randn(1, sum(LENGTHS), HEADS, VALUES, dtype=torch.float64)
    found, expected = [], []
    for gradients, separate in ((found, False), (expected, True)):
        leaves = tuple(x.clone().requires_grad_() for x in inputs)
        query, key, value = leaves
        if separate:
            out = alone((query, key, value), LENGTHS, LENGTHS, mechanism, causal=causal)
        else:
            out = af.attention(query, key, value, mechanism, causal=causal, cu_seqlens_q=where, cu_seqlens_k=where)
        gradients += torch.autograd.grad((out * target).sum(), leaves)
    for x, y in zip(found, expected, strict=True):
        assert_same(x, y)


@pytest.mark.parametrize("mechanism", LINEAR)
def test_a_packed_state_holds_one_entry_for_each_sequence(mechanism: str):
    queries, keys = (3, 0, 70, 1), (0, 5, 130, 64)
    query, key, value = tokens(sum(queries), sum(keys))
    state = af.summarize(key, value, mechanism, cu_seqlens_k=starts(keys))
    assert state.count.tolist() == [[n] * KEY_HEADS for n in keys]
    for number, (k, v) in enumerate(zip(key.split(keys, 1), value.split(keys, 1), strict=True)):
        assert_same(state.covariance[number], af.summarize(k, v, mechanism).covariance[0])
    out = af.attend(query, state, cu_seqlens_q=starts(queries))
    assert_same(out, alone((query, key, value), queries, keys, mechanism))
    assert not out[:, :3].any()


def test_one_packed_sequence_is_a_batch_of_one():
    inputs, where = tokens(100), starts((100,))
    for causal in (False, True):
        out = af.attention(*inputs, causal=causal, cu_seqlens_q=where, cu_seqlens_k=where)
        assert_same(out, af.attention(*inputs, causal=causal))


def test_nothing_packed_is_nothing():
    inputs, where = tokens(0), starts((0, 0, 0))
    for causal in (False, True):
        out, state = af.attention(*inputs, causal=causal, cu_seqlens_q=where, cu_seqlens_k=where, return_state=True)
        assert out.shape == (1, 0, HEADS, VALUES)
        assert state.count.shape == (3, KEY_HEADS)
        assert not state.count.any()


@pytest.mark.parametrize("causal", [False, True])
def test_a_neighbour_is_never_seen(causal: bool):
    where = starts((40, 60))
    query, key, value = tokens(100)
    before = af.attention(query, key, value, causal=causal, cu_seqlens_q=where, cu_seqlens_k=where)
    key[:, 40:], value[:, 40:] = 1e6, -1e6
    after = af.attention(query, key, value, causal=causal, cu_seqlens_q=where, cu_seqlens_k=where)
    assert torch.equal(after[:, :40], before[:, :40])


def test_each_token_knows_its_sequence():
    assert sequence_of_each_token(starts((2, 0, 3, 0)), 5).tolist() == [0, 0, 2, 2, 2]
    assert sequence_of_each_token(starts((0,)), 0).tolist() == []


def test_visibility_says_who_sees_what():
    query, key, _ = tokens(3, 4)
    mask = torch.tensor([[True, False, True, True]])
    assert visibility(query, key, False, mask, None, None).int().tolist() == [[[[1, 0, 1, 1]] * 3]]
    assert visibility(query, key[:, :3], True, None, None, None)[0, 0].int().tolist() == [
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
    ]
    packed = visibility(query, key, False, None, starts((1, 2)), starts((3, 1)))
    assert packed[0, 0].int().tolist() == [[1, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1]]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6), size=st.integers(1, 16))
def test_chunks_hold_every_token_once_and_sequences_apart(lengths: list[int], size: int):
    length, where = sum(lengths), starts(tuple(lengths))
    position = torch.arange(length)[None]
    for chunks in (plain_chunks(length, size, where.device), packed_chunks(where, length, size)):
        split = chunks.split(position)
        assert split.shape == (1, chunks.number, size)
        assert torch.equal(chunks.join(split), position)
        assert split[0][chunks.filled].sort().values.tolist() == list(range(length))
    owner = sequence_of_each_token(where, length)
    packed = packed_chunks(where, length, size)
    for row, filled in zip(packed.split(position)[0], packed.filled, strict=True):
        assert len(set(owner[row[filled]].tolist())) <= 1

"""States of disjoint tokens merge exactly, in any order and grouping, wherever PyTorch carries them."""

from __future__ import annotations

import dataclasses
import functools
import io
import pickle
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

import affinear as af
from affinear.ops import rotary_1d, rotary_2d

Rotary = tuple[Tensor, Tensor]

LINEAR = [name for name, mechanism in af.mechanisms().items() if mechanism.gain is not None]
BATCH, HEADS, WIDTH, VALUES = 2, 3, 4, 5


def tokens(length: int, *, batch: int = BATCH, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Keys and values."""
    key = torch.randn(batch, length, HEADS, WIDTH, dtype=dtype)
    return key, torch.randn(batch, length, HEADS, VALUES, dtype=dtype)


def queries(length: int, *, batch: int = BATCH, dtype: torch.dtype = torch.float64) -> Tensor:
    """Two queries for each key head."""
    return torch.randn(batch, length, 2 * HEADS, WIDTH, dtype=dtype)


def rows(rotary: Rotary | None, index: slice | Tensor) -> Rotary | None:
    """The tables of some positions."""
    return None if rotary is None else (rotary[0][index], rotary[1][index])


def leaves(state: af.State) -> list[Tensor]:
    """The tensors of a state."""
    return pytree.tree_leaves(state)


def assert_same(state: af.State, expected: af.State, tolerance: float = 1e-12) -> None:
    """Same tokens counted, same statistics to rounding."""
    assert state.mechanism == expected.mechanism
    assert state.count.dtype == torch.int64
    torch.testing.assert_close(leaves(state), leaves(expected), rtol=tolerance, atol=tolerance)


def add(states: Iterable[af.State]) -> af.State:
    """The sum of at least one state, typed as the state it is."""
    total = sum(states)
    assert isinstance(total, af.State)
    return total


# Merging


@pytest.mark.parametrize("rotary", [None, rotary_1d(30, WIDTH)], ids=["plain", "rotary"])
@pytest.mark.parametrize("mechanism", LINEAR)
def test_two_halves_make_the_whole(mechanism: str, rotary: Rotary | None):
    key, value = tokens(30)
    pieces = [
        af.summarize(key[:, piece], value[:, piece], mechanism, rotary=rows(rotary, piece))
        for piece in (slice(0, 11), slice(11, 30))
    ]
    whole = af.summarize(key, value, mechanism, rotary=rotary)
    assert_same(pieces[0] + pieces[1], whole)
    assert_same(pieces[1] + pieces[0], whole)
    assert (whole.rotated_key_mean is None) == (rotary is None)


@settings(max_examples=40, deadline=None)
@given(
    owner=st.lists(st.integers(0, 4), max_size=40),
    order=st.permutations(range(5)),
    mechanism=st.sampled_from(LINEAR),
    with_rotary=st.booleans(),
    number=st.integers(0, 2**32 - 1),
)
def test_any_partition_in_any_order_and_grouping_makes_the_whole(
    owner: list[int], order: list[int], mechanism: str, with_rotary: bool, number: int
):
    torch.manual_seed(number)
    key, value = tokens(len(owner))
    rotary = rotary_1d(len(owner), WIDTH) if with_rotary else None
    parts = []
    for part in order:
        index = (torch.tensor(owner, dtype=torch.long) == part).nonzero().flatten()
        parts.append(af.summarize(key[:, index], value[:, index], mechanism, rotary=rows(rotary, index)))
    whole = af.summarize(key, value, mechanism, rotary=rotary)
    assert_same(add(parts), whole)
    assert_same(functools.reduce(lambda later, earlier: earlier + later, reversed(parts)), whole)
    assert_same((parts[0] + parts[1]) + (parts[2] + (parts[3] + parts[4])), whole)


def test_tokens_one_at_a_time_make_the_whole():
    key, value = tokens(50)
    one_by_one = add(af.summarize(key[:, i : i + 1], value[:, i : i + 1]) for i in range(50))
    assert_same(one_by_one, af.summarize(key, value))


@pytest.mark.parametrize("mechanism", LINEAR)
def test_an_empty_state_is_neutral(mechanism: str):
    key, value = tokens(9)
    state = af.summarize(key, value, mechanism)
    empty = af.summarize(key[:, :0], value[:, :0], mechanism)
    masked = af.summarize(key, value, mechanism, key_mask=torch.zeros(BATCH, 9, dtype=torch.bool))
    for nothing in (empty, masked):
        assert all(not leaf.any() for leaf in leaves(nothing))
        assert_same(state + nothing, state, 0)
        assert_same(nothing + state, state, 0)
    assert_same(empty + masked, empty, 0)


def test_masked_states_merge_to_the_masked_whole():
    key, value = tokens(40)
    mask = torch.rand(BATCH, 40) < 0.6
    whole = af.summarize(key, value, "mala", key_mask=mask)
    pieces = [
        af.summarize(key[:, piece], value[:, piece], "mala", key_mask=mask[:, piece])
        for piece in (slice(0, 13), slice(13, 14), slice(14, 40))
    ]
    assert_same(add(pieces), whole)
    assert whole.count.tolist() == [[n] * HEADS for n in mask.sum(1).tolist()]


def test_what_a_mask_keeps_and_what_it_drops_make_the_whole():
    key, value = tokens(40)
    rotary = rotary_1d(40, WIDTH)
    mask = torch.rand(BATCH, 40) < 0.5
    kept = af.summarize(key, value, key_mask=mask, rotary=rotary)
    dropped = af.summarize(key, value, key_mask=~mask, rotary=rotary)
    assert_same(kept + dropped, af.summarize(key, value, rotary=rotary))


@pytest.mark.parametrize("with_rotary", [False, True], ids=["plain", "rotary"])
def test_packed_states_merge_sequence_by_sequence(with_rotary: bool):
    lengths = [(5, 70), (0, 3), (130, 0), (0, 0), (64, 1)]
    separate, packed = [], []
    halves = [[tokens(length, batch=1) for length in pair] for pair in lengths]
    for pair in halves:
        key, value = (torch.cat(parts, dim=1) for parts in zip(*pair, strict=True))
        rotary = rotary_1d(key.shape[1], WIDTH) if with_rotary else None
        separate.append(af.summarize(key, value, rotary=rotary))
    for half in (0, 1):
        own = torch.tensor([pair[half] for pair in lengths])
        starts = [0 if half == 0 else pair[0] for pair in lengths]
        tables = [rotary_1d(int(n), WIDTH, offset=start) for n, start in zip(own, starts, strict=True)]
        key, value = (torch.cat(parts, dim=1) for parts in zip(*(pair[half] for pair in halves), strict=True))
        rotary = (torch.cat([t[0] for t in tables]), torch.cat([t[1] for t in tables])) if with_rotary else None
        cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.long), own.cumsum(0)))
        packed.append(af.summarize(key, value, cu_seqlens_k=cu_seqlens, rotary=rotary))
    whole = pytree.tree_map(lambda *parts: torch.cat(parts), *separate)
    assert_same(packed[0] + packed[1], whole)


def test_float32_states_merge_to_float32_rounding():
    key, value = tokens(1000, dtype=torch.float32)
    merged = add(af.summarize(key[:, i::7], value[:, i::7]) for i in range(7))
    assert merged.dtype == torch.float32
    assert_same(merged.to(torch.float64), af.summarize(key.double(), value.double()), 1e-6)


@pytest.mark.parametrize("with_rotary", [False, True], ids=["plain", "rotary"])
def test_merging_is_differentiable(with_rotary: bool):
    first, second = (tokens(3, batch=1) for _ in range(2))
    rotary = rotary_1d(6, WIDTH) if with_rotary else None

    def merged(*inputs: Tensor) -> tuple[Tensor, ...]:
        state = af.summarize(inputs[0], inputs[1], rotary=rows(rotary, slice(0, 3)))
        state = state + af.summarize(inputs[2], inputs[3], rotary=rows(rotary, slice(3, 6)))
        return tuple(leaf for leaf in leaves(state) if leaf.is_floating_point())

    inputs = [x.requires_grad_() for x in (*first, *second)]
    assert torch.autograd.gradcheck(merged, inputs)
    assert torch.autograd.gradgradcheck(merged, inputs, fast_mode=True)


# What a merged state answers


@pytest.mark.parametrize("mechanism", LINEAR)
def test_the_tiles_of_an_image_answer_as_the_image(mechanism: str):
    height, width = 6, 8
    query, (key, value), rotary = queries(48), tokens(48), rotary_2d(height, width, WIDTH)
    grid = torch.arange(48).unflatten(0, (height, width))
    tiles = [grid[y : y + 3, x : x + 4].flatten() for y in (0, 3) for x in (0, 4)]
    state = add(af.summarize(key[:, tile], value[:, tile], mechanism, rotary=rows(rotary, tile)) for tile in tiles)
    whole = af.attention(query, key, value, mechanism, rotary=rotary)
    for tile in tiles:
        answer = af.attend(query[:, tile], state, rotary=rows(rotary, tile))
        torch.testing.assert_close(answer, whole[:, tile], rtol=1e-11, atol=1e-11)


def test_an_initial_state_is_a_merged_state():
    query, (key, value) = queries(20), tokens(20)
    past = af.summarize(*tokens(15))
    answer, state = af.attention(query, key, value, initial_state=past, return_state=True)
    assert_same(state, past + af.summarize(key, value))
    torch.testing.assert_close(answer, af.attend(query, state), rtol=1e-12, atol=1e-12)


# Moving, casting, copying


def test_to_casts_the_statistics_and_leaves_the_count_alone():
    state = af.summarize(*tokens(10), rotary=rotary_1d(10, WIDTH))
    single = state.to(torch.float32)
    assert single.count.dtype == torch.int64
    assert single.dtype == torch.float32
    assert all(leaf.dtype == torch.float32 for leaf in leaves(single)[1:])
    assert state.dtype == torch.float64
    assert torch.equal(single.count, state.count)
    assert_same(single.to(dtype=torch.float64), state, 1e-6)


@pytest.mark.parametrize("how", [("meta",), (torch.device("meta"),), ("meta", torch.float32)], ids=str)
def test_to_moves_everything(how: tuple[object, ...]):
    state = af.summarize(*tokens(10), rotary=rotary_1d(10, WIDTH)).to(*how)
    assert state.device.type == "meta"
    assert {leaf.device.type for leaf in leaves(state)} == {"meta"}
    assert state.count.dtype == torch.int64


def test_detach_cuts_the_graph_and_keeps_the_numbers():
    key, value = tokens(10)
    state = af.summarize(key.requires_grad_(), value)
    assert state.covariance.requires_grad
    detached = state.detach()
    assert not any(leaf.requires_grad for leaf in leaves(detached))
    assert_same(detached, state, 0)


def test_map_reaches_every_tensor():
    state = af.summarize(*tokens(10), rotary=rotary_1d(10, WIDTH))
    first = state.map(lambda x: x[:1])
    assert len(leaves(first)) == 5
    assert all(torch.equal(leaf, whole[:1]) for leaf, whole in zip(leaves(first), leaves(state), strict=True))
    assert first.mechanism is state.mechanism


def test_a_state_is_never_changed_in_place():
    state = af.summarize(*tokens(10))
    before = state.map(torch.clone)
    merged = state + af.summarize(*tokens(3))
    assert_same(state, before, 0)
    assert merged is not state
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.count = merged.count  # pyright: ignore[reportAttributeAccessIssue]


def test_a_state_survives_pickling():
    state = af.summarize(*tokens(10), "focused", rotary=rotary_1d(10, WIDTH))
    assert_same(pickle.loads(pickle.dumps(state)), state, 0)


def test_a_state_is_saved_and_loaded_as_tensors_are():
    state = af.summarize(*tokens(10), "nala", rotary=rotary_1d(10, WIDTH))
    file = io.BytesIO()
    torch.save({"state": state}, file)
    file.seek(0)
    assert_same(torch.load(file)["state"], state, 0)


# As PyTorch sees it


@pytest.mark.parametrize("rotary", [None, rotary_1d(10, WIDTH)], ids=["plain", "rotary"])
def test_a_state_is_a_pytree(rotary: Rotary | None):
    state = af.summarize(*tokens(10), rotary=rotary)
    parts, spec = pytree.tree_flatten(state)
    assert all(isinstance(part, Tensor) for part in parts)
    assert_same(pytree.tree_unflatten(parts, spec), state, 0)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec
    names = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(state)[0]]
    expected = [".count", ".key_mean", ".value_mean", ".covariance", ".rotated_key_mean"]
    assert names == expected[: len(parts)]


def test_a_state_enters_and_leaves_a_compiled_function():
    def step(query: Tensor, key: Tensor, value: Tensor, past: af.State) -> tuple[Tensor, af.State]:
        state = past + af.summarize(key, value)
        return af.attend(query, state), state.detach()

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    past = expected_past = af.summarize(*tokens(4))
    for _ in range(3):
        query, (key, value) = queries(6), tokens(6)
        answer, past = compiled(query, key, value, past)
        expected, expected_past = step(query, key, value, expected_past)
        assert isinstance(past, af.State)
        torch.testing.assert_close(answer, expected, rtol=1e-12, atol=1e-12)
        assert_same(past, expected_past)


def test_vmap_maps_over_states():
    first, second = (af.summarize(*tokens(n), "nala", rotary=rotary_1d(n, WIDTH)) for n in (5, 8))
    merged = torch.func.vmap(lambda a, b: a + b)(first, second)
    assert isinstance(merged, af.State)
    assert_same(merged, first + second)


def test_vmap_summarizes_and_attends():
    query, (key, value) = queries(5), tokens(9)
    state = torch.func.vmap(lambda k, v: af.summarize(k[None], v[None]).map(lambda x: x[0]))(key, value)
    expected = af.summarize(key, value)
    assert_same(state, expected)
    answer = torch.func.vmap(lambda q, s: af.attend(q[None], s.map(lambda x: x[None]))[0])(query, state)
    torch.testing.assert_close(answer, af.attend(query, expected), rtol=1e-12, atol=1e-12)


class Step(torch.nn.Module):
    """One step of a stream: a state in, an answer and a state out."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, past: af.State) -> tuple[Tensor, af.State]:
        """Merge, then answer."""
        state = past + af.summarize(key, value)
        return af.attend(query, state), state


def test_an_exported_program_takes_and_returns_states_also_after_saving():
    def example(batch: int, length: int) -> tuple[Tensor, Tensor, Tensor, af.State]:
        past = af.summarize(*tokens(3, batch=batch))
        return queries(length, batch=batch), *tokens(length, batch=batch), past

    any_size = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    dynamic = (any_size, any_size, any_size, [{0: any_size[0]}] * 4)
    program = torch.export.export(Step(), example(3, 6), dynamic_shapes=dynamic)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file)
    for batch, length in ((3, 6), (2, 40)):
        inputs = example(batch, length)
        expected_answer, expected_state = Step()(*inputs)
        for form in (program, loaded):
            answer, state = form.module()(*inputs)
            assert isinstance(state, af.State)
            torch.testing.assert_close(answer, expected_answer, rtol=1e-12, atol=1e-12)
            assert_same(state, expected_state)


# What does not merge


def other(**changes: object) -> af.State:
    """A state like `state()` but for one thing."""
    key, value = tokens(8, batch=int(str(changes.get("batch", BATCH))))
    if "width" in changes:
        key = key[..., :2]
    rotary = rotary_1d(8, WIDTH) if "rotary" in changes else None
    state = af.summarize(key, value, str(changes.get("mechanism", "mala")), rotary=rotary)
    return state.to(changes["to"]) if "to" in changes else state


@pytest.mark.parametrize(
    ("changes", "expected", "got", "advice"),
    [
        ({"mechanism": "linear"}, "of one mechanism", "'mala' and 'linear'", "the same one"),
        ({"rotary": True}, "both states with rotary or both without", "one of each", "pass rotary= to both"),
        ({"batch": 1}, "one shape", "(2, 3, 4, 5) and (1, 3, 4, 5)", "the same batch, heads and widths"),
        ({"width": 2}, "one shape", "(2, 3, 4, 5) and (2, 3, 2, 5)", "the same batch, heads and widths"),
        ({"to": torch.float32}, "one dtype and device", "torch.float64 on cpu and torch.float32 on cpu", ".to()"),
        ({"to": "meta"}, "one dtype and device", "torch.float64 on cpu and torch.float64 on meta", ".to()"),
    ],
    ids=["mechanism", "rotary", "batch", "width", "dtype", "device"],
)
def test_states_that_do_not_belong_together_say_why(changes: dict[str, object], expected: str, got: str, advice: str):
    with pytest.raises(ValueError, match=r"^state: ") as error:
        _ = other() + other(**changes)
    message = str(error.value)
    assert expected in message
    assert f"got {got}" in message
    assert advice in message


@pytest.mark.parametrize("stranger", [1, 0.0, "state", None, torch.zeros(1)], ids=repr)
def test_a_state_merges_with_nothing_but_a_state(stranger: object):
    with pytest.raises(TypeError):
        _ = other() + stranger  # pyright: ignore[reportOperatorIssue]
    with pytest.raises(TypeError):
        _ = stranger + other()  # pyright: ignore[reportOperatorIssue]

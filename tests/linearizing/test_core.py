"""What stands in softmax's place, against its definitions in float64."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import affinear
from affinear.linearizing import Choices, LinearCore, Memory, Shape

HEADS, GROUPS, WIDTH = 4, 2, 8
SHAPE = Shape(HEADS, GROUPS, WIDTH, WIDTH)


def tokens(count: int) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(2, count, HEADS, WIDTH, dtype=torch.float64)
    key, value = torch.randn(2, 2, count, GROUPS, WIDTH, dtype=torch.float64).unbind()
    return query, key, value


def core(disturbed: bool = True, **given: Any) -> LinearCore:
    made = LinearCore(Choices(**given), SHAPE, dtype=torch.float64)
    if disturbed:
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def one_by_one(
    made: LinearCore, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, window: int, sinks: int, causal: bool
) -> Tensor:
    """The window's definition: for each query a softmax over near keys, sinks, and one key for all beyond on a side."""
    out = torch.zeros_like(query)
    assert made.mass is not None
    for b in range(query.shape[0]):
        there = [j for j in range(key.shape[1]) if mask[b, j]]
        first = there[:sinks]
        for i in there:
            ahead = i if causal else i + window - 1
            near = [j for j in there if i - window < j <= ahead and j not in first]
            lit = [j for j in first if j <= i or not causal]
            past = [j for j in there if j <= i - window and j not in first]
            future = [j for j in there if j > ahead and j not in first and not causal]
            for h in range(HEADS):
                g = h // (HEADS // GROUPS)
                seen = near + lit
                scores = key[b, seen, g] @ query[b, i, h] / math.sqrt(WIDTH)
                values = value[b, seen, g]
                for beyond in filter(None, (past, future)):
                    mean = key[b, beyond, g].mean(0) @ query[b, i, h] / math.sqrt(WIDTH)
                    scores = torch.cat((scores, (math.log(len(beyond)) + mean + made.mass[h])[None]))
                    answer = affinear.attention(
                        query[b, i, h][None, None, None],
                        key[b, beyond, g][None, :, None],
                        value[b, beyond, g][None, :, None],
                        made.choices.mechanism,
                        backend="reference",
                    )
                    values = torch.cat((values, answer.reshape(1, -1)))
                out[b, i, h] = scores.softmax(0) @ values
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mechanism", ["mala", "inline"])
@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (3, 0), (4, 2), (30, 1)])
def test_a_window_is_what_its_definition_says(mechanism: str, window: int, sinks: int, causal: bool):
    made = core(mechanism=mechanism, window=window, sinks=sinks)
    query, key, value = tokens(13)
    mask = torch.rand(2, 13) < 0.7
    mask[0, :3], mask[:, 5] = False, True
    with torch.no_grad():
        found = made(query, key, value, causal=causal, key_mask=mask)
        truth = one_by_one(made, query, key, value, mask, window, sinks, causal)
    assert torch.allclose(found[mask], truth[mask], atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_over_all_tokens_is_softmax(causal: bool):
    query, key, value = tokens(11)
    with torch.no_grad():
        found = core(disturbed=False, window=11, sinks=2)(query, key, value, causal=causal)
    assert torch.allclose(found, affinear.attention(query, key, value, "softmax", causal=causal), atol=1e-10)


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that anything makes."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made: list[Any] = list(out) if isinstance(out, tuple | list) else [out]
        self.numbers = max([self.numbers, *(x.numel() for x in made if isinstance(x, Tensor))])
        return out


def test_a_window_wider_than_a_text_costs_what_the_text_does():
    query, key, value = tokens(11)
    wide, fitting = core(disturbed=False, window=2**16, sinks=1), core(disturbed=False, window=11, sinks=1)
    with torch.no_grad():
        with Largest() as largest:
            found = wide(query, key, value)
        assert torch.allclose(found, fitting(query, key, value), atol=1e-12)
    span = 11 + 11 + 10  # a window of the text's own length, a block of queries, and what comes after them
    assert largest.numbers <= 2 * 11 * HEADS * (span + 1 + 2)  # its scores, beside the sink's and both sides'


def test_what_a_window_both_ways_takes_grows_as_the_text_does():
    made, found = core(window=4, sinks=1), []
    for count in (100, 400):
        with torch.no_grad(), Largest() as largest:
            made(*tokens(count))
        found.append(largest.numbers)
    assert found[1] < 4.5 * found[0]


def test_a_window_both_ways_looks_the_same_from_either_end():
    made = core(window=3)
    ends = [x.flip(1) for x in tokens(14)]
    with torch.no_grad():
        assert torch.allclose(made(*ends).flip(1), made(*(x.flip(1) for x in ends)), atol=1e-10)


def test_a_window_both_ways_passes_gradients_to_all_it_learns():
    made = core(mechanism="nala", window=3, sinks=1, feature_map="learned", gain=True, norm=True, convolution=3)
    query, key, value = (x.requires_grad_() for x in tokens(12))
    made(query, key, value).square().sum().backward()
    for tensor in (query, key, value, *made.parameters()):
        assert tensor.grad is not None
        assert bool(tensor.grad.isfinite().all() and tensor.grad.any())


@pytest.mark.parametrize("given", [{}, {"window": 3, "sinks": 1}, {"gain": True, "norm": True}], ids=str)
def test_pieces_of_any_length_are_the_whole(given: dict[str, Any]):
    made = core(**given)
    query, key, value = tokens(17)
    mask = torch.rand(2, 17) < 0.8
    cuts = [0, *sorted(torch.randperm(16)[:4].add(1).tolist()), 17]
    memory, parts = Memory(), []
    with torch.no_grad():
        whole = made(query, key, value, causal=True, key_mask=mask)
        for start, end in itertools.pairwise(cuts):
            part = slice(start, end)
            out, memory = made.step(query[:, part], key[:, part], value[:, part], memory, key_mask=mask[:, part])
            parts.append(out)
    assert torch.allclose(torch.cat(parts, 1)[mask], whole[mask], atol=1e-10)
    assert memory.seen == 17


@pytest.mark.parametrize("causal", [False, True])
def test_a_gain_multiplies_what_is_added_to_the_mean_value(causal: bool):
    made = core(mechanism="mala", gain=True)
    query, key, value = tokens(9)
    with torch.no_grad():
        plain = affinear.attention(query, key, value, "mala", causal=causal)
        mean = value.cumsum(1) / torch.arange(1, 10)[:, None, None] if causal else value.mean(1, keepdim=True)
        mean = mean.repeat_interleave(2, dim=2)
        assert made.gain is not None
        expected = mean + made.gain[:, None] * (plain - mean)
        assert torch.allclose(made(query, key, value, causal=causal), expected, atol=1e-10)


@pytest.mark.parametrize("mechanism", ["mala", "linear", "nala", "inline"])
def test_what_is_learned_begins_as_if_it_were_not_there(mechanism: str):
    query, key, value = tokens(9)
    made = core(False, mechanism=mechanism, feature_map="learned", gain=True, norm=True, convolution=3)
    with torch.no_grad():
        assert torch.allclose(made(query, key, value), affinear.attention(query, key, value, mechanism), atol=1e-12)


def test_hedgehogs_features_are_softmaxes_over_channels():
    made = core(mechanism="linear", feature_map="hedgehog")
    query, key, value = tokens(9)
    assert made.query_map is not None
    assert made.key_map is not None

    def features(x: Tensor, matrix: Tensor) -> Tensor:
        mapped = torch.einsum("bnhd,hde->bnhe", x, matrix)
        return torch.cat((mapped.softmax(-1), (-mapped).softmax(-1)), -1)

    with torch.no_grad():
        q, k = features(query, made.query_map), features(key, made.key_map).repeat_interleave(2, 2)
        scores = torch.einsum("bnhf,bmhf->bhnm", q, k)
        truth = torch.einsum("bhnm,bmhe->bnhe", scores / scores.sum(-1, keepdim=True), value.repeat_interleave(2, 2))
        assert torch.allclose(made(query, key, value), truth, atol=1e-10)


def test_queries_that_were_scaled_already_are_not_scaled_twice():
    made = core(mechanism="mala")
    query, key, value = tokens(9)
    with torch.no_grad():
        scaled = made(query * WIDTH**-0.5, key, value, scale=1.0)
        assert torch.allclose(scaled, made(query, key, value), atol=1e-10)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mechanism": "softmax"}, "expected one that is linear"),
        ({"mechanism": "none"}, "expected a window where it is"),
        ({"sinks": 2}, "expected a window beside 2 sinks"),
        ({"convolution": 4}, "expected an odd side"),
        ({"window": -1}, "window: expected a whole number"),
        ({"feature_map": "magic"}, "expected one of own, learned, hedgehog"),
        ({"bias": "lose"}, "expected one of position, leave, drop"),
        ({"gain": 1}, "gain: expected true or false"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        Choices(**given)


def test_windows_are_refused_where_they_make_no_sense():
    query, key, value = tokens(9)
    with pytest.raises(ValueError, match="window: expected as many keys as queries, which are 5, got 9"):
        core(window=3)(query[:, :5], key, value)


@pytest.mark.parametrize("given", [{}, {"window": 3, "sinks": 1}, {"window": 2, "mechanism": "none"}])
def test_a_causal_convolution_adds_values_before_and_remembers_as_many(given: dict[str, Any]):
    count, side = 13, 5
    query, key, value = tokens(count)
    mask = torch.rand(2, count) < 0.8
    made, plain = core(convolution=side, **given), core(False, **given)
    plain.load_state_dict({name: tensor for name, tensor in made.state_dict().items() if name != "kernel"})
    assert made.kernel is not None
    weights = made.kernel.detach().view(GROUPS, WIDTH, side)
    local = torch.zeros_like(query)
    for b, i, back in itertools.product(range(2), range(count), range(side)):
        if i >= back and mask[b, i - back]:
            term = weights[..., side - 1 - back] * value[b, i - back]
            local[b, i] += term.repeat_interleave(HEADS // GROUPS, dim=0)
    expected = plain(query, key, value, causal=True, key_mask=mask) + local
    with torch.no_grad():
        torch.testing.assert_close(made(query, key, value, causal=True, key_mask=mask), expected)
        memory: Memory | None = None
        parts: list[Tensor] = []
        for start, end in ((0, 4), (4, 5), (5, 7), (7, count)):
            out, memory = made.step(
                query[:, start:end], key[:, start:end], value[:, start:end], memory, key_mask=mask[:, start:end]
            )
            parts.append(out)
            assert memory.tail is not None
            assert memory.tail.shape == (2, side - 1, GROUPS, WIDTH)
        torch.testing.assert_close(torch.cat(parts, 1), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_alone_has_nothing_that_could_not_learn(causal: bool):
    choices = Choices("none", "learned", gain=True, norm=True, window=3, sinks=1, convolution=3)
    core = LinearCore(choices, Shape(4, 2, 8, 8))
    query, key, value = torch.randn(2, 9, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    core(query, key, value, causal=causal).square().sum().backward()
    assert {name for name, _ in core.named_parameters()} == {"norm", "kernel"}
    assert all(parameter.grad is not None for parameter in core.parameters())

"""Calls as people make them: heads before tokens, states by hand, gains of their own."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import affinear as af
from affinear.ops import LayoutWarning, reciprocal
from affinear.ops.mechanisms import find

Tokens = tuple[Tensor, Tensor, Tensor]


def tokens(length: int = 6) -> Tokens:
    query, key, value = torch.randn(3, 2, length, 2, 4).unbind()
    return query, key, value


# Layout


@pytest.mark.parametrize("causal", [False, True])
def test_swapping_from_torch_is_one_word(causal: bool):
    query, key, value = (x.transpose(1, 2).contiguous() for x in tokens())
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    out = af.attention(query, key, value, "softmax", causal=causal, layout="bhnd")
    torch.testing.assert_close(out, expected)


def test_every_function_takes_heads_before_tokens():
    given = tokens()
    query, key, value = (x.transpose(1, 2) for x in given)
    expected, state = af.attention(*given, return_state=True)
    out, same = af.attention(query, key, value, return_state=True, layout="bhnd")
    assert torch.equal(out, expected.transpose(1, 2))
    assert torch.equal(same.covariance, state.covariance)
    assert torch.equal(af.summarize(key, value, layout="bhnd").covariance, af.summarize(*given[1:]).covariance)
    assert torch.equal(af.attend(query, state, layout="bhnd"), af.attend(given[0], state).transpose(1, 2))
    assert torch.equal(af.weights(query, key, layout="bhnd"), af.weights(*given[:2]))


def test_tokens_that_look_like_heads_are_named_once_in_a_warning():
    far = torch.randn(1, 8, 256, 4)
    with pytest.warns(LayoutWarning, match=r"query: shape \(1, 8, 256, 4\) is read as 8 tokens of 256 heads.*'bhnd'"):
        af.attention(far, far, far)


@pytest.mark.parametrize("shape", [(1, 256, 8, 4), (1, 1, 256, 4), (1, 32, 32, 4)])
def test_there_is_no_warning_where_it_is_not_likely(shape: tuple[int, ...]):
    x = torch.randn(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        af.attention(x, x, x)


def test_nor_where_the_layout_is_given():
    x = torch.randn(1, 8, 256, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        af.attention(x, x, x, layout="bnhd")
        af.attention(x, x, x, layout="bhnd")


def test_there_are_two_layouts():
    with pytest.raises(ValueError, match=r"layout: expected 'bnhd' .* got 'nbhd'"):
        af.attention(*tokens(), layout="nbhd")


# Wrong calls


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": 10**400}, "scale: expected a positive finite number, got 1000.* with 401 digits"),
        ({"causal": 1}, "causal: expected True or False, got int 1"),
        ({"causal": 1, "mechanism": "softmax"}, "causal: expected True or False, got int 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        af.attention(*tokens(), **options)


def test_rows_are_a_tensor():
    query, key, _ = tokens()
    with pytest.raises(ValueError, match=r"rows: expected numbers of queries as a tensor .* got list"):
        af.weights(query, key, rows=[0, 1])  # pyright: ignore[reportArgumentType]


def test_sparse_and_nested_tensors_are_refused():
    query, key, value = tokens()
    with pytest.raises(ValueError, match=r"key: expected a dense tensor, got a sparse one; call .to_dense\(\)"):
        af.attention(query, key.to_sparse(), value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once that they are a prototype
        nested = torch.nested.nested_tensor(list(value))
    with pytest.raises(ValueError, match="value: expected a dense tensor, got a nested one; pack its sequences"):
        af.attention(query, key, nested)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("count", lambda x: x[:, :1]),
        ("count", lambda x: x.float()),
        ("key_mean", lambda x: x[..., :3]),
        ("value_mean", lambda x: x.double()),
        ("covariance", lambda x: x[0]),
    ],
)
def test_a_state_made_by_hand_fits_together(name: str, change: Any):
    query, key, value = tokens()
    state = af.summarize(key, value)
    odd = replace(state, **{name: change(getattr(state, name))})
    for call in (
        lambda: af.attend(query, odd),
        lambda: af.attention(query, key, value, initial_state=odd),
        lambda: state + odd,
    ):
        with pytest.raises(ValueError, match="state: expected"):
            call()


# Gains of one's own


def test_a_gain_that_is_infinite_at_zero_is_refused():
    bare = replace(find("linear"), name="bare", gain=torch.reciprocal)
    with pytest.raises(ValueError, match=r"mechanism.gain: .* finite gain of 'bare' .* got inf at z = 0; .*reciprocal"):
        af.register(bare)
    assert "bare" not in af.mechanisms()


def test_a_gain_is_elementwise():
    with pytest.raises(ValueError, match=r"mechanism\.gain: expected a function of z to a tensor of its shape"):
        af.register(replace(find("linear"), name="summed", gain=torch.sum))


def test_the_guarded_reciprocal_is_the_building_block():
    mechanism = af.Mechanism(
        "half_guarded", torch.relu, torch.relu, lambda z: 0.5 * reciprocal(z), nonnegative=True, paper="none"
    )
    query, key, value = tokens()
    out = af.attention(torch.zeros_like(query), key, value, af.register(mechanism))
    assert torch.allclose(out, value.mean(1, keepdim=True).expand_as(out))

"""The one attention layer is each paper's layer when its parts are, and says what it was given wrongly."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import affinear as af
from affinear.layers import (
    INLINE,
    MALA,
    MILA,
    NALA,
    PLAIN,
    RALA,
    Attention,
    AxialRotary,
    ChannelRotary,
    Parts,
    weigh_keys,
)

GRID, DIM, HEADS = (5, 6), 24, 3


@pytest.fixture
def make(seed: int) -> Callable[..., Attention]:
    def build(parts: Parts, prefix_tokens: int = 0) -> Attention:
        layer = Attention(DIM, HEADS, parts, prefix_tokens=prefix_tokens, dtype=torch.float64)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        return layer

    return build


def tokens(prefix: int = 0, batch: int = 2) -> Tensor:
    return torch.randn(batch, prefix + GRID[0] * GRID[1], DIM, dtype=torch.float64)


def tables(x: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = AxialRotary(DIM // HEADS)(x.unflatten(1, GRID))
    return cos.double(), sin.double()


def streams(layer: Attention, x: Tensor) -> list[Tensor]:
    """Queries, keys, values and gate, each (B, N, H, D)."""
    return list(layer.qkv(x).unflatten(-1, (-1, HEADS, DIM // HEADS)).unbind(2))


def convolve(layer: Attention, value: Tensor) -> Tensor:
    """The position convolution of values (B, N, C), in torch's layout."""
    assert layer.position is not None
    maps = value.transpose(1, 2).unflatten(2, GRID)
    kernel, bias = layer.position.weight, layer.position.bias
    return F.conv2d(maps, kernel, bias, padding=kernel.shape[-1] // 2, groups=DIM).flatten(2).transpose(1, 2)


def explicit(query: Tensor, key: Tensor, value: Tensor, mechanism: str, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """Weights times values, (B, N, C)."""
    matrix = af.weights(query, key, mechanism, rotary=rotary)
    return torch.einsum("bhij,bjhe->bihe", matrix, value).flatten(2)


@pytest.mark.parametrize("mechanism", ["mala", "mala_released", "softmax"])
def test_mala_adds_a_convolution_and_multiplies_a_linear_gate(mechanism: str, make: Callable[..., Attention]):
    layer, x = make(MALA.over(mechanism)), tokens()
    query, key, value, gate = streams(layer, x)
    out = explicit(query, key, value, mechanism, tables(x)) + convolve(layer, value.flatten(2))
    expected = layer.proj(out * gate.flatten(2))
    torch.testing.assert_close(layer(x, GRID, rotary=tables(x)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mechanism", ["nala", "nala_released"])
def test_nala_normalises_and_multiplies_a_silu_gate(mechanism: str, make: Callable[..., Attention]):
    layer, x = make(NALA.over(mechanism)), tokens()
    query, key, value, gate = streams(layer, x)
    out = explicit(query, key, value, mechanism, tables(x)) + convolve(layer, value.flatten(2))
    assert layer.norm is not None
    gate = gate.flatten(2)
    expected = layer.proj(layer.norm(out) * gate * gate.sigmoid())
    torch.testing.assert_close(layer(x, GRID, rotary=tables(x)), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_inline_adds_a_residual_to_all_but_class_tokens(prefix: int, make: Callable[..., Attention]):
    layer, x = make(INLINE, prefix), tokens(prefix)
    query, key, value = streams(layer, x)
    expected = explicit(query, key, value, "inline", None)
    assert layer.residual is not None
    places = value.flatten(2)[:, prefix:].unflatten(1, GRID)
    expected[:, prefix:] += layer.residual(x.mean(dim=1), places).flatten(1, 2)
    torch.testing.assert_close(layer(x, GRID), layer.proj(expected), rtol=1e-9, atol=1e-9)


def test_plain_is_softmax_attention(make: Callable[..., Attention]):
    layer, x = make(PLAIN), tokens()
    query, key, value = (stream.transpose(1, 2) for stream in streams(layer, x))
    out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x, GRID), layer.proj(out))


@pytest.mark.parametrize(
    "parts", [INLINE, Parts("mala", position_kernel=3, local_residual=True, gate="silu", norm=True)]
)
def test_masked_tokens_might_as_well_not_be_there(parts: Parts, make: Callable[..., Attention]):
    layer, x = make(parts), tokens()
    mask = torch.ones(2, *GRID, dtype=torch.bool)
    mask[:, -1] = False  # the last row, so that what is left is a grid
    shorter = x[:, : -GRID[1]]
    expected = layer(shorter, (GRID[0] - 1, GRID[1]))
    out = layer(x, GRID, key_mask=mask.flatten(1))[:, : -GRID[1]]
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def test_a_given_mean_chooses_the_kernels(make: Callable[..., Attention]):
    layer, x = make(INLINE), tokens()
    torch.testing.assert_close(layer(x, GRID, mean=x.mean(dim=1)), layer(x, GRID))
    assert not torch.allclose(layer(x, GRID, mean=torch.zeros(2, DIM, dtype=x.dtype)), layer(x, GRID))


def test_it_says_whether_it_is_linear(make: Callable[..., Attention]):
    assert make(MALA).linear
    assert not make(MALA.over("softmax")).linear
    assert "mala (linear)" in repr(make(MALA))
    assert "softmax (softmax, quadratic in tokens)" in repr(make(PLAIN))


def test_wrong_calls_are_told_what_is_wrong(make: Callable[..., Attention]):
    x = tokens()
    with pytest.raises(ValueError, match="grid: expected rows x columns = 30, the number of tokens, got 5 x 5"):
        make(INLINE)(x, (5, 5))
    with pytest.raises(ValueError, match="grid: expected rows x columns = 29, the number of tokens but class tokens"):
        make(INLINE, 1)(x, GRID)
    with pytest.raises(ValueError, match=r"rotary: expected tables, as parts\.rotary is True; pass what"):
        make(MALA)(x, GRID)
    with pytest.raises(ValueError, match=r"rotary: expected None, as parts\.rotary is False; leave it out"):
        make(INLINE)(x, GRID, rotary=tables(x))
    with pytest.raises(ValueError, match="num_heads: expected a divisor of dim = 24, got 5"):
        Attention(24, 5)
    with pytest.raises(ValueError, match="mechanism: expected one of"):
        Attention(24, 3, MALA.over("flash"))


@pytest.mark.parametrize("parts", [MALA, NALA])
def test_none_is_the_convolution_under_the_gate(parts: Parts, make: Callable[..., Attention]):
    layer, x = make(parts.over("none")), tokens()
    value, gate = layer.qkv(x).chunk(2, dim=-1)
    out = convolve(layer, value)
    if parts is NALA:
        assert layer.norm is not None
        out, gate = layer.norm(out), torch.nn.functional.silu(gate)
    torch.testing.assert_close(layer(x, GRID, rotary=tables(x)), layer.proj(out * gate))
    assert "no attention" in repr(layer)
    torch.testing.assert_close(copy.deepcopy(layer)(x, GRID, rotary=tables(x)), layer(x, GRID, rotary=tables(x)))


def test_none_needs_something_to_stand_alone():
    with pytest.raises(ValueError, match=r'mechanism: expected attention, .* got "none"; give them a position_kernel'):
        Attention(32, 2, PLAIN.over("none"))


# RALA and MILA.


def rala(query: Tensor, key: Tensor, value: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """The released rule with every weight written out, (B, N, C)."""
    query, key = F.elu(query) + 1, F.elu(key) + 1
    n, width = query.shape[1], query.shape[-1]
    logits = width**-0.5 * torch.einsum("bhd,bnhd->bnh", query.mean(1), key)
    key = key * n * logits.softmax(1)[..., None]
    z = torch.einsum("bnhd,bhd->bhn", query, key.mean(1)) + 1e-6

    def turn(x: Tensor) -> Tensor:
        pairs = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * rotary[0][:, None] + pairs * rotary[1][:, None]

    scores = torch.einsum("bnhd,bmhd->bhnm", turn(query), turn(key)) / n
    return torch.einsum("bhnm,bmhe->bnhe", scores / z[..., None], value).flatten(2)


def test_rala_weighs_keys_by_the_mean_query(make: Callable[..., Attention]):
    layer, x = make(RALA.over("linear_released")), tokens()
    query, key, value, gate = streams(layer, x)
    out = rala(query, key, value, tables(x)) + convolve(layer, value.flatten(2))
    torch.testing.assert_close(
        layer(x, GRID, rotary=tables(x)), layer.proj(out * gate.flatten(2)), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("mechanism", ["linear", "mala", "nala", "inline"])
def test_weighed_keys_go_into_any_mechanism(mechanism: str, make: Callable[..., Attention]):
    layer, x = make(RALA.over(mechanism)), tokens()
    rule = af.mechanisms()[mechanism]
    query, key, value, gate = streams(layer, x)
    query, key = rule.query_map(query), rule.key_map(key)
    alpha = ((query.mean(1, keepdim=True) * key).sum(-1) * (DIM // HEADS) ** -0.5).softmax(1) * x.shape[1]
    bare = dataclasses.replace(rule, query_map=lambda x: x, key_map=lambda x: x)
    wide = tuple(table.repeat(1, query.shape[-1] // table.shape[-1]) for table in tables(x))
    rows = af.weights(query, key * alpha[..., None], bare, scale=rule.scale_for(DIM // HEADS), rotary=wide)  # type: ignore[arg-type]
    out = torch.einsum("bhij,bjhe->bihe", rows, value).flatten(2) + convolve(layer, value.flatten(2))
    torch.testing.assert_close(
        layer(x, GRID, rotary=tables(x)), layer.proj(out * gate.flatten(2)), rtol=1e-8, atol=1e-8
    )


def test_softmax_has_no_features_to_weigh(make: Callable[..., Attention]):
    layer, x = make(RALA.over("softmax")), tokens()
    plain = Attention(DIM, HEADS, MALA.over("softmax"), dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, GRID, rotary=tables(x)), plain(x, GRID, rotary=tables(x)))
    assert "weighed" not in repr(layer)
    assert "keys weighed" in repr(make(RALA))


def test_weights_of_keys_sum_to_their_number_and_padding_has_none():
    query, key = torch.randn(2, 3, 9, 2, 4, dtype=torch.float64).unbind()
    linear, mask = af.mechanisms()["linear"], torch.ones(3, 9, dtype=torch.bool)
    mask[0, 5:] = mask[1] = False
    features_q, features_k, rule = weigh_keys(query, key, linear, mask)
    alpha = (features_k / linear.key_map(key))[..., 0]
    torch.testing.assert_close(alpha[2].sum(0), torch.full((2,), 9.0, dtype=torch.float64))
    own, other, _ = weigh_keys(query[:1, :5], key[:1, :5], linear)
    torch.testing.assert_close(features_k[:1, :5], other)
    value = torch.randn(3, 9, 2, 4, dtype=torch.float64)
    out = af.attention(features_q, features_k, value, rule, key_mask=mask)
    torch.testing.assert_close(out[:1, :5], af.attention(own, other, value[:1, :5], rule))
    assert not out[1].any()


def test_weighed_states_add_once_the_mean_query_is_known():
    query, key, value = torch.randn(3, 2, 50, 3, 8, dtype=torch.float64).unbind()
    features_q, weighed, rule = weigh_keys(query, key, af.mechanisms()["linear"])
    # What the softmax divides by cancels: each part may weigh by exponentials alone, knowing nothing of the other.
    features_k = F.elu(key) + 1
    loud = features_k * (features_q.mean(1, keepdim=True) * features_k).sum(-1, keepdim=True).mul(8**-0.5).exp()
    halves = [af.summarize(loud[:, part], value[:, part], rule) for part in (slice(0, 20), slice(20, 50))]
    torch.testing.assert_close(
        af.attend(features_q, halves[0] + halves[1]), af.attention(features_q, weighed, value, rule)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_weighed_in_float32(dtype: torch.dtype):
    layer = Attention(64, 2, RALA)
    x = torch.randn(2, 30, 64)
    rotary = AxialRotary(32)(x.unflatten(1, GRID))
    exact = layer(x, GRID, rotary=rotary)
    with torch.autocast("cpu", dtype):
        out = layer(x, GRID, rotary=rotary)
    assert out.dtype == dtype
    assert (out.float() - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_mila_has_a_branch_a_gate_and_heads_that_turn_differently(heads: int):
    layer, x = Attention(DIM, heads, MILA.over("linear_released"), dtype=torch.float64), tokens()
    cos, sin = (table.double() for table in ChannelRotary(DIM, heads)(x.unflatten(1, GRID)))
    assert layer.branch is not None
    assert layer.gate is not None
    branch = layer.branch.conv(layer.branch.proj(x).unflatten(1, GRID)).flatten(1, 2)
    branch = branch * branch.sigmoid()
    query, key = (F.elu(y) + 1 for y in layer.qkv(branch).chunk(2, dim=-1))
    # All channels turn before they are split: a quarter of as many frequencies, half for rows and half for columns.
    frequency = 10000 ** -(torch.arange(DIM // 4, dtype=torch.float64) / (DIM // 4))
    place = torch.arange(30)
    angle = torch.cat([torch.outer(at.double(), frequency) for at in (place // GRID[1], place % GRID[1])], dim=1)
    turned = [
        torch.view_as_real(
            torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)
        ).flatten(-2)
        for y in (query, key)
    ]
    query, key, turned_q, turned_k, value = (y.unflatten(-1, (heads, -1)) for y in (query, key, *turned, branch))
    z = torch.einsum("bnhd,bhd->bhn", query, key.mean(1)) + 1e-6
    rows = torch.einsum("bnhd,bmhd->bhnm", turned_q, turned_k) / 30 / z[..., None]
    out = torch.einsum("bhnm,bmhe->bnhe", rows, value).flatten(2) + convolve(layer, branch)
    gate = layer.gate(x)
    expected = layer.proj(out * gate * gate.sigmoid())
    assert (layer(x, GRID, rotary=(cos, sin)) - expected).norm() < 1e-6 * expected.norm()  # tables are float32


def test_a_branch_leaves_class_tokens_to_themselves(make: Callable[..., Attention]):
    parts = dataclasses.replace(MILA, rotary=False)
    layer, x = make(parts, 1), tokens(1)
    assert layer(x, GRID).shape == x.shape
    assert layer.branch is not None
    branch = layer.branch(x, GRID)
    torch.testing.assert_close(branch[:, :1], F.silu(layer.branch.proj(x[:, :1])))
    with pytest.raises(ValueError, match="grid: expected rows and columns, which the convolution of the branch needs"):
        layer.project(x)


def test_channels_that_cannot_turn_in_pairs_are_refused():
    with pytest.raises(ValueError, match=r"dim: expected a multiple of 4 and of 2 x num_heads = 8, .* got 12"):
        ChannelRotary(12, 4)


def test_none_of_a_branch_is_its_convolution_under_the_gate(make: Callable[..., Attention]):
    layer, x = make(MILA.over("none")), tokens()
    assert layer.branch is not None
    assert layer.gate is not None
    gate = layer.gate(x)
    expected = layer.proj(convolve(layer, layer.branch(x, GRID)) * gate * gate.sigmoid())
    torch.testing.assert_close(layer(x, GRID, rotary=tables(x)), expected)
    assert not any(name.startswith("qkv") for name, _ in layer.named_parameters())

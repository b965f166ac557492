"""The one attention layer is each paper's layer when its parts are, and says what it was given wrongly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import affinear as af
from affinear.layers import INLINE, MALA, NALA, PLAIN, Attention, AxialRotary, Parts

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


def test_none_needs_something_to_stand_alone():
    with pytest.raises(ValueError, match=r'mechanism: expected attention, .* got "none"; give them a position_kernel'):
        Attention(32, 2, PLAIN.over("none"))

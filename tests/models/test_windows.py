"""Softmax in windows and stripes, judged by a mask over all pairs of places."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from affinear.layers import Windows
from affinear.models.inline_cswin import StripeAttention
from affinear.models.inline_swin import SwinBlock, WindowAttention

SIZES = [(1, 1), (4, 4), (8, 8), (5, 9), (3, 11)]


def places(size: tuple[int, int]) -> list[tuple[int, int]]:
    return list(itertools.product(range(size[0]), range(size[1])))


def heads(x: Tensor, number: int) -> Tensor:
    """(B, N, C) as (B, heads, N, C / heads)."""
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


@pytest.mark.parametrize(("size", "shifted"), itertools.product(SIZES, [False, True]))
def test_shifted_windows_with_relative_positions(size: tuple[int, int], shifted: bool):
    side, dim, number = 4, 8, 2
    attn = WindowAttention(dim, number, (side, side), dtype=torch.float64)
    torch.nn.init.normal_(attn.relative_position_bias_table)
    block = SwinBlock(dim, attn, (side, side), shifted, 2.0, 0.0, dtype=torch.float64)
    x = torch.randn(2, *size, dim, dtype=torch.float64)
    window = [min(side, n) for n in size]
    shift = [w // 2 if shifted and n > w else 0 for n, w in zip(size, window, strict=True)]
    padded = [-(-n // w) * w for n, w in zip(size, window, strict=True)]

    def key_of(place: tuple[int, int]) -> list[object]:
        return [((p - s) % n // w, p < s) for p, s, n, w in zip(place, shift, padded, window, strict=True)]

    bias = torch.full((number, len(places(size)), len(places(size))), float("-inf"), dtype=torch.float64)
    for (i, a), (j, b) in itertools.product(enumerate(places(size)), enumerate(places(size))):
        if key_of(a) == key_of(b):
            row = (a[0] - b[0] + side - 1) * (2 * side - 1) + a[1] - b[1] + side - 1
            bias[:, i, j] = attn.relative_position_bias_table[row].detach()
    query, key, value = (heads(y, number) for y in attn.qkv(block.norm1(x).flatten(1, 2)).chunk(3, dim=-1))
    scores = query @ key.transpose(-2, -1) * (dim // number) ** -0.5 + bias
    expected = attn.proj((scores.softmax(-1) @ value).transpose(1, 2).flatten(2)).unflatten(1, size)
    torch.testing.assert_close(block.attend(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("size", "stripe"), itertools.product(SIZES, [1, 2, 3]))
def test_stripes_run_down_for_half_of_the_heads_and_across_for_the_other(size: tuple[int, int], stripe: int):
    dim, number = 8, 4
    attn = StripeAttention(dim, number, stripe, dtype=torch.float64)
    for parameter in attn.position.parameters():
        torch.nn.init.zeros_(parameter)
    x = torch.randn(2, size[0] * size[1], dim, dtype=torch.float64)
    place = torch.tensor(places(size))
    stripes = [place[:, axis] // min(stripe, size[axis]) for axis in (1, 0)]
    hidden = torch.stack([s[:, None] != s for s in stripes]).repeat_interleave(number // 2, dim=0)
    query, key, value = (heads(y, number) for y in attn.qkv(x).chunk(3, dim=-1))
    scores = query @ key.transpose(-2, -1) * (dim // number) ** -0.5
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    expected = attn.proj((weights @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attn(x, size), expected, rtol=1e-9, atol=1e-9)


def test_positions_of_stripes_stop_at_their_border():
    attn = StripeAttention(4, 2, 2, dtype=torch.float64)
    windows = Windows((4, 4), (4, 2))
    value = torch.zeros(1, 4, 4, 3, 2, dtype=torch.float64)
    value[:, :, 2:, 2] = torch.randn(1, 4, 2, 2, dtype=torch.float64)  # values of the right stripe alone
    conv = attn.position[0]
    torch.nn.init.zeros_(conv.get_parameter("bias"))
    assert attn._branch(value, windows, conv)[:, :, :2].abs().max() == 0


def test_stripes_need_an_even_number_of_heads():
    with pytest.raises(ValueError, match="num_heads: expected an even number for attention in stripes, got 3"):
        StripeAttention(6, 3, 2)

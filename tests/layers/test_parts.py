"""Convolutions, positions and windows do what they say, judged by slower ways to say it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from affinear.layers import AddNorm, AxialRotary, DepthwiseConv, LearnedPosition, LocalResidual, Windows
from affinear.ops import rotary_2d


@pytest.mark.parametrize("kernel", [3, 5])
def test_depthwise_convolution_is_torchs_in_another_layout(kernel: int):
    conv, x = DepthwiseConv(6, kernel), torch.randn(2, 4, 7, 6)
    expected = F.conv2d(x.permute(0, 3, 1, 2), conv.weight, conv.bias, padding=kernel // 2, groups=6)
    torch.testing.assert_close(conv(x), expected.permute(0, 2, 3, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_and_its_norm_are_those_of_a_layer_norm_with_the_same_weights(dtype: torch.dtype):
    norm, plain = AddNorm(6, 1e-3, dtype=dtype), nn.LayerNorm(6, 1e-3, dtype=dtype)
    nn.init.normal_(norm.weight)
    plain.load_state_dict(norm.state_dict())
    x, branch = torch.randn(2, 3, 5, 6, dtype=dtype).unbind()
    total, normed = norm(x, branch)
    assert torch.equal(total, x + branch)
    assert torch.equal(normed, plain(x + branch))


@pytest.mark.parametrize(("batch", "size"), [(1, (4, 4)), (3, (5, 2)), (2, (1, 1))])
def test_local_residual_is_a_convolution_with_a_group_per_image_and_channel(batch: int, size: tuple[int, int]):
    dim, heads = 6, 2
    residual = LocalResidual(dim, heads, dtype=torch.float64)
    mean, value = torch.randn(batch, dim, dtype=torch.float64), torch.randn(batch, *size, dim, dtype=torch.float64)
    kernels = residual.expand(F.gelu(residual.reduce(mean[..., None]))).reshape(batch * dim, 1, 3, 3)
    maps = value.permute(0, 3, 1, 2).reshape(1, batch * dim, *size)
    expected = F.conv2d(maps, kernels, padding=1, groups=batch * dim).reshape(batch, dim, *size)
    torch.testing.assert_close(residual(mean, value), expected.permute(0, 2, 3, 1))


def test_rotary_tables_fit_the_map_that_comes():
    rotary = AxialRotary(8)
    for height, width in ((3, 5), (7, 2), (3, 5)):
        tables = rotary(torch.randn(1, height, width, 16))
        assert all(torch.equal(a, b) for a, b in zip(tables, rotary_2d(height, width, 8), strict=True))
    assert list(rotary.parameters()) + list(rotary.buffers()) == []


def test_learned_positions_are_added_as_they_are_or_resized():
    position, x = LearnedPosition((4, 6), 5), torch.randn(2, 4, 6, 5)
    torch.testing.assert_close(position(x), x + position.table)
    larger = torch.zeros(1, 8, 12, 5)
    nn.init.constant_(position.table, 3.0)
    torch.testing.assert_close(position(larger), torch.full((1, 8, 12, 5), 3.0))


SIZES = [(1, 1), (4, 6), (5, 7), (8, 3)]
CUTS = [((1, 1), (0, 0)), ((2, 3), (0, 0)), ((2, 3), (1, 1)), ((4, 2), (2, 1))]


@pytest.mark.parametrize(("size", "cut"), itertools.product(SIZES, CUTS))
def test_windows_come_together_again(size: tuple[int, int], cut: tuple[tuple[int, int], tuple[int, int]]):
    windows = Windows(size, *cut)
    x = torch.randn(2, *size, 3)
    tokens = windows.split(x)
    assert tokens.shape == (2 * windows.number[0] * windows.number[1], cut[0][0] * cut[0][1], 3)
    assert torch.equal(windows.join(tokens), x)


@pytest.mark.parametrize(("size", "cut"), itertools.product(SIZES, CUTS))
def test_who_sees_whom(size: tuple[int, int], cut: tuple[tuple[int, int], tuple[int, int]]):
    windows = Windows(size, *cut)
    ((height, width), (down, right)) = cut
    places = torch.stack(torch.meshgrid(*(torch.arange(n) for n in size), indexing="ij"), dim=-1)
    tokens = windows.split(places[None] + 1) - 1  # padding is at -1
    visible = windows.visible(torch.device("cpu"))
    if visible is None:
        visible = torch.ones(len(tokens), height * width, height * width, dtype=torch.bool)
    real = windows.real(torch.device("cpu"))
    assert torch.equal(tokens[..., 0] >= 0, torch.ones_like(tokens[..., 0]) > 0 if real is None else real)
    seen = {
        (tuple(tokens[w, i].tolist()), tuple(tokens[w, j].tolist()))
        for w, i, j in visible.nonzero().tolist()
        if tokens[w, i, 0] >= 0 or tokens[w, j, 0] >= 0
    }
    padded = [n + p for n, p in zip(size, windows.padding, strict=True)]

    def window_of(y: int, x: int) -> tuple[int, ...]:
        # The shifted window, and whether the roll took the place round the border.
        return ((y - down) % padded[0] // height, (x - right) % padded[1] // width, y < down, x < right)

    everywhere = list(itertools.product(range(size[0]), range(size[1])))
    assert seen == {(a, b) for a in everywhere for b in everywhere if window_of(*a) == window_of(*b)}


def test_depthwise_convolution_keeps_channels_last():
    out: Tensor = DepthwiseConv(8, 3)(torch.randn(2, 5, 5, 8))
    assert out.is_contiguous()

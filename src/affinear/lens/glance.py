"""A glance at the attention of a trained network: a few numbers over some images, and what some patches look at."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .reading import Around, Readers, read
from .watching import watch

ROWS = 64  # queries of each image that the numbers are taken of
LAYERS = 3  # layers that maps are drawn of: the first, the middle, the last


@dataclass(frozen=True)
class Map:
    """What one patch of one test image looks at.

    Attributes:
        image: Number of the test image.
        layer: Name of the layer.
        query: Number of the patch.
        grid: Rows and columns of the patches.
        weights: Mean over heads, one for each patch, times the number of patches: 1 is what a uniform row has.
    """

    image: int
    layer: str
    query: int
    grid: tuple[int, int]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Attention:
    """Numbers of the attention of a trained network, over some test images; None where there are none.

    Attributes:
        norm_correlation: Rank correlation of a row's entropy and its query's norm, mean over layers and heads.
        negative_share: Share of the weights below zero, mean over layers and heads.
        row_sum_error: The largest distance of any row's sum from one.
        maps: What some patches look at.
    """

    norm_correlation: float | None = None
    negative_share: float | None = None
    row_sum_error: float | None = None
    maps: tuple[Map, ...] = ()


def glance(
    network: nn.Module, pixels: Tensor, shown: Sequence[tuple[int, Tensor]], *, loudness: bool = True
) -> Attention:
    """Numbers and maps of the attention of a network that takes images.

    Args:
        network: In evaluation mode.
        pixels: Images (B, channels, H, W) that the numbers are taken of.
        shown: Numbers and images (channels, H, W) that maps are drawn of.
        loudness: Whether queries differ in length at all; nothing goes along with a constant.
    """
    readers = Readers()
    if not any(readers.find(layer) is not None for layer in network.modules()):
        return Attention()
    with watch(network, rows=ROWS) as watched, torch.no_grad():
        network(pixels)
    layers = watched.layers
    known = [layer.norm_correlation.mean().item() for layer in layers if layer.norm_correlation is not None]
    return Attention(
        norm_correlation=_rounded(statistics.fmean(known)) if known and loudness else None,
        negative_share=_rounded(statistics.fmean(layer.negative_share.mean().item() for layer in layers)),
        row_sum_error=_rounded(max(layer.row_sum_error.max().item() for layer in layers)),
        maps=draw_maps(network, shown, readers),
    )


def draw_maps(
    network: nn.Module, shown: Sequence[tuple[int, Tensor]], readers: Readers, *, every: bool = False
) -> tuple[Map, ...]:
    """What the most striking patch of some images looks at, in a few layers, or every one, with keys on one grid."""
    found: list[Map] = []
    known = [(name, layer) for name, layer in network.named_modules() if readers.find(layer) is not None]
    if not known:
        return ()
    some = known if every else [known[i] for i in sorted({0, len(known) // 2, len(known) - 1})][:LAYERS]
    for number, image in shown:
        pixels = image[None]
        hooks = [
            layer.register_forward_hook(_map(pixels, number, name, readers, found), with_kwargs=True)
            for name, layer in some
        ]
        try:
            with torch.no_grad():
                network(pixels)
        finally:
            for hook in hooks:
                hook.remove()
    return tuple(found)


def _map(pixels: Tensor, number: int, name: str, readers: Readers, found: list[Map]) -> Callable[..., None]:
    """A hook that adds the map of a layer, if it has one, to what was found."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        reader = readers.find(module)
        assert reader is not None
        seen, *others = read(reader, module, args, kwargs, Around(images=len(pixels)))
        grid, first = seen.scene.grid, seen.scene.prefix_tokens
        if others or seen.windows > 1 or grid is None:
            return  # windows and stripes are no map of the image
        query = striking(pixels[0], grid)
        rows = torch.tensor([first + query], device=pixels.device)
        weights = seen.weights(rows)[0, :, 0, first:].mean(0) * math.prod(grid)
        found.append(Map(number, name, query, grid, tuple(_rounded(value) for value in weights.tolist())))

    return hook


def striking(pixels: Tensor, grid: tuple[int, int]) -> int:
    """Number of the patch that differs most from the mean of the image (channels, height, width)."""
    away = (pixels - pixels.mean((1, 2), keepdim=True)).abs().mean(0)
    return int(F.adaptive_avg_pool2d(away[None], grid).flatten().argmax())


def _rounded(value: float) -> float:
    """Three digits that count are more than any of these numbers has."""
    return float(f"{value:.4g}")

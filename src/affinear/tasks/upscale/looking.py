"""A photo through the network: in one piece; in strips, which gives the same; or in tiles, which does not quite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor, nn

from ...models.enlarging import enlarge
from ...models.upscaler import Upscaler

Told = Callable[[float], None]
ONE_PIECE = 2**17  # pixels up to which a photo goes through in one piece, unless told otherwise
MOST_ASKED = 2**18  # pixels up to which softmax over all of them is asked in strips; its time is their square


@dataclass(frozen=True)
class Look:
    """How a photo goes through the network.

    Attributes:
        kind: "whole", "strips" or "tiles".
        strip: Rows of a strip, about.
        tile: Side of a tile.
        overlap: Pixels around a tile that are looked at too, and thrown away.
    """

    kind: str = "whole"
    strip: int = 64
    tile: int = 256
    overlap: int = 32

    @property
    def words(self) -> str:
        """How, for people."""
        if self.kind == "tiles":
            return f"in tiles of {self.tile} pixels and {self.overlap} around"
        return "in one piece" if self.kind == "whole" else "strip by strip"


def fitting(network: Upscaler, pixels: int, look: Look) -> Look:
    """The look for a photo of so many pixels: strips where it is large, tiles where softmax would take too long."""
    softmax_over_all = any(getattr(layer, "linear", True) is False for layer in network.modules())
    large = "tiles" if softmax_over_all and pixels > MOST_ASKED else "strips"
    return replace(look, kind="whole" if pixels <= ONE_PIECE else large)


@torch.no_grad()
def enlarged(network: nn.Module, images: Tensor, look: Look, told: Told | None = None) -> Iterator[Tensor]:
    """Larger images, one strip below the other.

    Args:
        network: An upscaler in evaluation mode, or what wraps one, for the whole photo or tiles.
        images: (B, 3, H, W), white being 1.
        look: How.
        told: Called with the share that is done.

    Yields:
        Images (B, 3, scale h, scale W).
    """
    if look.kind == "whole":
        yield network(images)
    elif look.kind == "strips":
        inner = cast("nn.Module", getattr(network, "module", network))
        assert isinstance(inner, Upscaler)
        yield from enlarge(inner, images, rows=look.strip, keep=_room_for_maps(inner, images), told=told)
    else:
        yield from _tiled(network, images, look, told or (lambda share: None))


def _room_for_maps(network: Upscaler, images: Tensor) -> torch.device:
    """Where the maps between strips are kept: in main memory if they would fill half of what a GPU has left."""
    if images.device.type != "cuda":
        return images.device
    width = network.conv_first.out_channels
    maps = 2 * 4 * width * images.shape[0] * images.shape[2] * images.shape[3]
    left = torch.cuda.mem_get_info(images.device)[0]
    return torch.device("cpu") if 2 * maps > left else images.device


def _tiled(network: nn.Module, images: Tensor, look: Look, told: Told) -> Iterator[Tensor]:
    """Tiles side by side, a row of them at a time. Each is looked at with its surroundings, which are cut off."""
    height, width = images.shape[2:]
    tops, lefts = range(0, height, look.tile), range(0, width, look.tile)
    for i, top in enumerate(tops):
        row: list[Tensor] = []
        for j, left in enumerate(lefts):
            rows, columns = _around(top, height, look), _around(left, width, look)
            out = network(images[:, :, rows[0] : rows[1], columns[0] : columns[1]])
            scale = out.shape[2] // (rows[1] - rows[0])
            bottom, right = min(top + look.tile, height), min(left + look.tile, width)
            row.append(
                out[
                    :,
                    :,
                    scale * (top - rows[0]) : scale * (bottom - rows[0]),
                    scale * (left - columns[0]) : scale * (right - columns[0]),
                ]
            )
            told((i * len(lefts) + j + 1) / (len(tops) * len(lefts)))
        yield torch.cat(row, dim=3)


def _around(start: int, length: int, look: Look) -> tuple[int, int]:
    """Where a tile and its surroundings begin and end."""
    return max(0, start - look.overlap), min(length, start + look.tile + look.overlap)

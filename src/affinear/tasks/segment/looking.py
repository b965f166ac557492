"""Labels of a photo of any size: looked at as a whole, or through windows that overlap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from ...models.heads.parts import enlarge

AT_ONCE = 8  # windows that go through the network together

Network = Callable[[Tensor], list[Tensor]]


@dataclass(frozen=True)
class Look:
    """How a network looks at a photo.

    Attributes:
        how: "whole": all of it at once. "slide": through windows, logits averaged where they overlap. For attention
            over whole images the two are different questions: a window is all that its tokens see.
        window: Height and width of a window.
        stride: How far windows are apart.
    """

    how: Literal["whole", "slide"] = "whole"
    window: tuple[int, int] = (512, 512)
    stride: tuple[int, int] = (341, 341)


def logits_of(network: Network, images: Tensor, look: Look) -> Tensor:
    """Logits (B, classes, H, W) of images (B, 3, H, W), at their own size."""
    size = images.shape[2], images.shape[3]
    if look.how == "whole":
        return enlarge(network(images)[0], size)
    return _through_windows(network, images, look)


def labels_of(network: Network, images: Tensor, look: Look, size: tuple[int, int]) -> Tensor:
    """Classes (B, *size) of images (B, 3, H, W): logits are enlarged to the photo's own size, then compared."""
    return enlarge(logits_of(network, images, look), size).argmax(dim=1)


def starts(side: int, window: int, stride: int) -> list[int]:
    """Where windows begin along a side: by strides, the last one at the end.

    Examples:
        >>> starts(1000, 512, 341), starts(300, 512, 341)
        ([0, 341, 488], [0])
    """
    count = max(side - window + stride - 1, 0) // stride + 1
    return [max(min(i * stride, side - window), 0) for i in range(count)]


def _through_windows(network: Network, images: Tensor, look: Look) -> Tensor:
    height, width = images.shape[2:]
    rows, columns = (
        starts(side, part, step) for side, part, step in zip((height, width), look.window, look.stride, strict=True)
    )
    places = list(product(rows, columns))
    total, seen = None, images.new_zeros(height, width)
    for first in range(0, len(places), AT_ONCE):
        some = places[first : first + AT_ONCE]
        parts = [images[:, :, y : y + look.window[0], x : x + look.window[1]] for y, x in some]
        found = logits_of(network, torch.cat(parts), Look()).float().chunk(len(some))
        for (y, x), logits in zip(some, found, strict=True):
            if total is None:
                total = logits.new_zeros(len(images), logits.shape[1], height, width)
            total[:, :, y : y + look.window[0], x : x + look.window[1]] += logits
            seen[y : y + look.window[0], x : x + look.window[1]] += 1
    assert total is not None
    return total / seen

"""Raw patches: a fixed descriptor of 16 x 16 pixels that has no weights, so that attention shows plain similarity."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from affinear.lens.microscope.pictures import Picture
from affinear.lens.microscope.tokens import Layer

SIDE, PATCH = 224, 16
GRID = SIDE // PATCH
NORM = 3.0  # root mean square of the norms of all patches

# Lightness, blue against yellow, red against green.
OPPONENT = torch.tensor([[1, 1, 1], [-0.5, -0.5, 1], [1, -1, 0]], dtype=torch.float64) / 3
# Steps to the right, down, and along both diagonals.
EDGES = ((0, 1), (1, 0), (1, 1), (1, -1))
# Colour counts for more than the spread of colour, and both for more than any single edge.
EMPHASIS = torch.tensor([2.0] * 3 + [1.0] * 3 + [0.75] * 8 + [0.5] * 2, dtype=torch.float64)


def layer(picture: Picture) -> Layer:
    """The 14 x 14 patches of a picture as queries and keys, which are the same."""
    tokens = describe(picture.at(SIDE, SIDE)).reshape(1, GRID * GRID, 1, -1)
    return Layer("raw patches", tokens, tokens, (GRID, GRID))


def describe(pixels: Tensor) -> Tensor:
    """Sixteen numbers for each patch of an image (3, 224, 224): (196, 16), float64.

    In three opponent colours (lightness, blue against yellow, red against green): the mean (3) and the standard
    deviation (3) of the patch. In lightness: the mean size of the differences along four directions, between
    neighbouring pixels (4) and at a quarter of the resolution (4), and the slope of the patch to the right and down
    (2). Each number is centred over the image and divided by its standard deviation there, weighted by `EMPHASIS`, and
    all are multiplied by one factor that makes the root mean square of the norms 3. A blank image gives zeros.
    """
    colours = torch.einsum("oc,chw->ohw", OPPONENT, pixels)
    light = colours[:1]
    patches = _patches(colours)  # 3, 196, 256
    found = [
        patches.mean(-1).T,
        patches.std(-1, correction=0).T,
        _edges(light, PATCH),
        _edges(F.avg_pool2d(light, 4), PATCH // 4),
        _slopes(light),
    ]
    numbers = torch.cat(found, dim=-1)
    numbers = numbers - numbers.mean(0)
    spread = numbers.square().mean(0).sqrt()
    numbers = torch.where(spread > 1e-6, numbers / spread.clamp(min=1e-6), 0.0) * EMPHASIS
    size = numbers.square().sum(-1).mean().sqrt()
    return NORM * numbers / size if size > 0 else numbers


def _patches(image: Tensor) -> Tensor:
    """Pixels of each patch, (C, 196, 256), of an image (C, 224, 224)."""
    cut = image.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)
    return cut.flatten(3).flatten(1, 2)


def _edges(light: Tensor, side: int) -> Tensor:
    """Mean size of the differences along each direction, (196, 4), where a patch has this side."""
    padded = F.pad(light[None], (1, 1, 0, 1), mode="replicate")[0]
    rows, columns = light.shape[1:]
    moved = [padded[:, down : down + rows, 1 + right : 1 + right + columns] for down, right in EDGES]
    sizes = torch.cat([(there - light).abs() for there in moved])
    return F.avg_pool2d(sizes, side).flatten(1).T


def _slopes(light: Tensor) -> Tensor:
    """Right half less left half, lower half less upper half, (196, 2)."""
    left_right = F.avg_pool2d(light, (PATCH, PATCH // 2))[0].unflatten(1, (-1, 2))
    up_down = F.avg_pool2d(light, (PATCH // 2, PATCH))[0].unflatten(0, (-1, 2))
    return torch.stack(((left_right[..., 1] - left_right[..., 0]), (up_down[:, 1] - up_down[:, 0])), -1).flatten(0, 1)

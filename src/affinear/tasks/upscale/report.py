"""What a report shows of an upscaler: test photos before and after, under a line that can be drawn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ...train.page import Section, cards, escape, figure, png
from ..images.reading import CorruptImage
from .bicubic import resize, to_bytes
from .looking import Look, enlarged
from .metric import compared
from .opening import Album
from .samples import as_numbers, cut_to, shrunk

LOOKED_AT = 24  # test photos, evenly among all
MOST_PIXELS = 2**21  # of a large photo that is looked at
DETAIL = 160  # side of what is shown of a photo, in its own pixels
WIDTH = 480  # of the slider on the page

STYLE = f"""<style>
.slider {{ position: relative; width: {WIDTH}px; max-width: 100%; aspect-ratio: 1; overflow: hidden; }}
.slider img {{ width: {WIDTH}px; height: {WIDTH}px; max-width: none; image-rendering: pixelated; display: block; }}
.slider > div {{ position: absolute; top: 0; left: 0; width: 50%; height: 100%; min-width: 16px; max-width: 100%;
  overflow: hidden; resize: horizontal; border-right: 3px solid var(--mark); }}
.slider > div::-webkit-resizer {{ background: var(--mark); }}
</style>"""


@dataclass(frozen=True)
class Seen:
    """A test photo, three times.

    Attributes:
        name: Its set and file.
        before: The small one, made larger by bicubic resizing, bytes (3, H, W).
        after: The small one, made larger by the network.
        truth: As it was.
        gain: PSNR of the network over bicubic, in decibels.
    """

    name: str
    before: Tensor
    after: Tensor
    truth: Tensor
    gain: float


@torch.no_grad()
def sections(network: nn.Module, album: Album, scale: int, look: Look, device: torch.device) -> list[Section]:
    """Of some test photos those that gained least, most, and in between."""
    seen: list[Seen] = []
    for index in np.linspace(0, len(album.test) - 1, min(len(album.test), LOOKED_AT)).astype(int).tolist():
        height, width = album.test.sizes[index]
        if 0 < height * width <= MOST_PIXELS:
            try:
                seen.append(_seen(network, album, index, scale, look, device))
            except CorruptImage:
                continue
    if not seen:
        return []
    seen.sort(key=lambda one: one.gain)
    chosen = {"gained least": seen[0], "in between": seen[len(seen) // 2], "gained most": seen[-1]}
    distinct = {one.name: (told, one) for told, one in chosen.items()}
    note = (
        f"Of {len(seen)} test photos those that gained least, most and in between over bicubic resizing, where they "
        "have most detail. Left of the line is bicubic, right of it the network: draw the line at its lower end."
    )
    return [Section("Before and after", STYLE + "".join(_row(*item) for item in distinct.values()), note)]


def _seen(network: nn.Module, album: Album, index: int, scale: int, look: Look, device: torch.device) -> Seen:
    truth = cut_to(album.test[index], scale).to(device)
    small = shrunk(truth, scale)
    after = to_bytes(255 * torch.cat(list(enlarged(network, as_numbers(small)[None], look)), dim=2)[0])
    before = to_bytes(resize(small.float(), scale))
    gain = compared(after, truth, scale)[0] - compared(before, truth, scale)[0]
    file = album.test.path(index).replace("\\", "/").rpartition("/")[2]
    return Seen(f"{album.sets[album.set_of[index]]}, {file}", before.cpu(), after.cpu(), truth.cpu(), gain)


def _row(told: str, one: Seen) -> str:
    """A slider, and the three pictures beside each other for those who cannot draw it."""
    top, left = _detail(one.truth)
    side = min(DETAIL, *one.truth.shape[1:])
    parts = [x[:, top : top + side, left : left + side] for x in (one.before, one.after, one.truth)]
    before, after, truth = (png(Image.fromarray(part.permute(1, 2, 0).numpy())) for part in parts)
    caption = f"{one.name}: {told}, {one.gain:+.2f} dB"
    slider = (
        f'<figure><div class="slider"><img alt="after: the network" src="{after}"><div><img alt="before: bicubic" '
        f'src="{before}"></div></div><figcaption>{escape(caption)}</figcaption></figure>'
    )
    pictures = ((before, "bicubic"), (after, "network"), (truth, "truth"))
    return slider + cards([figure(picture, words, width=DETAIL) for picture, words in pictures])


def _detail(truth: Tensor) -> tuple[int, int]:
    """Where a photo (3, H, W) has most detail: top and left of a square."""
    grey = truth.float().mean(0)
    side = min(DETAIL, *grey.shape)
    edges = torch.zeros_like(grey)
    edges[:-1] += grey.diff(dim=0).abs()
    edges[:, :-1] += grey.diff(dim=1).abs()
    pooled = torch.nn.functional.avg_pool2d(edges[None, None], side, stride=max(1, side // 4))[0, 0]
    place = int(pooled.argmax())
    row, column = divmod(place, pooled.shape[1])
    return row * max(1, side // 4), column * max(1, side // 4)

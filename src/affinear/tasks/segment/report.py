"""What a report shows of a segmenter: the photos it finds hardest, beside their truth, and each class by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ...train.page import Section, cards, figure, png, table
from ..images.reading import CorruptImage
from .drawing import overlay, palette
from .looking import Look, labels_of
from .metric import confusion, overlaps, score_of, showing
from .pairs import UNLABELLED, Labels, Scenes
from .samples import as_bytes
from .settings import Segmentation

LOOKED_AT = 64  # test photos, evenly among all, from which the hardest are shown
SHOWN = 6
WIDTH = 320  # of a picture on the page
OPACITY = 0.55


@dataclass(frozen=True)
class Seen:
    """A test photo, what is there and what was found.

    Attributes:
        name: Its file.
        photo: In RGB.
        truth: Labels (H, W).
        found: Labels (H, W).
        overlap: Mean of the classes' overlaps within the photo.
    """

    name: str
    photo: Image.Image
    truth: Labels
    found: Labels
    overlap: float


@torch.no_grad()
def sections(
    network: nn.Module,
    data: Scenes,
    settings: Segmentation,
    look: Look,
    normalize: Callable[[Tensor], Tensor],
    device: torch.device,
) -> list[Section]:
    """The hardest of some test photos, which colour is which class, and how well each class is found in them."""
    seen: list[Seen] = []
    for index in np.linspace(0, len(data.test) - 1, min(len(data.test), LOOKED_AT)).astype(int).tolist():
        try:
            photo, truth = data.test[index]
        except CorruptImage:
            continue
        image = normalize(as_bytes(photo, settings.short_side, settings.long_side).to(device))[None]
        found = labels_of(network, image, look, (truth.shape[0], truth.shape[1]))[0].short().cpu()
        counts = confusion(torch.from_numpy(truth), found, len(data.classes))
        if counts.any():
            seen.append(Seen(data.test.path(index), photo, truth, found.numpy(), overlaps(counts).nanmean().item()))
    hardest = sorted(seen, key=lambda one: one.overlap)[:SHOWN]
    if not hardest:
        return []
    note = (
        f"Of {len(seen)} test photos, those with the least overlap: the photo, the truth and what the network says. "
        "Pixels without a class in the truth stay as they are."
    )
    rows = "".join(_row(one, len(data.classes)) for one in hardest)
    return [Section("The hardest photos", _key(data.classes, hardest) + rows, note), _classes(seen, data.classes)]


def _classes(seen: Sequence[Seen], classes: Sequence[str]) -> Section:
    """How well each class is found that is there or was found."""
    pairs = [(torch.from_numpy(one.truth), torch.from_numpy(one.found)) for one in seen]
    counts = torch.stack([confusion(truth, found, len(classes)) for truth, found in pairs]).sum(dim=0)
    shown = torch.stack([showing(truth[None], len(classes)) for truth, _ in pairs]).sum(dim=0)
    parts = score_of(counts, shown, len(seen), classes, ()).parts
    rows = [[part.name, str(part.count), *(f"{part.numbers[name]:.1%}" for name in ("miou", "macc"))] for part in parts]
    return Section(
        "Class by class", table(["class", "photos", "IoU", "accuracy"], rows), f"In {len(seen)} test photos."
    )


def _row(one: Seen, classes: int) -> str:
    """A photo, its truth and what was found, side by side."""
    pictures = (
        (one.photo, one.name.replace("\\", "/").rpartition("/")[2]),
        (overlay(one.photo, one.truth, classes, OPACITY), "truth"),
        (overlay(one.photo, one.found, classes, OPACITY), f"found; mean overlap {one.overlap:.0%}"),
    )
    return cards([figure(png(_small(picture)), caption, width=WIDTH) for picture, caption in pictures])


def _small(picture: Image.Image) -> Image.Image:
    """At most twice as wide as it is shown, which is enough for fine screens."""
    if picture.width <= 2 * WIDTH:
        return picture
    return picture.resize((2 * WIDTH, max(1, round(picture.height * 2 * WIDTH / picture.width))))


def _key(classes: Sequence[str], shown: Sequence[Seen]) -> str:
    """Which colour is which class, of those in the pictures."""
    there = sorted({int(label) for one in shown for half in (one.truth, one.found) for label in np.unique(half)})
    colours = palette(len(classes))
    items = "".join(
        f'<li><span style="display: inline-block; width: 1em; height: 1em; background: rgb{colours[label]}"></span> '
        f"{escape(classes[label])}</li>"
        for label in there
        if label != UNLABELLED
    )
    return f'<ul class="key">{items}</ul>'

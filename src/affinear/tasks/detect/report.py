"""What a report shows of a detector: the images it finds hardest, beside their truth, and each class by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import nn

from ...train.page import Section, cards, figure, png, table
from ..images.reading import CorruptImage
from .coco import Coco
from .drawing import drawn
from .finding import as_tensor, at_least, found_of
from .precision import Found, Kind, Matches, Truth, evaluate, match
from .scoring import score_of, worth
from .settings import Detection

LOOKED_AT = 64  # test images, evenly among all, from which the hardest are shown
SHOWN = 6
WIDTH = 400  # of a picture on the page
SURE = 0.5  # what is less sure is not drawn
OPACITY = 0.45


@dataclass(frozen=True)
class Seen:
    """A test image, what is there and what was found.

    Attributes:
        name: Its file.
        image: In RGB.
        truth: What it shows.
        found: What was found.
        worth: AP within the image.
    """

    name: str
    image: Image.Image
    truth: Truth
    found: Found
    worth: float


@torch.no_grad()
def sections(network: nn.Module, data: Coco, settings: Detection, truth_of: Callable[[int], Truth]) -> list[Section]:
    """The hardest of some test images, and how well each class is found in all of them."""
    device, cap = next(network.parameters()).device, settings.detections
    assert cap is not None
    kind, seen = "mask" if settings.masks else "box", list[Seen]()
    for index in np.linspace(0, len(data.test) - 1, min(len(data.test), LOOKED_AT)).astype(int).tolist():
        try:
            image, _ = data.test[index]
        except CorruptImage:
            continue
        told = network([as_tensor(np.asarray(image)).to(device)])[0]
        found, truth = found_of(told, data.test.sizes[index]), truth_of(index)
        score = worth(evaluate([truth], [found], len(data.class_names), kind, cap))
        seen.append(Seen(data.test.path(index), image, truth, found, score))
    hardest = sorted(seen, key=lambda one: one.worth)[:SHOWN]
    if not hardest:
        return []
    note = (
        f"Of {len(seen)} test images, those with the lowest {kind} AP of their own, at most {cap} detections each: the "
        f"truth, and what the network found with a score of {SURE:.0%} or more."
    )
    rows = "".join(_row(one, data.class_names) for one in hardest)
    return [Section("The hardest images", rows, note), _classes(seen, data.class_names, settings.masks is True, cap)]


def _classes(seen: Sequence[Seen], names: Sequence[str], masks: bool, cap: int) -> Section:
    """How well each class is found, boxes and masks."""
    kinds: tuple[Kind, ...] = ("box", "mask") if masks else ("box",)
    matches: dict[Kind, list[Matches]] = {
        kind: [found for i, one in enumerate(seen) for found in match(i, one.truth, one.found, kind, cap)]
        for kind in kinds
    }
    parts = score_of(matches, names, len(seen), cap, ()).parts
    rows = [
        [part.name, str(part.count), *(f"{part.numbers[f'{kind}_ap']:.1%}" for kind in kinds)]
        for part in parts
        if part.count
    ]
    head = ["class", "images", *(f"{kind} AP" for kind in kinds)]
    return Section("Class by class", table(head, rows), f"In {len(seen)} test images.")


def _row(one: Seen, names: tuple[str, ...]) -> str:
    """An image with its truth and with what was found, side by side."""
    sure = at_least(one.found, SURE)
    name = one.name.replace("\\", "/").rpartition("/")[2]
    pictures = (
        (drawn(one.image, one.truth, names, OPACITY), f"{name}: truth, {len(one.truth.labels)} objects"),
        (drawn(one.image, sure, names, OPACITY), f"found {len(sure.labels)}; AP of this image {one.worth:.0%}"),
    )
    return cards([figure(png(_small(picture)), caption, width=WIDTH) for picture, caption in pictures])


def _small(picture: Image.Image) -> Image.Image:
    """At most twice as wide as it is shown, which is enough for fine screens."""
    if picture.width <= 2 * WIDTH:
        return picture
    return picture.resize((2 * WIDTH, max(1, round(picture.height * 2 * WIDTH / picture.width))))

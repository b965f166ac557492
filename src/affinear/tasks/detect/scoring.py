"""How well a detector does on test images: average precision of boxes and of masks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...train.task import Measure, Part, Score
from .precision import Kind, Matches, Precision, summarize

BOX_AP = Measure("box_ap", "box AP")
MEASURES = (
    BOX_AP,
    Measure("box_ap50", "box AP50"),
    Measure("box_ap75", "box AP75"),
    Measure("mask_ap", "mask AP"),
    Measure("mask_ap50", "mask AP50"),
    Measure("mask_ap75", "mask AP75"),
    Measure("cap", "cap of detections", form=".0f"),
)
NUMBERS = ("ap", "ap50", "ap75", "small", "medium", "large", "recall")


def score_of(
    matches: Mapping[Kind, Sequence[Matches]], names: Sequence[str], count: int, cap: int, skipped: tuple[str, ...]
) -> Score:
    """The score of a test set.

    Args:
        matches: Of boxes and, where there are some, of masks, of all images.
        names: Of the classes.
        count: Images.
        cap: Detections of a class in an image that were counted at most.
        skipped: Images that could not be read.
    """
    found = {kind: summarize(parts, len(names), cap) for kind, parts in matches.items()}
    numbers = {f"{kind}_{name}": getattr(one, name) for kind, one in found.items() for name in NUMBERS}
    showing = [sum(1 for one in matches["box"] if one.label == i and one.wanted[0]) for i in range(len(names))]
    parts = tuple(
        Part(name, showing[i], {f"{kind}_ap": one.by_class[i] for kind, one in found.items() if showing[i]})
        for i, name in enumerate(names)
    )
    known = {name: value for name, value in numbers.items() if not math.isnan(value)}
    known.setdefault("box_ap", 0.0)  # of a test set without a single object
    return Score({**known, "cap": float(cap)}, count, parts, skipped)


def worth(found: Precision) -> float:
    """How well one image went, for finding the hardest: AP, or 1 where there was nothing to find."""
    return 1.0 if math.isnan(found.ap) else found.ap

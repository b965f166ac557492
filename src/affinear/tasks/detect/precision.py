"""Average precision of boxes and masks, by the rules of COCO's own evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .runs import Runs, overlaps

Floats: TypeAlias = NDArray[np.float64]
Bools: TypeAlias = NDArray[np.bool_]
Kind: TypeAlias = Literal["box", "mask"]

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
AREAS = ("all", "small", "medium", "large")
LIMITS = np.array([[0, 1e10], [0, 32**2], [32**2, 96**2], [96**2, 1e10]])  # pixels


@dataclass(frozen=True)
class Truth:
    """The objects that one image shows.

    Attributes:
        boxes: (N, 4), left, top, width and height.
        labels: (N,), classes from 0.
        areas: (N,), pixels of the objects: what makes them small, medium or large, for boxes as well.
        crowd: (N,), True for a region of many objects: what is found inside is neither right nor wrong.
        masks: Of all objects; None where there are only boxes.
    """

    boxes: Floats
    labels: NDArray[np.int64]
    areas: Floats
    crowd: Bools
    masks: tuple[Runs, ...] | None = None


@dataclass(frozen=True)
class Found:
    """What a network found in one image.

    Attributes:
        boxes: (N, 4), left, top, width and height.
        labels: (N,), classes from 0.
        scores: (N,), how sure the network is.
        masks: Of all objects; None if it finds boxes alone.
    """

    boxes: Floats
    labels: NDArray[np.int64]
    scores: Floats
    masks: tuple[Runs, ...] | None = None


@dataclass(frozen=True)
class Matches:
    """Which detections of one class in one image are right, at 10 thresholds and for 4 ranges of area.

    Attributes:
        image: Its number, which settles the order among equal scores.
        label: The class.
        scores: (D,), falling.
        right: (4, 10, D), matched with an object.
        ignored: (4, 10, D), neither right nor wrong.
        wanted: (4,), objects that should be found.
    """

    image: int
    label: int
    scores: Floats
    right: Bools
    ignored: Bools
    wanted: NDArray[np.int64]


@dataclass(frozen=True)
class Precision:
    """Average precision over a data set; NaN where there is no such object.

    Attributes:
        ap: Mean over thresholds from 0.5 to 0.95.
        ap50: At threshold 0.5.
        ap75: At threshold 0.75.
        small: Of objects below 32 x 32 pixels.
        medium: Of objects between.
        large: Of objects above 96 x 96 pixels.
        recall: Share of the objects that is found at all, mean over thresholds.
        by_class: `ap` of each class.
        cap: Detections of a class in an image that were counted at most.
    """

    ap: float
    ap50: float
    ap75: float
    small: float
    medium: float
    large: float
    recall: float
    by_class: tuple[float, ...]
    cap: int


def match(image: int, truth: Truth, found: Found, kind: Kind, cap: int) -> list[Matches]:
    """Match what was found in an image with what it shows, class by class.

    Args:
        image: Number of the image.
        truth: What it shows.
        found: What was found.
        kind: Whether boxes or masks have to overlap.
        cap: Detections of each class that count at most, the surest first.
    """
    matches: list[Matches] = []
    for label in np.union1d(truth.labels, found.labels).tolist():
        objects = np.flatnonzero(truth.labels == label)
        guesses = np.flatnonzero(found.labels == label)
        guesses = guesses[np.argsort(-found.scores[guesses], kind="stable")][:cap]
        matches.append(_match_class(image, int(label), truth, found, objects, guesses, kind))
    return matches


def summarize(matches: Iterable[Matches], classes: int, cap: int) -> Precision:
    """Average precision of all matches of a data set.

    Args:
        matches: Of every image once, in any order.
        classes: Number of classes.
        cap: What `match` was given.
    """
    groups: list[list[Matches]] = [[] for _ in range(classes)]
    for one in sorted(matches, key=lambda one: one.image):
        groups[one.label].append(one)
    table = np.full((classes, len(AREAS), len(THRESHOLDS), len(RECALLS)), np.nan)
    recall = np.full((classes, len(AREAS), len(THRESHOLDS)), np.nan)
    for label, group in enumerate(groups):
        for area in range(len(AREAS)):
            curve = _curve(group, area)
            if curve is not None:
                table[label, area], recall[label, area] = curve
    return Precision(
        ap=_mean(table[:, 0]),
        ap50=_mean(table[:, 0, 0]),
        ap75=_mean(table[:, 0, 5]),
        small=_mean(table[:, 1]),
        medium=_mean(table[:, 2]),
        large=_mean(table[:, 3]),
        recall=_mean(recall[:, 0]),
        by_class=tuple(_mean(table[label, 0]) for label in range(classes)),
        cap=cap,
    )


def evaluate(truths: Sequence[Truth], found: Sequence[Found], classes: int, kind: Kind, cap: int) -> Precision:
    """Average precision of what was found in images.

    Args:
        truths: Of each image what it shows.
        found: Of each image what was found.
        classes: Number of classes.
        kind: Whether boxes or masks have to overlap.
        cap: Detections of each class and image that count at most.

    Example:
        >>> import numpy as np
        >>> box, label = np.array([[2.0, 2.0, 8.0, 8.0]]), np.array([0])
        >>> truth = Truth(box, label, np.array([64.0]), np.array([False]))
        >>> round(evaluate([truth], [Found(box + 0.5, label, np.array([0.9]))], 1, "box", 100).ap50, 6)
        1.0
    """
    pairs = enumerate(zip(truths, found, strict=True))
    matched = (one for image, (truth, guess) in pairs for one in match(image, truth, guess, kind, cap))
    return summarize(matched, classes, cap)


def box_overlaps(boxes: Floats, others: Floats) -> Floats:
    """Pixels that each of some boxes shares with each of others, (N, M); boxes are left, top, width, height."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, :2] + boxes[:, None, 2:], others[None, :, :2] + others[None, :, 2:])
    sides = np.clip(high - low, 0, None)
    return sides[..., 0] * sides[..., 1]


def _match_class(
    image: int,
    label: int,
    truth: Truth,
    found: Found,
    objects: NDArray[np.int64],
    guesses: NDArray[np.int64],
    kind: Kind,
) -> Matches:
    crowd = truth.crowd[objects]
    areas, shares = _shares(truth, found, objects, guesses, kind)
    outside = _outside(truth.areas[objects]) | crowd
    right, ignored = _assign(shares, outside, crowd)
    # What is not matched does not count where its own area is of another range.
    ignored |= ~right & _outside(areas)[:, None, :]
    return Matches(image, label, found.scores[guesses], right, ignored, (~outside).sum(axis=1))


def _shares(
    truth: Truth, found: Found, objects: NDArray[np.int64], guesses: NDArray[np.int64], kind: Kind
) -> tuple[Floats, Floats]:
    """Areas of detections, and intersection over union with objects; for a crowd, over the detection alone."""
    if kind == "box":
        boxes, others = found.boxes[guesses], truth.boxes[objects]
        areas, object_areas = boxes[:, 2] * boxes[:, 3], others[:, 2] * others[:, 3]
        shared = box_overlaps(boxes, others)
    else:
        if truth.masks is None or found.masks is None:
            raise ValueError("kind: masks are asked for, but there are only boxes")
        masks, other_masks = [found.masks[i] for i in guesses], [truth.masks[i] for i in objects]
        areas = np.array([mask.area for mask in masks], np.float64)
        object_areas = np.array([mask.area for mask in other_masks], np.float64)
        shared = overlaps(masks, other_masks)
    together = areas[:, None] + object_areas - shared
    either = np.where(truth.crowd[objects], areas[:, None], together)
    return areas, np.divide(shared, either, out=np.zeros_like(shared), where=either > 0)


def _outside(areas: Floats) -> Bools:
    """Whether areas (N,) lie outside of each range, (4, N)."""
    return (areas < LIMITS[:, :1]) | (areas > LIMITS[:, 1:])


def _assign(shares: Floats, outside: Bools, crowd: Bools) -> tuple[Bools, Bools]:
    """Give every detection, the surest first, the object it covers best of those that are left.

    An object that counts goes before any that does not; of equal ones the last is taken; a crowd is never used up.
    """
    count, objects = shares.shape
    kinds = (len(LIMITS), len(THRESHOLDS))
    right, ignored = np.zeros((count, *kinds), np.bool_), np.zeros((count, *kinds), np.bool_)
    taken, left_out = np.zeros((objects, *kinds), np.bool_), outside.T[:, :, None]
    least = np.minimum(THRESHOLDS, 1 - 1e-10)
    close = shares >= least[0]
    for guess in np.flatnonzero(close.any(axis=1)).tolist() if objects else ():
        near = np.flatnonzero(close[guess])
        if len(near) == 1:  # nothing to choose, as is usual
            (best,) = near
            hit = shares[guess, best] >= least
            free = hit & (~taken[best] | crowd[best])
            right[guess], ignored[guess] = free, free & left_out[best]
            taken[best] |= free
            continue
        good = shares[guess, near, None] >= least
        free = good[:, None, :] & (~taken[near] | crowd[near, None, None])
        counted = free & ~left_out[near]
        some = counted.any(axis=0)
        worth = np.where(np.where(some, counted, free), shares[guess, near, None, None], -1.0)
        choice = len(near) - 1 - worth[::-1].argmax(axis=0)
        hit = free.any(axis=0)
        right[guess], ignored[guess] = hit, hit & ~some
        area, threshold = np.nonzero(hit)
        taken[near[choice[area, threshold]], area, threshold] = True
    return right.transpose(1, 2, 0), ignored.transpose(1, 2, 0)


def _curve(group: Sequence[Matches], area: int) -> tuple[Floats, Floats] | None:
    """Precision (10, 101) at given recalls, and the greatest recall (10,); None if there is nothing to find."""
    wanted = int(sum(one.wanted[area] for one in group))
    if not wanted:
        return None
    scores = np.concatenate([one.scores for one in group])
    order = np.argsort(-scores, kind="stable")
    right = np.concatenate([one.right[area] for one in group], axis=1)[:, order]
    ignored = np.concatenate([one.ignored[area] for one in group], axis=1)[:, order]
    counted = np.logical_not(ignored)
    hits = np.cumsum(right & counted, axis=1, dtype=np.float64)
    misses = np.cumsum(~right & counted, axis=1, dtype=np.float64)
    recall = hits / wanted
    precision = hits / (hits + misses + np.spacing(1))
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    table = np.zeros((len(THRESHOLDS), len(RECALLS)))
    for row in range(len(THRESHOLDS)):
        places = np.searchsorted(recall[row], RECALLS, side="left")
        reached = places < len(scores)
        table[row, reached] = precision[row, places[reached]]
    return table, recall[:, -1] if len(scores) else np.zeros(len(THRESHOLDS))


def _mean(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")

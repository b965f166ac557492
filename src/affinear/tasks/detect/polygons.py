"""Polygons: outlines of objects turned into masks, pixel by pixel as COCO's own tools do it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...lens.budget import LONGEST
from .runs import Counts, Runs, union

FINER = 5  # outlines are drawn on a grid so many times finer than the image
FARTHEST = 4.0 * LONGEST  # pixels from the corner of an image
MOST_POINTS = 2**21  # of that grid, along all outlines of one object


def rasterize(polygons: Sequence[Sequence[float]], height: int, width: int) -> Runs:
    """The mask of an object whose parts are given by their outlines.

    Args:
        polygons: Of each part x, y, x, y ... of its corners, at least three.
        height: Of the image.
        width: Of the image.

    Raises:
        ValueError: If an outline has fewer than three corners or half of one, or is longer than any object's.

    Example:
        >>> rasterize([[1, 1, 4, 1, 4, 3, 1, 3]], 5, 6).area
        6
    """
    try:
        parts = [np.asarray(one, np.float64) for one in polygons]
    except (TypeError, ValueError, OverflowError):
        parts = []
    if not parts or any(one.ndim != 1 or len(one) < 6 or len(one) % 2 for one in parts):
        raise ValueError("expected outlines of three corners or more, each as x, y, x, y ...")
    corners = [one.reshape(-1, 2) for one in parts]
    far = not all((np.abs(one) <= FARTHEST).all() for one in corners)  # and NaN is not less
    if far or FINER * sum(map(_length, corners)) + sum(map(len, corners)) > MOST_POINTS:
        raise ValueError(
            "expected outlines near their image, got one that is farther away, or longer, than any object's"
        )
    return union([_fill(one, height, width) for one in corners])


def _length(corners: NDArray[np.float64]) -> float:
    """Pixels along a closed outline, of each line the more of its width and its height."""
    return float(np.abs(np.diff(corners, axis=0, append=corners[:1])).max(axis=1).sum())


def _fill(corners: NDArray[np.float64], height: int, width: int) -> Runs:
    """One closed outline: where it crosses the middle of a column, inside and outside change places."""
    fine = np.trunc(FINER * corners + 0.5).astype(np.int64)
    x, y = _outline(np.concatenate((fine, fine[:1])))
    moved = np.flatnonzero(x[1:] != x[:-1])
    before, after = x[moved], x[moved + 1]
    column = (np.where(after < before, after, after - 1) + 0.5) / FINER - 0.5
    kept = (np.floor(column) == column) & (column >= 0) & (column <= width - 1)
    row = (np.minimum(y[moved], y[moved + 1])[kept] + 0.5) / FINER - 0.5
    rows = np.ceil(np.clip(row, 0, height)).astype(np.int64)
    places = np.sort(column[kept].astype(np.int64) * height + rows)
    return _alternate(np.append(places, height * width), height, width)


def _outline(points: Counts) -> tuple[Counts, Counts]:
    """Every point of the fine grid along lines from corner to corner, both ends of each included."""
    xs: list[Counts] = []
    ys: list[Counts] = []
    for (x0, y0), (x1, y1) in zip(points[:-1].tolist(), points[1:].tolist(), strict=True):
        flat = abs(x1 - x0) >= abs(y1 - y0)
        start, end, other, other_end = (x0, x1, y0, y1) if flat else (y0, y1, x0, x1)
        turned = start > end  # lines are drawn upwards, so that both directions round alike
        if turned:
            start, end, other, other_end = end, start, other_end, other
        steps = np.arange(end - start + 1)
        slope = (other_end - other) / (end - start) if end > start else 0.0
        along, across = steps + start, np.trunc(other + slope * steps + 0.5).astype(np.int64)
        if turned:
            along, across = along[::-1], across[::-1]
        xs.append(along if flat else across)
        ys.append(across if flat else along)
    return np.concatenate(xs), np.concatenate(ys)


def _alternate(places: Counts, height: int, width: int) -> Runs:
    """Runs that change at rising places; two changes at one place undo each other."""
    counts = np.diff(np.append(0, places)).tolist()
    joined: list[int] = [counts[0]]
    number = 1
    while number < len(counts):
        if counts[number]:
            joined.append(counts[number])
            number += 1
        else:
            if number + 1 < len(counts):
                joined[-1] += counts[number + 1]
            number += 2
    return Runs(height, width, np.asarray(joined, np.int64))

"""Pathfinder: whether two dots lie on one dashed contour, among others that come close. Made up, many at a time.

A contour is a chain of short strokes with gaps between them. Each stroke turns by an angle d whose density falls as the
square of cos(continuity * d). Two contours begin near the middle and grow in turn; strokes of different contours, and
strokes of one contour that do not follow each other, keep a distance that is larger than the gap. Short contours lie
about. One dot marks the beginning of one of the two long contours, the other dot the end of the same one, or else of
the other one. Sizes are those of the Long Range Arena; the drawing is our own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..options import options
from .sequences import Ranges, Rows, Split

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Look:
    """How pictures are drawn; lengths are in pixels.

    Attributes:
        side: Of a picture.
        strokes: Of a long contour.
        short_strokes: Of a short one.
        short_contours: How many short ones there are, where there is room.
        stroke: Length of a stroke.
        margin: Half of the gap between strokes, and half of what other strokes keep away at least.
        thickness: Of a stroke.
        contrast: Brightness of a stroke; dots have 1.
        radius: Of a dot.
        apart: How far the beginnings of the two long contours are from each other.
        border: What stays free at the border.
        continuity: How straight contours are.
    """

    side: int
    strokes: int
    short_strokes: int
    short_contours: int
    stroke: float
    margin: float
    thickness: float
    contrast: float
    radius: float
    apart: float
    border: float
    continuity: float

    @property
    def reach(self) -> float:
        """What strokes that do not follow each other keep away from each other, from middle to middle."""
        return 2 * self.margin + self.thickness


LOOKS = {
    "pathfinder": Look(32, 14, 4, 5, 2.0, 1.0, 0.5, 0.75, 1.5, 7.0, 1.0, 1.0),
    "pathx": Look(128, 14, 4, 7, 5.0, 3.0, 1.5, 1.0, 3.0, 20.0, 4.0, 1.0),
}
USUAL = {"train": 160_000, "validation": 20_000, "test": 20_000, "seed": 0}
CLASSES = ("apart", "connected")
CHUNK = 1_000  # pictures of one stream of random numbers
TRIES = 24  # angles that a stroke is tried with at once
ROUNDS = 100_000  # strokes that are tried before one gives up


class Contours(NamedTuple):
    """The strokes of so many pictures.

    Attributes:
        points: (B, S, 2, 2), both ends of each stroke, y and x.
        there: (B, S), whether there is such a stroke.
    """

    points: Floats
    there: NDArray[np.bool_]


def made(spec: str) -> Ranges:
    """The data set that "pathfinder", "pathx", or either with options such as "pathfinder:train=1000", stands for.

    Raises:
        ValueError: If an option is not known.
    """
    kind = spec.partition(":")[0]
    look, chosen = LOOKS[kind], options(spec, USUAL)
    titles = tuple(USUAL)[:3]
    counts = [chosen[title] for title in titles]
    if min(counts) < 1:
        raise ValueError(f"data: {kind}: expected at least one picture in train, validation and test")
    pictures, labels = drawn(sum(counts), look, chosen["seed"])
    ends = np.cumsum(counts)
    train, validation, test = (
        Split((_rows(pictures[end - count : end]),), labels[end - count : end], title)
        for title, count, end in zip(titles, counts, ends, strict=True)
    )
    return Ranges(kind if chosen == USUAL else spec, "pathfinder", train, validation, test, CLASSES, 256, look.side**2)


def _rows(pictures: NDArray[np.uint8]) -> Rows:
    pixels = pictures.shape[1] * pictures.shape[2]
    return Rows(pictures.reshape(-1), np.arange(len(pictures) + 1, dtype=np.int64) * pixels)


def drawn(count: int, look: Look, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """So many pictures (count, side, side), and whether their dots are connected; the same whoever computes them."""
    chunks = range(-(-count // CHUNK))
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(partial(_chunk, count, look, seed), chunks))
    return np.concatenate([one for one, _ in made]), np.concatenate([labels for _, labels in made])


def _chunk(total: int, look: Look, seed: int, number: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    random, count = np.random.default_rng((seed, number)), min(CHUNK, total - number * CHUNK)
    long = two_contours(count, look, random)
    labels = random.integers(0, 2, count)
    first = random.integers(0, 2, count)  # the contour that the first dot is on
    last = np.where(labels == 1, first, 1 - first)
    each = np.arange(count)
    strokes = long.points.reshape(count, look.strokes, 2, 2, 2)  # strokes of the two contours take turns
    dots = np.stack((strokes[each, 0, first, 0], strokes[each, -1, last, 1]), axis=1)
    return paint(with_short_ones(long, look, random), dots, look), labels


def two_contours(count: int, look: Look, random: np.random.Generator) -> Contours:
    """Two long contours in each of so many pictures, which grow in turn; a dead end goes back by some strokes."""
    total = 2 * look.strokes
    found = Contours(np.zeros((count, total, 2, 2), np.float32), np.zeros((count, total), bool))
    starts, courses = _beginnings(count, look, random)
    done = np.zeros(count, np.int64)  # strokes of each picture that stand
    for _ in range(ROUNDS):
        open_ones = np.flatnonzero(done < total)
        if not len(open_ones):
            return found
        good = _one_more(found, open_ones, done[open_ones], starts, courses, look, random)
        back = random.integers(2, look.strokes, len(open_ones), endpoint=True)
        done[open_ones] = np.where(good, done[open_ones] + 1, np.maximum(0, done[open_ones] - back))
        found.there[open_ones] = np.arange(total) < done[open_ones, None]
        anew = open_ones[done[open_ones] == 0]
        starts[anew], courses[anew] = _beginnings(len(anew), look, random)
    raise ValueError(f"pathfinder: no room for two contours of {look.strokes} strokes in {look.side} pixels")


def _beginnings(count: int, look: Look, random: np.random.Generator) -> tuple[Floats, Floats]:
    """Where both contours of so many pictures begin, (count, 2, 2), and which way, (count, 2)."""
    spread = max(1.0, look.side / 2 - 2 * look.apart)
    angle = random.uniform(0, 2 * np.pi, count)
    here = (look.side - 1) / 2 + random.uniform(-spread, spread, (count, 2))
    there = here + look.apart * np.stack((np.sin(angle), np.cos(angle)), axis=1)
    ways = random.uniform(0, 2 * np.pi, (count, 2))
    return np.stack((here, there), axis=1).astype(np.float32), ways.astype(np.float32)


def _one_more(
    found: Contours,
    which: NDArray[np.int64],
    done: NDArray[np.int64],
    starts: Floats,
    courses: Floats,
    look: Look,
    random: np.random.Generator,
) -> NDArray[np.bool_]:
    """A stroke more in each of these pictures, where there is room; both contours take turns."""
    mine = Contours(found.points[which], found.there[which])
    each, fresh, before = np.arange(len(which)), done < 2, np.maximum(done - 2, 0)
    last = mine.points[each, before]
    way = last[:, 1] - last[:, 0]
    course = np.where(fresh, courses[which, done % 2], np.arctan2(way[:, 0], way[:, 1]))
    start = np.where(fresh[:, None], starts[which, done % 2], last[:, 1])
    turns = np.where(fresh[:, None], 0, _turns((len(which), TRIES), look, random))
    others = mine.there.copy()
    others[each[~fresh], before[~fresh]] = False
    strokes, good = _extended(Contours(mine.points, others), start, course, turns, ~fresh, look)
    found.points[which, done] = strokes
    return good


def _turns(shape: tuple[int, int], look: Look, random: np.random.Generator) -> Floats:
    """Angles whose density falls as the square of cos(continuity * angle), up to a right angle of that product."""
    # The sum's distribution is x + sin(2x) / 2; its inverse is read off a table.
    x = np.linspace(-np.pi / 2, np.pi / 2, 513)
    share = (x + np.sin(2 * x) / 2) / np.pi + 0.5
    return (np.interp(random.random(shape), share, x) / look.continuity).astype(np.float32)


def _extended(
    others: Contours, start: Floats, course: Floats, turns: Floats, goes_on: NDArray[np.bool_], look: Look
) -> tuple[Floats, NDArray[np.bool_]]:
    """A stroke (B, 2, 2) at the end of each contour, with the first of some turns that nothing is in the way of.

    Args:
        others: The strokes to keep away from.
        start: Where each contour ends, (B, 2).
        course: Which way it goes there.
        turns: Angles to try, (B, T).
        goes_on: Whether there is a stroke before, and a gap behind it.
        look: The sizes.

    Returns:
        The strokes, and whether there was such a turn.
    """
    angles = course[:, None] + turns
    ways = np.stack((np.sin(angles), np.cos(angles)), axis=-1)
    first = start[:, None] + (2 * look.margin * goes_on)[:, None, None] * ways
    strokes = np.stack((first, first + look.stroke * ways), axis=2).astype(np.float32)
    good = _free(others, strokes, look)
    return strokes[np.arange(len(good)), good.argmax(axis=1)], np.asarray(good.any(axis=1))


def _free(others: Contours, strokes: Floats, look: Look) -> NDArray[np.bool_]:
    """Whether each of some strokes (B, T, 2, 2) lies inside and away from those that are there."""
    inside = ((strokes >= look.border) & (strokes <= look.side - 1 - look.border)).all(axis=(2, 3))
    used = np.flatnonzero(others.there.any(axis=0))
    if not len(used):
        return np.asarray(inside)
    nearest = np.full((*strokes.shape[:2], len(used)), np.inf, np.float32)  # squares of distances
    for one in _dots(strokes, look):
        for other in _dots(others.points[:, used], look):
            away = one[:, :, None, 0] - other[:, None, :, 0]
            square = away * away
            away = one[:, :, None, 1] - other[:, None, :, 1]
            square += away * away
            np.minimum(nearest, square, out=nearest)
    near = (nearest < look.reach**2) & others.there[:, None, used]
    return np.asarray(inside & ~near.any(axis=2))


def _dots(strokes: Floats, look: Look) -> list[Floats]:
    """Points along strokes (..., 2, 2), about a pixel apart, each (..., 2)."""
    shares = np.linspace(0, 1, max(2, round(look.stroke) + 1), dtype=np.float32)
    return [strokes[..., 0, :] * (1 - share) + strokes[..., 1, :] * share for share in shares]


def with_short_ones(long: Contours, look: Look, random: np.random.Generator) -> Contours:
    """Short contours beside the long ones, wherever a few tries find room for a whole one."""
    count, before = long.there.shape
    more = look.short_contours * look.short_strokes
    points = np.concatenate((long.points, np.zeros((count, more, 2, 2), np.float32)), axis=1)
    found = Contours(points, np.concatenate((long.there, np.zeros((count, more), bool)), axis=1))
    for number in range(look.short_contours):
        places = range(before + number * look.short_strokes, before + (number + 1) * look.short_strokes)
        for _ in range(4):
            left = np.flatnonzero(~found.there[:, places[-1]])
            _try_short(found, left, places, look, random)
    return found


def _try_short(
    found: Contours, left: NDArray[np.int64], places: range, look: Look, random: np.random.Generator
) -> None:
    """A short contour in each of some pictures, kept where it is whole."""
    points, there = found.points[left], found.there[left]
    start = random.uniform(look.border, look.side - 1 - look.border, (len(left), 2)).astype(np.float32)
    course = random.uniform(0, 2 * np.pi, len(left)).astype(np.float32)
    whole = np.ones(len(left), bool)
    for place in places:
        first = place == places[0]
        turns = np.zeros((len(left), 1), np.float32) if first else _turns((len(left), TRIES), look, random)
        goes_on = np.full(len(left), not first)
        # The stroke before is not in `there` yet: one may come close to it.
        points[:, place], good = _extended(Contours(points, there), start, course, turns, goes_on, look)
        whole &= good
        if not first:
            there[:, place - 1] = True
        start, way = points[:, place, 1], points[:, place, 1] - points[:, place, 0]
        course = np.arctan2(way[:, 0], way[:, 1])
    found.points[left, places[0] : places[-1] + 1] = points[:, places[0] : places[-1] + 1]
    found.there[left, places[0] : places[-1] + 1] = whole[:, None]


def paint(contours: Contours, dots: Floats, look: Look) -> NDArray[np.uint8]:
    """Pictures (B, side, side) of strokes and of dots (B, 2, 2), with soft edges."""
    count = len(dots)
    ends = np.concatenate((contours.points, np.stack((dots, dots), axis=2)), axis=1)
    there = np.concatenate((contours.there, np.ones((count, 2), bool)), axis=1)
    half = np.where(np.arange(ends.shape[1]) < contours.there.shape[1], look.thickness / 2, look.radius)
    bright = np.where(np.arange(ends.shape[1]) < contours.there.shape[1], look.contrast, 1.0)
    room = int(np.ceil(max(look.stroke / 2 + look.thickness, look.radius) + 1))
    patch = np.stack(np.meshgrid(*[np.arange(-room, room + 1)] * 2, indexing="ij"), axis=-1)
    canvas = np.zeros((count, look.side + 2 * room, look.side + 2 * room), np.float32)
    each = np.arange(count)[:, None, None]
    for number in range(ends.shape[1]):
        middle = np.rint(ends[:, number].mean(axis=1)).astype(np.int64).clip(0, look.side - 1)
        places = middle[:, None, None] + patch
        away = _distance(places.astype(np.float32), ends[:, number])
        shade = bright[number] * np.clip(half[number] + 0.5 - away, 0, 1) * there[:, number, None, None]
        rows, columns = places[..., 0] + room, places[..., 1] + room
        canvas[each, rows, columns] = np.maximum(canvas[each, rows, columns], shade)
    return np.rint(255 * canvas[:, room:-room, room:-room]).astype(np.uint8)


def _distance(places: Floats, ends: Floats) -> Floats:
    """From places (B, h, w, 2) to strokes (B, 2, 2)."""
    start, way = ends[:, None, None, 0], (ends[:, 1] - ends[:, 0])[:, None, None]
    share = ((places - start) * way).sum(-1) / np.maximum((way**2).sum(-1), 1e-9)
    nearest = start + np.clip(share, 0, 1)[..., None] * way
    return np.sqrt(((places - nearest) ** 2).sum(-1))

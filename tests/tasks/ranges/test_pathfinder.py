"""Pathfinder: contours keep their distance, dots are where the label says, and the same seed draws the same."""

from __future__ import annotations

import numpy as np
import pytest

from affinear.tasks.ranges import pathfinder
from affinear.tasks.ranges.pathfinder import LOOKS, drawn, made, paint, two_contours, with_short_ones

LOOK = LOOKS["pathfinder"]


def dense(stroke: np.ndarray) -> np.ndarray:
    share = np.linspace(0, 1, 5)[:, None]
    return stroke[0] * (1 - share) + stroke[1] * share


def test_strokes_follow_each_other_and_keep_away_from_all_others():
    random = np.random.default_rng()
    found = with_short_ones(two_contours(4, LOOK, random), LOOK, random)
    for points, there in zip(found.points, found.there, strict=True):
        assert there[: 2 * LOOK.strokes].all()
        for contour in range(2):
            chain = points[contour : 2 * LOOK.strokes : 2]
            assert np.allclose(np.linalg.norm(chain[1:, 0] - chain[:-1, 1], axis=1), 2 * LOOK.margin, atol=1e-4)
            assert np.allclose(np.linalg.norm(chain[:, 1] - chain[:, 0], axis=1), LOOK.stroke, atol=1e-4)
        used = np.flatnonzero(there)
        assert points[used].min() >= LOOK.border
        assert points[used].max() <= LOOK.side - 1 - LOOK.border
        for i in used:
            for j in used[used > i + 2]:  # the next of the same contour may come close
                gap = np.linalg.norm(dense(points[i])[:, None] - dense(points[j])[None], axis=-1).min()
                assert gap > LOOK.reach - 0.6  # between the points that were looked at


def test_dots_lie_on_one_contour_where_the_label_says_so(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def look(contours: pathfinder.Contours, dots: np.ndarray, size: pathfinder.Look) -> np.ndarray:
        seen.append((contours.points, dots))
        return paint(contours, dots, size)

    monkeypatch.setattr(pathfinder, "paint", look)
    pictures, labels = drawn(12, LOOK, int(np.random.default_rng().integers(2**31)))
    points, dots = seen[0]
    for number, label in enumerate(labels):
        begins, ends = points[number, :2, 0], points[number, 2 * LOOK.strokes - 2 : 2 * LOOK.strokes, 1]
        first = int(np.linalg.norm(begins - dots[number, 0], axis=1).argmin())
        last = int(np.linalg.norm(ends - dots[number, 1], axis=1).argmin())
        assert (first == last) == bool(label)
        for y, x in np.rint(dots[number]).astype(int):
            assert pictures[number, y, x] > 200
    assert pictures.shape == (12, 32, 32)
    assert set(labels.tolist()) <= {0, 1}


def test_the_same_seed_draws_the_same():
    spec = "pathfinder:train=4,validation=1,test=1,seed="
    assert made(spec + "5").fingerprint == made(spec + "5").fingerprint != made(spec + "6").fingerprint


def test_turns_have_the_density_of_a_squared_cosine():
    turns = pathfinder._turns((200, 100), LOOK, np.random.default_rng())
    counts, edges = np.histogram(turns, 20, (-np.pi / 2, np.pi / 2), density=True)
    middle = (edges[1:] + edges[:-1]) / 2
    assert np.abs(counts - 2 / np.pi * np.cos(middle) ** 2).max() < 0.05


@pytest.mark.exhaustive
def test_the_larger_one_can_be_drawn():
    data = made("pathx:train=3,validation=1,test=1")
    assert data.train.longest == data.train.shortest == 128 * 128

"""What happens to training photos follows from their seed, and photo and map go together."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from PIL import Image

from affinear.tasks.segment.pairs import UNLABELLED, Labels
from affinear.tasks.segment.variation import Variation, distort, fit, vary

PLAIN = Variation(crop=(32, 48), zoom=(1, 1), flip=0, photometric=False, one_class=1)


def striped(height: int = 64, width: int = 96) -> tuple[Image.Image, Labels]:
    """A photo whose grey is ten times its label, in columns eight pixels wide."""
    labels = np.broadcast_to(np.arange(width) // 8, (height, width)).astype(np.int16)
    return Image.fromarray(np.repeat((labels * 10).astype(np.uint8)[..., None], 3, axis=2)), labels


def test_one_seed_is_one_crop():
    photo, labels = striped()
    every = dataclasses.replace(PLAIN, zoom=(0.5, 2), flip=0.5, photometric=True)
    first, again, other = (vary(photo, labels, every, seed) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])


@pytest.mark.parametrize("zoom", [(1, 1), (2, 2), (0.75, 0.75)])
@pytest.mark.parametrize("flip", [0, 1])
def test_photo_and_map_are_cut_alike(zoom: tuple[float, float], flip: float):
    photo, labels = striped()
    for seed in range(8):
        pixels, found, inside = vary(photo, labels, dataclasses.replace(PLAIN, zoom=zoom, flip=flip), seed)
        assert pixels.shape == (3, 32, 48)
        assert found.shape == (32, 48)
        assert inside == (32, 48)
        # Bilinear resizing blurs the borders of stripes, and nothing else.
        away = np.abs(pixels[0].astype(int) - 10 * found) > 1
        assert away.mean() < (0 if zoom == (1, 1) else 0.35) + 1e-9
        assert (np.diff(found[0]) <= 0).all() if flip else (np.diff(found[0]) >= 0).all()


def test_what_is_missing_is_black_and_unlabelled():
    photo, labels = striped()
    small = dataclasses.replace(PLAIN, zoom=(0.25, 0.25))
    pixels, found, inside = vary(photo, labels, small, 0)
    assert inside == (16, 24)
    assert (found[:16, :24] != UNLABELLED).all()
    assert (found[16:] == UNLABELLED).all()
    assert (found[:, 24:] == UNLABELLED).all()
    assert not pixels[:, 16:].any()
    assert small.pads((64, 96))
    assert not PLAIN.pads((64, 96))
    assert PLAIN.pads((31, 96))


def test_no_class_has_nearly_all_where_that_can_be():
    """A quarter of the map is another class, in one corner: crops without it are tried again."""
    labels = np.zeros((64, 96), np.int16)
    labels[32:, 48:] = 1
    photo = Image.fromarray(np.zeros((64, 96, 3), np.uint8))

    def shares(one_class: float) -> list[float]:
        variation = dataclasses.replace(PLAIN, one_class=one_class)
        return [float(np.mean(vary(photo, labels, variation, seed)[1] == 0)) for seed in range(60)]

    assert np.mean(np.array(shares(0.75)) > 0.75) < np.mean(np.array(shares(1.0)) > 0.75) / 2


def test_unlabelled_pixels_are_no_class():
    labels = np.full((64, 96), UNLABELLED, np.int16)
    photo = Image.fromarray(np.zeros((64, 96, 3), np.uint8))
    assert (vary(photo, labels, dataclasses.replace(PLAIN, one_class=0.5), 0)[1] == UNLABELLED).all()


def test_zooms_are_spread_over_what_is_allowed():
    photo, labels = striped()
    sizes = [vary(photo, labels, dataclasses.replace(PLAIN, crop=(400, 400), zoom=(0.5, 2)), s)[2] for s in range(200)]
    rows = np.array([size[0] for size in sizes])
    assert rows.min() >= 32
    assert rows.max() <= 128
    assert abs(rows.mean() - 80) < 8


def test_sides_are_fitted_as_published():
    assert fit((360, 480), 512, 2048) == 512 / 360
    assert fit((100, 1000), 512, 2048) == 2.048
    assert fit((100, 1000), None, None) == 1


def test_light_and_colours_vary_within_bounds():
    random = np.random.default_rng(0)
    grey = np.full((8, 8, 3), 100, np.uint8)
    means = np.array([distort(grey, random).mean() for _ in range(400)])
    assert means.min() >= 0.5 * (100 - 32) - 1
    assert means.max() <= 1.5 * (100 + 32) + 1
    assert 0.05 < np.mean(np.abs(means - 100) < 0.5) < 0.5  # nothing happens to a quarter, as grey has no colour
    assert means.std() > 10


def test_hue_turns_and_keeps_its_light():
    red = np.zeros((4, 4, 3), np.uint8)
    red[..., 0] = 200
    seen = {tuple(distort(red, np.random.default_rng(seed))[0, 0].tolist()) for seed in range(60)}
    assert any(green > 20 for _, green, _ in seen)
    assert any(blue > 20 for _, _, blue in seen)

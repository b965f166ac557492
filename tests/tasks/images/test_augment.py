"""Shifting and mirroring by seed, and randomness that is borrowed and given back."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from affinear.tasks.images.augment import Augment, vary
from affinear.train.seeding import kept_randomness, seed_all


def several(seed: int, count: int = 40, shape: tuple[int, ...] = (3, 9, 7)) -> tuple[np.ndarray, np.ndarray]:
    random_numbers = np.random.default_rng(seed)
    pixels = random_numbers.integers(1, 256, (count, *shape), np.uint8)
    return pixels, random_numbers.integers(0, 2**63, count, np.uint64)


def test_each_result_is_a_crop_of_the_padded_image_perhaps_mirrored(seed: int):
    pixels, seeds = several(seed)
    varied = vary(pixels, np.arange(40), seeds, Augment("simple", pad=2, vflip=0.5))
    for image, new in zip(pixels, varied, strict=True):
        padded = np.pad(image, ((0, 0), (2, 2), (2, 2)))
        crops = [padded[:, y : y + 9, x : x + 7] for y in range(5) for x in range(5)]
        turned = [crop[:, ::up, ::across] for crop in crops for up in (1, -1) for across in (1, -1)]
        assert sum(np.array_equal(one, new) for one in turned) == 1


def test_all_shifts_and_both_sides_occur(seed: int):
    pixels = np.zeros((1, 1, 5, 5), np.uint8)
    pixels[0, 0, 2, 1] = 1
    seeds = np.arange(2000, dtype=np.uint64) + np.uint64(seed)
    varied = vary(pixels, np.zeros(2000, np.int64), seeds, Augment("simple", pad=1))
    _, places = np.unique(varied.reshape(2000, -1).argmax(1), return_counts=True)
    # Columns 0 to 2 as it is and 2 to 4 mirrored, so that the middle one comes twice as often as the others.
    assert len(places) == 15
    assert places.min() > 2000 / 18 / 2


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_certain_flips_are_certain(seed: int, share: float):
    pixels, seeds = several(seed)
    varied = vary(pixels, np.arange(40), seeds, Augment("simple", pad=0, hflip=share))
    np.testing.assert_array_equal(varied, pixels[..., ::-1] if share else pixels)


def test_a_result_does_not_depend_on_its_neighbours(seed: int):
    pixels, seeds = several(seed)
    order = np.random.default_rng(seed).permutation(40)
    augment = Augment("simple", pad=3)
    whole = vary(pixels, np.arange(40), seeds, augment)
    np.testing.assert_array_equal(vary(pixels, order, seeds[order], augment), whole[order])
    np.testing.assert_array_equal(vary(pixels, order[:1], seeds[order[:1]], augment), whole[order[:1]])


def test_borrowed_randomness_is_given_back(seed: int):
    def three() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def state() -> tuple[object, ...]:
        arrays: Any = np.random.get_state()
        return random.getstate(), arrays[1].tolist(), arrays[2:], torch.get_rng_state().tolist()

    before = state()
    with kept_randomness():
        seed_all(seed)
        first = three()
    assert state() == before
    three()
    before = state()

    def fail() -> None:
        with kept_randomness():
            seed_all(seed)
            assert three() == first
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fail()
    assert state() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", "strong"),
        ("remode", "blue"),
        ("hflip", 1.5),
        ("reprob", -0.1),
        ("pad", -1),
        ("repeats", 0),
        ("scale", (0.5, 0.1)),
        ("ratio", (0.0, 1.0)),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: object):
    with pytest.raises(ValueError, match=f"augment.{name}: expected"):
        Augment(**{name: value})  # pyright: ignore[reportArgumentType]

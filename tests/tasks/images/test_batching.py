"""One image as a network sees it, in evaluation and as timm varies it."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform

from affinear.tasks.images.augment import Augment
from affinear.tasks.images.batching import Batching, Normalize, as_tensor, timm_transform

GREY: dict[str, Any] = {"channels": 1, "mean": (0.5,), "std": (0.25,)}


def photo(seed: int, height: int, width: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.mark.parametrize("size", [(32, 32), (24, 40), (40, 24)])
@pytest.mark.parametrize("crop_pct", [1.0, 0.875])
def test_evaluation_is_timms(seed: int, size: tuple[int, int], crop_pct: float):
    batching = Batching(8, size, crop_pct=crop_pct)
    image = photo(seed, 50, 70)
    transform: Any = create_transform((3, *size), crop_pct=crop_pct, interpolation="bicubic")
    torch.testing.assert_close(as_tensor(image, batching), transform(image))


@pytest.mark.parametrize("size", [(8, 8), (8, 12)])
def test_an_image_of_the_right_size_is_not_resampled(seed: int, size: tuple[int, int]):
    image = photo(seed, *size)
    found = as_tensor(image, Batching(8, size, mean=(0.0,) * 3, std=(1.0,) * 3))
    np.testing.assert_array_equal((found * 255).round().numpy(), np.asarray(image).transpose(2, 0, 1))


def test_grey_and_colour_are_converted(seed: int):
    assert as_tensor(photo(seed, 9, 9), Batching(8, (8, 8), **GREY)).shape == (1, 8, 8)
    colour = as_tensor(photo(seed, 9, 9, "L"), Batching(8, (8, 8), mean=(0.5,) * 3, std=(0.5,) * 3))
    assert torch.equal(colour[0], colour[2])


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_every_part_of_timms_augmentation_runs_in_grey_and_in_colour(seed: int, mode: str):
    augment = Augment("timm", "rand-m9-mstd0.5-inc1", reprob=1.0, vflip=0.5)
    given = GREY if mode == "L" else {}
    transform = timm_transform(Batching(8, (20, 28), augment=augment, interpolation="random", **given))
    for number in range(30):
        assert transform(photo(seed + number, 40, 30, mode)).shape == (1 if mode == "L" else 3, 20, 28)


def test_a_policy_that_timm_does_not_know_is_named():
    augment = Augment("timm", "rand-q9")
    with pytest.raises(ValueError, match=r"augment.auto_augment: timm cannot read 'rand-q9'"):
        timm_transform(Batching(8, (8, 8), augment=augment))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("batch_size", {"batch_size": 0}),
        ("image_size", {"image_size": (8, 0)}),
        ("channels", {"channels": 4}),
        ("mean, std", {"channels": 1}),
        ("mean, std", {"std": (0.0, 1.0, 1.0)}),
        ("interpolation", {"interpolation": "sinc"}),
        ("crop_pct", {"crop_pct": 1.5}),
        ("workers", {"workers": -1}),
        ("augment.pad", {"augment": Augment("simple", pad=8)}),
    ],
)
def test_a_wrong_setting_is_named(name: str, given: dict[str, object]):
    with pytest.raises(ValueError, match=f"{name}: expected"):
        Batching(**({"batch_size": 8, "image_size": (8, 8)} | given))  # pyright: ignore[reportArgumentType]


def test_bytes_become_numbers_and_numbers_stay(seed: int):
    how = Batching(2, (4, 4), mean=(0.2, 0.4, 0.6), std=(0.1, 0.2, 0.3))
    pixels = torch.randint(256, (2, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    numbers = Normalize(how)(pixels)
    mean, std = (torch.tensor(one)[:, None, None] for one in (how.mean, how.std))
    torch.testing.assert_close(numbers, (pixels / 255 - mean) / std, rtol=1e-5, atol=1e-5)
    assert Normalize(how)(numbers) is numbers

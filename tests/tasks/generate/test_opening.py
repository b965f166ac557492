"""Latents in files, and pictures as classification reads them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from affinear.tasks.generate import TASK
from affinear.tasks.generate.opening import open_pictures
from affinear.tasks.generate.settings import Generation
from affinear.train.recipe import Recipe
from affinear.train.task import Job


def latents(count: int = 5, **other: Any) -> dict[str, Any]:
    chance = np.random.default_rng()
    return {"latents": chance.standard_normal((count, 4, 8, 6)).astype(np.float32), "labels": np.arange(count), **other}


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_latents_open_with_and_without_a_test_half(tmp_path: Path, kind: str):
    def write(name: str, content: dict[str, Any]) -> None:
        save_file(content, tmp_path / f"{name}.safetensors") if kind == "safetensors" else np.savez(
            tmp_path / f"{name}.npz", **content
        )

    write("train", latents())
    alone = open_pictures(str(tmp_path))
    assert (alone.sizes, alone.channels, alone.size, alone.is_latent) == ((5, 5), 4, (8, 6), True)
    assert alone.class_names == tuple(f"class {number}" for number in range(5))
    write("test", latents(3))
    (tmp_path / "classes.txt").write_text("a\nb\nc\nd\ne\n")
    both = open_pictures(str(tmp_path))
    assert (both.sizes, both.class_names) == ((5, 3), tuple("abcde"))
    assert both.fingerprint != alone.fingerprint
    assert TASK.limited(both, 2).sizes == (2, 2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (latents(latents=np.zeros((5, 4, 8))), r"expected latents \(N, C, H, W\) of floats, got shape \(5, 4, 8\)"),
        (latents(latents=np.zeros((5, 4, 8, 8), np.int64)), "of floats, got shape .* of int64"),
        (latents(labels=np.arange(4)), r"expected a class for each latent, .* shape \(5,\), got shape \(4,\)"),
        (latents(labels=np.arange(5) * 10**15), "expected classes below 131,072, got 4000000000000000"),
        (latents(labels=-np.arange(5)), "whole numbers from 0 on"),
        (latents(latents=np.full((5, 4, 8, 8), np.nan)), "expected finite latents, but number 0 holds one that is not"),
        ({"pixels": np.zeros(3)}, "expected arrays called latents and labels, got pixels"),
    ],
)
def test_what_is_wrong_with_latents_is_told_in_a_sentence(tmp_path: Path, content: dict[str, Any], said: str):
    np.savez(tmp_path / "train.npz", **content)
    with pytest.raises(ValueError, match=said) as refused:
        open_pictures(str(tmp_path))
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_names_of_classes_in_another_encoding_are_refused_with_their_file(tmp_path: Path):
    np.savez(tmp_path / "train.npz", **latents())
    (tmp_path / "classes.txt").write_bytes("Zoë".encode("latin-1"))
    with pytest.raises(ValueError, match=r"classes\.txt: expected text in UTF-8, got the byte 0xeb"):
        open_pictures(str(tmp_path))


def test_a_damaged_file_and_one_that_wants_to_run_code_are_refused(tmp_path: Path):
    (tmp_path / "train.npz").write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(ValueError, match="cannot be read as arrays"):
        open_pictures(str(tmp_path))
    np.savez(tmp_path / "train.npz", latents=np.array([object()]), labels=np.zeros(1))
    with pytest.raises(ValueError, match="cannot be read as arrays"):
        open_pictures(str(tmp_path))


def test_a_member_that_is_no_array_is_as_if_it_were_not_there(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "train.npz", "w") as archive:
        archive.writestr("latents.npy", b"no array")
    with pytest.raises(ValueError, match="expected arrays called latents and labels, got none"):
        open_pictures(str(tmp_path))


def test_halves_of_different_shapes_are_refused(tmp_path: Path):
    np.savez(tmp_path / "train.npz", **latents())
    np.savez(tmp_path / "test.npz", **latents(latents=np.zeros((5, 4, 4, 4), np.float32)))
    with pytest.raises(ValueError, match=r"expected latents of 4 x 8 x 6, as train\.npz has, got 4 x 4 x 4"):
        open_pictures(str(tmp_path))


def settled(folder: Path, model: str = "dit_s_2", model_args: dict[str, Any] | None = None, **changes: Any) -> Any:
    data = open_pictures(str(folder))
    return TASK.settle(Job(model, model_args or {}, Recipe(), Generation().changed(**changes)), data)


def test_what_does_not_fit_together_is_told(tmp_path: Path):
    np.savez(tmp_path / "train.npz", **latents())
    assert settled(tmp_path).facts == {"class_names": [f"class {n}" for n in range(5)], "channels": 4, "latent": True}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"features": "inception"}, "features: expected random, as latents are no pictures"),
        ({"image_size": (4, 4)}, "image_size: expected none, as the latents are 8 x 6"),
        ({"model": "mavit_tiny"}, "model: expected one that makes pictures, dit_s_2"),
        ({"model": "dit_s2"}, "model: expected one that makes pictures, dit_s_2"),
        ({"model_args": {"patch_size": 4}}, "latents whose sides are multiples of the patch, 4, got 8 x 6"),
        ({"model_args": {"num_classes": 3}}, "num_classes: expected 5, which data and process decide"),
    ]
    for changes, said in wrong:
        with pytest.raises(ValueError, match=said):
            settled(tmp_path, **changes)


def test_weights_of_inception_that_are_missing_are_told_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from PIL import Image

    (tmp_path / "cat").mkdir()
    for number in range(2):
        Image.new("RGB", (8, 8)).save(tmp_path / "cat" / f"{number}.png")
    monkeypatch.setenv("AFFINEAR_INCEPTION", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="features: expected a file of Inception's weights in AFFINEAR_INCEPTION"):
        settled(tmp_path, features="inception")


def test_a_picture_of_one_pixel_is_refused(tmp_path: Path):
    from PIL import Image

    for half in ("train", "val"):
        (tmp_path / half / "dot").mkdir(parents=True)
        Image.new("RGB", (1, 1)).save(tmp_path / half / "dot" / "1.png")
    with pytest.raises(ValueError, match="pictures whose sides are multiples of the patch, 2, got 1 x 1"):
        settled(tmp_path, image_size=(1, 1))

"""The script that turns a package of sheets into CIFAR-10's standard files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from affinear.tasks.classify.data import ArraySource, open_data

SCRIPT = Path(__file__).parents[3] / "evidence" / "packing" / "convert_cifar10.py"
ROWS = 20


@pytest.fixture
def script(module_at: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, for sheets of few images."""
    module = module_at(SCRIPT)
    monkeypatch.setattr(module, "ROWS", ROWS)
    return module


def package(folder: Path, seed: int) -> np.ndarray:
    """Six sheets and two lists; returns the images of all sheets, (6, ROWS, height, width, channels)."""
    folder.mkdir()
    sheets = np.random.default_rng(seed).integers(0, 256, (6, ROWS, 32, 32, 3), np.uint8)
    for name, sheet in zip([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"], sheets, strict=True):
        Image.fromarray(sheet.reshape(ROWS, 1024, 3)).save(folder / f"{name}.png")
    for name, count in (("train", 5 * ROWS), ("test", ROWS)):
        (folder / f"{name}_lables.json").write_text(json.dumps([n % 10 for n in range(count)]), encoding="utf-8")
    return sheets


def test_the_files_are_opened_as_cifar_10(tmp_path: Path, seed: int, script: Any, monkeypatch: pytest.MonkeyPatch):
    sheets = package(tmp_path / "package", seed)
    monkeypatch.setattr(script, "MEANS", tuple(sheets[:5].mean(axis=(0, 1, 2, 3)) / 255))
    script.convert(tmp_path / "package", tmp_path / "out")
    images = open_data(str(tmp_path / "out"))
    assert images.name.startswith("CIFAR-10 in ")
    assert images.class_names[3] == "cat"
    for source, expected in ((images.train, sheets[:5].reshape(-1, 32, 32, 3)), (images.test, sheets[5])):
        assert isinstance(source, ArraySource)
        np.testing.assert_array_equal(source.pixels.transpose(0, 2, 3, 1), expected)
        assert source.labels.tolist() == [n % 10 for n in range(len(expected))]


def test_other_images_are_refused_and_nothing_is_written(tmp_path: Path, seed: int, script: Any):
    package(tmp_path / "package", seed)
    with pytest.raises(ValueError, match="expected the channels' means"):
        script.convert(tmp_path / "package", tmp_path / "out")
    (tmp_path / "package" / "test_lables.json").write_text(json.dumps([0] * ROWS), encoding="utf-8")
    with pytest.raises(ValueError, match="expected 2 images of each class"):
        script.convert(tmp_path / "package", tmp_path / "out")
    Image.new("RGB", (32, 32)).save(tmp_path / "package" / "data_batch_2.png")
    with pytest.raises(ValueError, match=r"data_batch_2.png: expected 20 images of 32 x 32"):
        script.convert(tmp_path / "package", tmp_path / "out")
    assert not (tmp_path / "out").exists()

"""Images of CIFAR-10 in sheets, and out of them again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from affinear.tasks.images.labelled.images import ArraySource
from affinear.tasks.images.labelled.opening import open_data


@pytest.fixture
def packing(script: Any, tmp_path: Path) -> Any:
    """The script, and a folder of the binary version beside it."""
    module, random = script("packing.pack_cifar10"), np.random.default_rng()
    (tmp_path / "whole").mkdir()
    for name in (*module.TRAIN, module.TEST):
        rows = random.integers(0, 256, (50, 3073), np.uint8)
        rows[:, 0] = random.permutation(np.arange(50) % 10)
        rows.tofile(tmp_path / "whole" / f"{name}.bin")
    (tmp_path / "whole" / module.NAMES).write_text("\n".join(module.CLASSES), encoding="utf-8")
    return module


@pytest.mark.parametrize(("levels", "off"), [(256, 0), (128, 1), (64, 2)])
def test_images_come_back_with_their_classes_and_nearly_their_colours(
    packing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, levels: int, off: int
):
    for source, output in (("whole", "sheets"), ("sheets", "again")):
        told = ["pack_cifar10", str(tmp_path / source), str(tmp_path / output), "--levels", str(levels)]
        monkeypatch.setattr(sys, "argv", told)
        packing.main()
    before, after = (open_data(str(tmp_path / name)) for name in ("whole", "again"))
    for one, other in ((before.train, after.train), (before.test, after.test)):
        assert isinstance(one, ArraySource)
        assert isinstance(other, ArraySource)
        np.testing.assert_array_equal(one.labels, other.labels)
        assert np.abs(one.pixels.astype(int) - other.pixels.astype(int)).max() == off


def test_some_sheets_are_read_without_the_others(packing: Any, tmp_path: Path):
    rows = np.random.default_rng().integers(0, 256, (100, 3073), np.uint8)
    rows[:, 0] %= 10
    for name, part in (("one", rows[:50]), ("two", rows[50:])):
        (tmp_path / name).write_bytes(packing.packed(part))
    images, classes = packing.pictures_of([tmp_path / "one", tmp_path / "two"])
    np.testing.assert_array_equal(images.reshape(100, -1), rows[:, 1:])
    np.testing.assert_array_equal(classes, rows[:, 0])


def test_what_fills_no_sheet_is_told(packing: Any):
    with pytest.raises(ValueError, match="expected a multiple of 50, got 60"):
        packing.packed(np.zeros((60, 3073), np.uint8))

"""Some images of CIFAR-10 in one file, and out of it again."""

from __future__ import annotations

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
        rows = random.integers(0, 256, (60, 3073), np.uint8)
        rows[:, 0] = random.permutation(np.arange(60) % 10)
        rows.tofile(tmp_path / "whole" / name)
    (tmp_path / "whole" / module.NAMES).write_text("\n".join(module.CLASSES), encoding="utf-8")
    return module


def test_images_come_back_with_their_classes_and_nearly_their_colours(packing: Any, tmp_path: Path):
    size = packing.pack(tmp_path / "whole", tmp_path / "some.webp", 250, 50)
    assert size == (tmp_path / "some.webp").stat().st_size
    packing.unpack(tmp_path / "some.webp", tmp_path / "again")
    whole, again = (open_data(str(tmp_path / name)) for name in ("whole", "again"))
    for before, after, count in ((whole.train, again.train, 250), (whole.test, again.test, 50)):
        assert isinstance(before, ArraySource)
        assert isinstance(after, ArraySource)
        assert np.bincount(after.labels).tolist() == [count // 10] * 10
        for number in range(10):
            mine = after.pixels[after.labels == number].astype(int)
            theirs = before.pixels[before.labels == number][: len(mine)].astype(int)
            assert np.abs(mine - theirs).max() <= 2


def test_what_is_not_there_is_told(packing: Any, tmp_path: Path):
    with pytest.raises(ValueError, match="expected a multiple of 50, got 260"):
        packing.pack(tmp_path / "whole", tmp_path / "some.webp", 260, 50)
    with pytest.raises(ValueError, match="expected 40 of every class, got 30"):
        packing.pack(tmp_path / "whole", tmp_path / "some.webp", 400, 50)
    assert not (tmp_path / "some.webp").exists()

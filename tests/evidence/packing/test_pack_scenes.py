"""Scenes packed into a file and unpacked: maps as they were, photos of their size and nearly as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from affinear.tasks.segment.opening import open_scenes

from ..scenes import folder


def test_what_is_unpacked_opens_as_what_was_packed(script: Any, tmp_path: Path) -> None:
    packing, data = script("packing.pack_scenes"), folder(tmp_path / "data", (72, 96), 3)
    packing.pack(data, tmp_path / "packed.tar", 36, 95)
    packing.unpack(tmp_path / "packed.tar", tmp_path / "there")
    before, after = (
        open_scenes(str(root), zero_is_class=False, test_split="test", memory=False)
        for root in (data, tmp_path / "there")
    )
    assert (after.sizes, after.classes) == (before.sizes, before.classes)
    for old, new in ((before.train, after.train), (before.test, after.test)):
        for number in range(len(old)):
            assert (old[number][1] == new[number][1]).all()
            photos = [np.asarray(half[number][0], np.float64) for half in (old, new)]
            assert photos[0].shape == photos[1].shape
            assert abs(photos[0] - photos[1]).mean() < 12

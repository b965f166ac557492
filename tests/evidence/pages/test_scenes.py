"""The figure of dense tasks is drawn from files alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ..conftest import EVIDENCE


@pytest.mark.exhaustive
def test_the_figure_is_drawn_from_maps_and_growth(tmp_path: Path) -> None:
    generator = np.random.default_rng()
    for folder in ("images", "annotations"):
        for half in ("training", "test"):
            (tmp_path / folder / half).mkdir(parents=True)
    for half in ("training", "test"):
        photo = generator.integers(0, 256, (24, 32, 3), np.uint8)
        Image.fromarray(photo).save(tmp_path / "images" / half / "a.jpg")
        Image.fromarray(generator.integers(0, 3, (24, 32), np.uint8)).save(tmp_path / "annotations" / half / "a.png")
    (tmp_path / "classes.txt").write_text("road\nsky\n")
    rows = [{"name": "linear", "side": side, "peak_gb": side / 512, "seconds": 0.1} for side in (512, 4096)]
    (tmp_path / "growth.json").write_text(json.dumps({"rows": rows}))
    command = [sys.executable, str(EVIDENCE / "pages" / "scenes.py"), "--data", str(tmp_path)]
    command += ["--growth", str(tmp_path / "growth.json"), "--out", str(tmp_path / "figure.png"), "--maps"]
    drawn = subprocess.run([*command, str(tmp_path / "annotations" / "test")], capture_output=True, text=True)
    assert drawn.returncode == 0, drawn.stderr
    with Image.open(tmp_path / "figure.png") as figure:
        assert figure.width > 1000
    results = tmp_path / "results" / "segmentation"
    shutil.copytree(tmp_path / "annotations" / "test", results / "maps")
    (tmp_path / "growth.json").rename(results / "counted.json")
    own = subprocess.run([*command[:4], "--out", "own.png"], cwd=tmp_path, capture_output=True, text=True)
    assert own.returncode == 0, own.stderr
    assert (tmp_path / "own.png").is_file()
    refused = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert "--maps: expected maps that are named as photos" in refused.stderr

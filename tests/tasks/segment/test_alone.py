"""Segmentation is trained and judged with torch, torchvision, timm, accelerate, safetensors and numpy alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from . import scenes

PROGRAM = """
import sys

for name in ("matplotlib", "rich", "typer", "sklearn", "transformers", "pycocotools", "torchmetrics", "datasets"):
    sys.modules[name] = None
from pathlib import Path

from affinear import tasks
from affinear.train import Run, train

data, output = sys.argv[1:]
small = {"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]}
setup = tasks.recipe_for("segment", "mavit_tiny", "small", steps=1, batch_size=2, workers=0, crop=(32, 32))
result = train(Run("mavit_tiny", data, Path(output), setup, small))
assert 0 <= result.value <= 1
assert tasks.evaluate(Path(output), data).count == 1
"""


def test_nothing_else_is_needed(tmp_path: Path):
    data = scenes.write(tmp_path / "streets", (2, 1), ((32, 48),))
    command = [sys.executable, "-c", PROGRAM, str(data), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").is_file()
    assert not (tmp_path / "run" / "curves.png").exists()

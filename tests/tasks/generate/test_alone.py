"""Generation is trained, judged and sampled with torch, torchvision, timm, accelerate, safetensors and numpy alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PROGRAM = """
import sys

for name in ("matplotlib", "rich", "typer", "sklearn", "transformers", "diffusers", "datasets", "scipy"):
    sys.modules[name] = None
from pathlib import Path

from affinear import tasks
from affinear.tasks.generate.settings import Drawing
from affinear.train import Run, train

data, output = sys.argv[1:]
small = {"embed_dim": 16, "depth": 1, "num_heads": 2}
setup = tasks.recipe_for("generate", "dit_s_2", "small", steps=1, batch_size=2, workers=0, made=4, sample_steps=2)
result = train(Run("dit_s_2", data, Path(output), setup, small))
assert result.value >= 0
trained = tasks.load_trained(Path(output))
assert len(next(trained.task.predict(trained, ["1"], Drawing())).files) == 4
try:
    next(trained.task.predict(trained, ["1"], Drawing(sampler="FlowMatchEulerDiscreteScheduler")))
except ValueError as error:
    assert str(error).startswith("sampler: FlowMatchEulerDiscreteScheduler is one of diffusers': pip install"), error
else:
    raise AssertionError
"""


@pytest.mark.exhaustive
def test_nothing_else_is_needed(tmp_path: Path):
    latents = np.random.default_rng().standard_normal((6, 2, 4, 4)).astype(np.float32)
    np.savez(tmp_path / "train.npz", latents=latents, labels=np.arange(6) % 2)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").is_file()

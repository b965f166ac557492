"""What changed between a run's end or death and its continuation is noticed, and said in a sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from affinear.tasks import evaluate
from affinear.tasks.classify import recipe_for
from affinear.tasks.classify.data import open_data
from affinear.train import Run, RunError, curves, train

MODEL = "affinear_trunk_micro"
SMALL: dict[str, Any] = {"depth": 1, "embed_dim": 16, "num_heads": 2, "img_size": 8}


def pictures(folder: Path) -> None:
    draw = np.random.default_rng()
    for half, count in (("train", 6), ("val", 2)):
        for name in ("cat", "dog"):
            (folder / half / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / half / name / f"{number}.png")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and with a run of it that is through, but for its last file."""
    folder = tmp_path_factory.mktemp("lost")
    pictures(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw", lambda output, *given: (output / curves.NAME).write_bytes(b""))
        train(run_in(folder))
    return folder


def run_in(folder: Path) -> Run:
    changes = {"epochs": 2, "batch_size": 4, "image_size": (8, 8), "workers": 0, "ema_decay": 0.9}
    return Run(MODEL, str(folder / "data"), folder / "run", recipe_for(MODEL, "tiny", **changes), SMALL)


def rename(folder: Path) -> None:
    (folder / "data/train/cat/3.png").rename(folder / "data/train/cat/new.png")


def swap(folder: Path) -> None:
    for one, other in (("cat", "x"), ("dog", "cat"), ("x", "dog")):
        (folder / "data/train" / one).rename(folder / "data/train" / other)


def flip(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = next((folder / "run").glob(name))
        content = bytearray(path.read_bytes())
        content[np.random.default_rng().integers(len(content) // 2, len(content))] ^= 1
        path.write_bytes(content)

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: next((folder / "run").glob(name)).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        next((folder / "run").glob(name)).write_text(text)

    return change


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (rename, "the data is not the same: names, sizes or classes"),
        (swap, "the data is not the same: names, sizes or classes"),
        (flip("step-*/weights.safetensors"), "weights.safetensors is not what was written"),
        (flip("step-*/ema.safetensors"), "ema.safetensors is not what was written"),
        (flip("step-*/optimizer.pt"), "optimizer.pt is not what was written"),
        (remove("step-*/ema.safetensors"), "ema.safetensors is missing"),
        (remove("best.safetensors"), "holds the best weights, of epoch ., but it is not there any more"),
        (flip("best.safetensors"), "holds the best weights, of epoch ., but a bit of it has changed"),
        (write("run.json", "[]"), "run.json cannot be read"),
        (write("run.json", '{"recipe": 3}'), "holds another run"),
        (write("run.json", "[" * 10**5), "run.json cannot be read"),
    ],
)
def test_every_change_is_noticed(trained: Path, tmp_path: Path, change: Callable[[Path], None], sentence: str):
    for part in ("data", "run"):
        shutil.copytree(trained / part, tmp_path / part)
    told = json.loads((tmp_path / "run/run.json").read_text())
    told["data"] = open_data(str(tmp_path / "data")).name  # which has moved
    (tmp_path / "run/run.json").write_text(json.dumps(told))
    change(tmp_path)
    with pytest.raises(RunError, match=sentence):
        train(run_in(tmp_path))


def test_a_flipped_bit_of_weights_is_noticed_when_they_are_used(trained: Path, tmp_path: Path):
    shutil.copytree(trained / "run", tmp_path / "run")
    flip("best.safetensors")(tmp_path)
    with pytest.raises(ValueError, match="is not what was written: a bit of it has changed"):
        evaluate(tmp_path / "run", str(trained / "data"))

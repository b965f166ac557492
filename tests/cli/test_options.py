"""Options that several commands have are spelled alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
from PIL import Image
from typer.testing import CliRunner

from affinear import cli
from affinear.lens.report import batch_of_images


@pytest.mark.parametrize(
    "command", ["train", "distil", "compare", "eval", "predict", "export", "convert", "lens report", "bench models"]
)
def test_the_size_of_images_is_spelled_alike_everywhere(command: str):
    shown = CliRunner().invoke(cli.build_app(), [*command.split(), "--help"], terminal_width=200)
    assert "--image-size" in shown.output


@pytest.mark.parametrize(
    "words",
    [
        ("compare", "--data", "digits", "--output", "c", "--image-size", "big"),
        ("export", "mavit_tiny", "--image-size", "big"),
        ("bench", "models", "--image-size", "big"),
    ],
)
def test_a_size_that_is_none_gets_a_sentence(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.build_app(), list(words))
    assert done.exit_code == 1
    assert "expected a side such as 224" in done.output.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_the_lens_shows_images_at_the_size_that_is_asked_for(tmp_path: Path):
    Image.new("RGB", (50, 40)).save(tmp_path / "a.png")
    assert batch_of_images(tmp_path, timm.create_model("resnet10t"), 1, (64, 96)).pixels.shape == (1, 3, 64, 96)


def test_a_comparison_takes_a_small_network_of_its_task():
    from affinear import tasks
    from affinear.cli.compare import SMALLEST

    distils = {name for name in tasks.names() if name.startswith("distil")}  # which need a teacher, and so its name
    assert set(SMALLEST) == set(tasks.names()) - distils
    done = CliRunner().invoke(
        cli.build_app(), ["compare", "--task", "ranges", "--data", "listops:train=9,validation=3,test=6", "--dry-run"]
    )
    assert done.exit_code == 0, done.output
    assert "mala" in done.output

"""Segmentation: trainings are shared out by claims, judged, and told; what fails or has no time left leaves a word."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from .scenes import folder


@pytest.fixture
def segment(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with two arms that are small."""
    found = script("segment")
    arms = {"mavit_tiny": ("resnet18", {}), "resnet50": ("resnet18", {})}
    monkeypatch.setattr(found, "ARMS", arms)
    monkeypatch.setattr(found, "USUAL", tuple(arms))
    monkeypatch.setattr(found, "JUDGING", 0.0)
    monkeypatch.setattr(found, "LEAST", 0.0)
    return found


def call(segment: Any, monkeypatch: pytest.MonkeyPatch, root: Path, what: str, *more: str) -> int:
    monkeypatch.chdir(root)
    small = ("--set", "crop=32x32", "--set", "batch_size=2", "--set", "warmup_steps=1")
    monkeypatch.setattr("sys.argv", ["segment.py", what, "--data", "data", "--output", "out", *small, *more])
    return segment.main()


def test_every_training_is_done_and_told(segment: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder(tmp_path / "data", (64, 96), 4)
    assert call(segment, monkeypatch, tmp_path, "camvid", "--steps", "2", "--seeds", "0,1") == 0
    cells = json.loads((tmp_path / "out/camvid.json").read_text())["cells"]
    order = [(cell["arm"], cell["seed"]) for cell in cells]
    assert order == [("mavit_tiny", 0), ("resnet50", 0), ("mavit_tiny", 1), ("resnet50", 1)]
    assert all(cell["pace"]["steps"] == 2 and cell["photos"] == cell["learned"] == 4 for cell in cells)
    assert len(list((tmp_path / "out/camvid/maps").glob("*.png"))) == 4
    assert call(segment, monkeypatch, tmp_path, "page") == 0
    assert "| mavit_tiny | 2 | 2 |" in (tmp_path / "out/README.md").read_text()
    assert len(list((tmp_path / "out/maps").glob("*.png"))) == 4


def test_time_decides_how_many_steps_there_are(segment: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder(tmp_path / "data", (64, 96), 4)
    monkeypatch.setattr(segment, "BUILDING", 1)
    monkeypatch.setattr(segment, "TIMED", 1)
    monkeypatch.setattr(segment, "step_seconds_of", quick)
    monkeypatch.setattr(segment, "BESIDE", 0.0)
    monkeypatch.setattr(segment, "MOST", 3)
    told = ("--seeds", "0", "--fit", "4", "--minutes", "0.5", "--longer", "mavit_tiny")
    call(segment, monkeypatch, tmp_path, "camvid", *told)
    cells = json.loads((tmp_path / "out/camvid.json").read_text())["cells"]
    assert [(cell["arm"], cell["longer"]) for cell in cells] == [
        ("mavit_tiny", False),
        ("resnet50", False),
        ("mavit_tiny", True),
    ]
    assert {cell["planned"] for cell in cells} == {3}


def quick(learner: Any, building: int, timed: int) -> float:
    """A step that takes next to nothing."""
    assert learner.steps == building + timed == 2
    return 1e-3


def test_what_fails_is_not_tried_again(segment: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder(tmp_path / "data", (64, 96), 4)

    def fail(*_: Any) -> None:
        raise RuntimeError("the GPU is gone")

    with monkeypatch.context() as some:
        some.setattr(segment, "judge", fail)
        with pytest.raises(RuntimeError, match="the GPU is gone"):
            call(segment, monkeypatch, tmp_path, "camvid", "--steps", "1", "--seeds", "0")
    assert "the GPU is gone" in (tmp_path / "out/camvid/mavit_tiny-0.failed").read_text()
    assert call(segment, monkeypatch, tmp_path, "camvid", "--steps", "1", "--seeds", "0") == 1
    cells = json.loads((tmp_path / "out/camvid.json").read_text())["cells"]
    assert [cell["arm"] for cell in cells] == ["resnet50"]


def test_what_the_end_of_the_time_finds_is_no_result(
    segment: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder(tmp_path / "data", (64, 96), 4)
    segment.opened(str(tmp_path / "data"), "test")
    until = str(time.time() + 2)
    assert call(segment, monkeypatch, tmp_path, "camvid", "--steps", "10000", "--seeds", "0", "--until", until) == 1
    assert "of 10000 steps" in capsys.readouterr().out
    assert not (tmp_path / "out/camvid.json").is_file()


def test_a_variant_is_chosen_and_taken(segment: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = folder(tmp_path / "data", (64, 96), 4)
    for kind in ("images", "annotations"):
        (data / kind / "validation").symlink_to(data / kind / "test")
    variants = {"as it is": (1.0, ()), "quicker": (2.0, ("lr=2e-3",))}
    monkeypatch.setattr(segment, "VARIANTS", variants)
    assert call(segment, monkeypatch, tmp_path, "choose", "--steps", "2") == 0
    chosen = json.loads((tmp_path / "out/chosen.json").read_text())
    assert chosen["steps"] == {"as it is": 2, "quicker": 4}
    assert tuple(chosen["set"]) == variants[chosen["name"]][1]
    assert call(segment, monkeypatch, tmp_path, "camvid", "--steps", "1", "--seeds", "0", "--arms", "resnet50") == 0
    cell = json.loads((tmp_path / "out/camvid.json").read_text())["cells"][0]
    assert cell["changes"] == chosen["set"]

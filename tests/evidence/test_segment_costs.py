"""What segmentation costs: a row for each network and size, kept as it comes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

NAMES = ["linear", "softmax, weights kept", "softmax, fused"]


@pytest.fixture
def costs(script: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = script("segment_costs")
    monkeypatch.setattr(found, "GROWING", (64, 96))
    monkeypatch.setattr(found, "PATIENCE", 1e9)
    monkeypatch.setattr(found, "UPERNETS", {"resnet18": {}})
    return found


def call(costs: Any, monkeypatch: pytest.MonkeyPatch, output: Path, *told: str) -> int:
    monkeypatch.setattr("sys.argv", ["segment_costs.py", *told, "--output", str(output)])
    return costs.main()


def rows(output: Path, part: str) -> list[dict[str, Any]]:
    return json.loads((output / f"{part}.json").read_text())["rows"]


def test_images_grow_for_all_networks_together(costs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert call(costs, monkeypatch, tmp_path, "growth", "counted") == 0
    found = rows(tmp_path, "growth")
    assert [(row["side"], row["name"]) for row in found] == [(side, name) for side in (64, 96) for name in NAMES]
    assert all(row["seconds"] > 0 and row["tokens"] == (row["side"] // 4) ** 2 for row in found)
    kept = {(row["side"], row["name"]): row["kept_gb"] for row in rows(tmp_path, "counted")}
    assert kept[96, NAMES[1]] > kept[96, NAMES[2]]


def test_what_has_no_memory_is_told_and_left_out_of_larger_images(
    costs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    grown = costs.grown

    def limited(network: Any, side: int, device: torch.device) -> Any:
        if network.seen == 2:  # once to build kernels, once to be measured
            raise torch.OutOfMemoryError("CUDA out of memory")
        network.seen += 1
        return grown(network, side, device)

    monkeypatch.setattr(costs, "grown", limited)
    monkeypatch.setattr(torch.nn.Module, "seen", 0, raising=False)
    monkeypatch.setattr(costs, "GROWING", (64, 96, 128))
    assert call(costs, monkeypatch, tmp_path, "growth") == 0
    found = rows(tmp_path, "growth")
    assert [row.get("error") for row in found] == [None] * 3 + ["out of memory"] * 3


def test_rows_wait_for_a_file_and_end_with_the_time(
    costs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = tmp_path / "began"
    monkeypatch.setattr(costs.time, "sleep", lambda _: began.touch())
    assert call(costs, monkeypatch, tmp_path, "growth", "--begin", str(began), "--minutes", "0") == 1
    assert f"waiting for {began}" in capsys.readouterr().out
    assert len(rows(tmp_path, "growth")) == 1


def test_steps_are_timed_for_each_network(costs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = ("--size", "32x64", "--batch", "2", "--turns", "2", "--warm", "1", "--steps-timed", "2")
    assert call(costs, monkeypatch, tmp_path, "alone", "upernet", "--arms", "resnet50", *small) == 0
    for part, graph in (("alone", True), ("upernet", False)):
        (row,) = rows(tmp_path, part)
        assert len(row["turns"]) == 2
        assert row["images_per_second"] > 0
        assert row["graph"] is graph

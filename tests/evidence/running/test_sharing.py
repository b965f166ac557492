"""NVIDIA's MPS is begun and ended around what uses it, where it is installed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

CONTROL = """#!/bin/sh
echo "$@" >> {log}
[ "$1" = -d ] || cat >> {log}
"""


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.setenv(name, "before")


def test_it_is_begun_and_ended_even_after_an_error(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    control, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log"
    control.write_text(CONTROL.format(log=log))
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    seen: list[str] = []

    def use() -> None:
        with script("running.sharing").sharing(tmp_path / "mps"):
            seen.extend((os.environ["CUDA_MPS_PIPE_DIRECTORY"], log.read_text()))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        use()
    assert seen == [str(tmp_path / "mps"), "-d\n"]
    assert log.read_text() == "-d\n\nquit\n"


def test_without_it_nothing_changes(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    for folder in (None, tmp_path / "mps"):
        with script("running.sharing").sharing(folder):
            assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == "before"
    assert not (tmp_path / "mps").exists()

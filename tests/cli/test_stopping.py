"""Ctrl-C at any moment: an answer at once, what is saved is told, and never a traceback."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from affinear import tasks
from affinear.cli import build_app
from affinear.stopping import stop_at_once

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGINT)", "Stopped before anything was done."),
        ("sys.exit(130)", ""),  # a command that was interrupted and has told it
        ("raise KeyboardInterrupt", ""),  # Ctrl-C again, before such a command has ended
    ],
)
def test_ctrl_c_while_packages_are_imported_is_answered_in_a_sentence(what: str, said: str):
    code = f"""
import atexit, os, signal, sys
from affinear import cli
def build():
    def app():
        atexit.register(print, "tidied up")
        {what}
        raise AssertionError
    return app
cli.build_app = build
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr.strip() == said
    assert done.stdout.strip() == ("" if said else "tidied up")


def test_ctrl_c_while_a_command_ends_waits_for_nothing_and_loses_no_words():
    code = """
import atexit, os, signal, sys, time
from affinear import cli
def press_again():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
def build():
    def app():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit.register(press_again)
        print("Stopped; all is saved.")
        sys.exit(130)
    return app
cli.build_app = build
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (130, "")
    assert done.stdout.strip() == "Stopped; all is saved."


def test_ctrl_c_is_heard_before_the_command_line_is_imported():
    code = """
import os, signal, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "affinear.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Watch())
from affinear.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.strip() == "Stopped before anything was done."


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("eval run --data photos", "Stopped at once; it was not measured to the end."),
        ("predict --weights run a.png", "Stopped at once; what was answered before stays."),
        ("train mavit_tiny --data photos", "Stopped at once; the last checkpoint is as it was."),
    ],
)
def test_ctrl_c_tells_what_it_leaves(command: str, said: str, monkeypatch: pytest.MonkeyPatch):
    def stopped(*given: Any, **others: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, "load_trained", stopped)
    monkeypatch.setattr(tasks, "recipe_for", stopped)
    done = CliRunner().invoke(build_app(), command.split())
    assert (done.exit_code, done.output.strip()) == (130, said)


def test_an_evaluation_is_told_of_ctrl_c_and_not_ended_as_if_nothing_had_begun(monkeypatch: pytest.MonkeyPatch):
    heard: list[Any] = []

    def evaluate(*given: Any, **others: Any) -> None:
        heard.append(signal.getsignal(signal.SIGINT))
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, "load_trained", lambda *given, **others: MagicMock(task=tasks.find("classify")))  # pyright: ignore
    monkeypatch.setattr(type(tasks.find("classify")), "open_to_judge", lambda *given: (None, "nothing"))  # pyright: ignore
    monkeypatch.setattr(tasks, "evaluate", evaluate)
    before = signal.signal(signal.SIGINT, stop_at_once)
    try:
        done = CliRunner().invoke(build_app(), ["eval", "run", "--data", "photos"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.default_int_handler]
    assert done.exit_code == 130


@pytest.fixture
def photos(tmp_path: Path, seed: int) -> Path:
    draw = np.random.default_rng(seed)
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(12):
            pixels = draw.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.png")
    return tmp_path / "photos"


def after(pattern: str) -> Callable[[Path], bool]:
    return lambda folder: any(folder.glob(pattern))


@pytest.mark.exhaustive
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "moment",
    [None, after("comparison.json"), after("cells/*"), after("cells/*/run/run.json"), after("cells/*/run/step-*")],
    ids=["imports", "fork server", "cells", "runs", "steps"],
)
def test_ctrl_c_in_a_comparison_with_readers(
    moment: Callable[[Path], bool] | None, again: bool, photos: Path, tmp_path: Path, seed: int
):
    output = tmp_path / "compared"
    command = (
        f"compare --data {photos} --model affinear_trunk_cifar --mechanisms mala,softmax --seeds 1 --epochs 400 "
        f"--model-arg depth=1 --set batch_size=8 --set image_size=32 --set workers=2 --output {output}"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "affinear.cli", *command.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=ENVIRONMENT,
    )
    while moment is not None and not moment(output) and process.poll() is None:
        time.sleep(0.02)
    time.sleep(random.Random(seed).uniform(0.5, 1.5))
    for _ in range(1 + again):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        time.sleep(0.2)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "Warning" not in said
    saved = [path for path in output.glob("cells/*/run/step-*") if path.is_dir() and not path.suffix]
    if "Stopped after" in said:
        assert ("saved on the way" in said) == bool(saved)
        assert ("nothing is saved yet" in said) == (not saved)
    else:
        assert "Stopped" in said
        assert not saved or again
    until = time.monotonic() + 30
    while alive(process.pid) and time.monotonic() < until:  # readers whose trainer is gone look every five seconds
        time.sleep(0.1)
    assert not alive(process.pid)


def alive(group: int) -> list[str]:
    found = subprocess.run(["pgrep", "-g", str(group), "-r", "R,S,D"], capture_output=True, text=True)
    return found.stdout.split()

"""Two processes share every image: they train what one process trains, and go on where one stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from safetensors.torch import load_file
from typer.testing import CliRunner

from affinear.cli import build_app
from affinear.train import curves
from affinear.train.context import context_of
from affinear.train.stepping import Stepper

COMMAND = (
    "train inline_deit_tiny --data digits --recipe tiny --epochs 1 --batch-size 192 --image-size 8 --workers 0 "
    "--seed {seed} --model-arg depth=1 --model-arg embed_dim=16 --model-arg num_heads=2 --model-arg patch_size=2 "
    "--set drop_path=0.2 --set save_every=3 --output {output}"
)


def stopping(step: Callable[..., float]) -> Callable[..., float]:
    """A step that asks the run to stop after the third of them, as Ctrl-C does."""

    def stepped(self: Stepper, batches: Any, number: int) -> float:
        loss = step(self, batches, number)
        if number == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    return stepped


def affinear(command: list[str]) -> str:
    """What the command line says, in one of several processes."""
    PartialState._reset_state()
    done = CliRunner().invoke(build_app(), command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_two_processes_with_a_half_of_every_image_go_on_where_one_stopped(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, in_ranks: Callable[..., list[Any]]
):
    monkeypatch.setattr(curves, "draw", lambda output, *given: (output / curves.NAME).write_bytes(b""))  # takes seconds
    whole = COMMAND.format(seed=seed % 1000, output=tmp_path / "whole").split()
    done = CliRunner().invoke(build_app(), whole)
    assert done.exit_code == 0, done.output
    split = COMMAND.format(seed=seed % 1000, output=tmp_path / "split").split()
    with monkeypatch.context() as patched:
        patched.setattr(Stepper, "step", stopping(Stepper.step))
        begun = CliRunner().invoke(build_app(), split)
    assert begun.exit_code != 0, begun.output
    assert [path.name for path in (tmp_path / "split").glob("step-*")] == ["step-000000003"]
    in_ranks(2, lambda: affinear([*split, "--context-parallel", "2"]))
    one, two = (load_file(tmp_path / name / "last.safetensors") for name in ("whole", "split"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=2e-5)
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "split")]
    assert len(logs[0]) == len(logs[1])


def test_processes_that_make_no_whole_groups_are_told_how_to_start_more():
    three = SimpleNamespace(num_processes=3, process_index=0)
    with pytest.raises(ValueError, match=r"context_parallel: expected a divisor of the 3 processes, got 2; start them"):
        context_of(three, 2)  # pyright: ignore[reportArgumentType]

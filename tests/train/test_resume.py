"""A run that is killed, interrupted or out of room goes on as if nothing had happened, to the last bit."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from affinear.tasks.classify import recipe_for
from affinear.tasks.classify.data import ArraySource, Images
from affinear.train import Interrupted, Progress, Run, checkpoint, curves, manifest, signals, train
from affinear.train.records import read_log

MODEL = "mavit_tiny"  # has batch norms, whose statistics have to come back too
SMALL = {"embed_dims": (8, 8, 8, 8), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1), "projection": 8}
STEPS = 8


@pytest.fixture(autouse=True, scope="module")
def no_curves() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw", lambda output, *given: (output / curves.NAME).write_bytes(b""))
        yield


@pytest.fixture(scope="module")
def images() -> Images:
    draw = np.random.default_rng()

    def half(name: str, size: int) -> ArraySource:
        return ArraySource(name, draw.integers(0, 256, (size, 1, 32, 32), dtype=np.uint8), draw.integers(0, 3, size))

    return Images("noise", half("train", 36), half("test", 8), ("a", "b", "c"), (32, 32), 1)


@pytest.fixture(scope="module")
def whole(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing happened to."""
    run = run_of(tmp_path_factory.mktemp("run") / "whole")
    train(run, data=images)
    return run.output


def run_of(output: Path, **changes: Any) -> Run:
    """Two epochs of four steps in two parts, with everything that is random or remembered."""
    plain = {
        "epochs": 2, "batch_size": 8, "accumulate": 2, "workers": 0, "log_every": 1, "save_every": 2, "mixup": 0.5,
        "cutmix": 1.0, "drop_path": 0.3, "ema_decay": 0.9, "augment": "timm", "reprob": 0.5,
    }  # fmt: skip
    return Run(MODEL, "noise", output, recipe_for(MODEL, "tiny", **{**plain, **changes}), SMALL)


def same(one: Path, other: Path) -> None:
    """Last weights, averages, moments and log are the same to the last bit."""
    taken, given = checkpoint.latest(one), checkpoint.latest(other)
    assert taken is not None
    assert given is not None
    for name in (checkpoint.WEIGHTS, checkpoint.AVERAGE):
        first, second = load_file(taken / name), load_file(given / name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)
    best, again = load_file(one / "best.safetensors"), load_file(other / "best.safetensors")
    assert all(torch.equal(best[key], again[key]) for key in best)
    moments = checkpoint.load(given).rest["optimizer"]["state"]
    for key, state in checkpoint.load(taken).rest["optimizer"]["state"].items():
        for name, value in moments[key].items():
            assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value))
    steps = [line["step"] for line in read_log(other) if line["kind"] == "step"]
    assert steps == list(range(1, STEPS + 1))
    assert [timeless(line) for line in read_log(one)] == [timeless(line) for line in read_log(other)]


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("seconds", "per_second")}


def in_a_child(work: Callable[[], Any], then: Callable[[int], None] = lambda child: None) -> int:
    """Do work in a process of its own, and say how it ended, as a shell would not: negative for a signal."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # threads of the parent are not there
        code = 1
        try:
            work()
            code = 0
        except Interrupted as stop:
            code = stop.exit_code
        finally:
            os._exit(code)
    then(child)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Bomb(Progress):
    """Sends a signal to its own process after some step."""

    def __init__(self, step: int, number: int, times: int = 1) -> None:
        self.last, self.number, self.times = step, number, times

    def step(self, step: int, loss: float, amount: float) -> None:
        if step == self.last:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


def test_killed_at_any_steps_and_continued_it_ends_the_same(tmp_path: Path, whole: Path, images: Images, seed: int):
    torn = run_of(tmp_path / "torn")
    moments = sorted(random.Random(seed).sample(range(1, STEPS + 1), 2))
    for moment in moments:
        assert in_a_child(lambda: train(torn, data=images, progress=Bomb(moment, signal.SIGKILL))) == -signal.SIGKILL  # noqa: B023
    result = train(torn, data=images)
    assert len(result.records) == 2
    same(whole, torn.output)


@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.exhaustive)])
def test_killed_at_any_moment_and_continued_it_ends_the_same(
    tmp_path: Path, whole: Path, images: Images, seed: int, kills: int
):
    torn, chance = run_of(tmp_path / "torn", save_every=1), random.Random(seed)

    def kill(child: int) -> None:
        time.sleep(chance.uniform(0, 1.0))
        os.kill(child, signal.SIGKILL)

    for _ in range(kills):
        in_a_child(lambda: train(torn, data=images), kill)
    train(torn, data=images)
    same(whole, torn.output)


def test_dying_while_saving_loses_no_more_than_the_steps_since(
    tmp_path: Path, whole: Path, images: Images, monkeypatch: pytest.MonkeyPatch
):
    torn, count = run_of(tmp_path / "torn"), [0]
    replace = os.replace

    def die(source: Any, target: Any) -> None:
        if str(source).endswith(".part") and "step-" in str(source):
            count[0] += 1
            if count[0] == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        assert in_a_child(lambda: train(torn, data=images)) == -signal.SIGKILL
    assert list(torn.output.glob("step-*.part"))
    train(torn, data=images)
    same(whole, torn.output)
    assert not list(torn.output.glob("step-*.part"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_same_command_goes_on(
    tmp_path: Path, whole: Path, images: Images, number: signal.Signals, code: int, seed: int
):
    torn = run_of(tmp_path / "torn", save_every=0)
    moment = random.Random(seed).randrange(1, STEPS)
    before = [signal.getsignal(kind) for kind in signals.SIGNALS]
    with pytest.raises(
        Interrupted, match=rf"after step {moment} of {STEPS}, and saved to .* goes on from there"
    ) as stop:
        train(torn, data=images, progress=Bomb(moment, number))
    assert stop.value.exit_code == code
    assert [signal.getsignal(kind) for kind in signals.SIGNALS] == before
    with (torn.output / "log.jsonl").open("a") as log:  # a line of a step that will come again, and a torn one
        log.write(json.dumps({"kind": "step", "step": moment + 1, "loss": 9.9, "lr": 1.0}) + '\n{"kind": "st')
    train(torn, data=images)
    same(whole, torn.output)


def test_a_second_interrupt_stops_at_once_but_not_its_echo(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(Interrupted):
        train(run_of(tmp_path / "a"), data=images, progress=Bomb(3, signal.SIGINT, times=2))
    monkeypatch.setattr(signals, "ECHO_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt):
        train(run_of(tmp_path / "b"), data=images, progress=Bomb(3, signal.SIGINT, times=2))


class BombInTest(Progress):
    """Sends a signal to its own process when an evaluation begins, the so-manieth."""

    def __init__(self, evaluation: int) -> None:
        self.left = evaluation

    def testing(self) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("evaluation", [1, 2])  # in the middle of the run, and at its end
def test_a_signal_during_an_evaluation_saves_without_waiting_for_its_end(
    tmp_path: Path, whole: Path, images: Images, evaluation: int
):
    torn = run_of(tmp_path / "torn", save_every=0)
    steps = evaluation * STEPS // 2
    with pytest.raises(Interrupted, match=rf"after step {steps} of {STEPS}, and saved to"):
        train(torn, data=images, progress=BombInTest(evaluation))
    assert len(list(torn.output.glob("best*"))) == evaluation - 1  # the evaluation was left, not finished
    result = train(torn, data=images)
    assert [record.epoch for record in result.records] == [1, 2]
    same(whole, torn.output)


def test_a_signal_before_the_first_step_stops_at_once(tmp_path: Path, images: Images):
    class AtBegin(Progress):
        def begin(self, outline: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(run_of(tmp_path / "a"), data=images, progress=AtBegin())
    assert checkpoint.latest(tmp_path / "a") is None


def test_a_wish_survives_where_the_exception_is_lost():
    with signals.wishes() as wish:
        with pytest.raises(KeyboardInterrupt):
            wish.take(signal.SIGINT, None)
        assert wish.signal == signal.SIGINT


def test_before_the_first_step_a_process_that_is_told_to_end_ends(tmp_path: Path, images: Images):
    class AtBegin(Progress):
        def begin(self, outline: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    assert in_a_child(lambda: train(run_of(tmp_path / "a"), data=images, progress=AtBegin())) == -signal.SIGTERM


def test_readers_of_images_change_nothing(tmp_path: Path, whole: Path, images: Images):
    """Loading in other processes, and continuing in the middle of an epoch with them."""
    torn = run_of(tmp_path / "torn", workers=2)
    with pytest.raises(Interrupted):
        train(torn, data=images, progress=Bomb(6, signal.SIGTERM))
    train(torn, data=images)
    same(whole, torn.output)


def test_weights_of_another_network_in_a_checkpoint_are_refused(tmp_path: Path, images: Images):
    torn = run_of(tmp_path / "torn")
    with pytest.raises(Interrupted):
        train(torn, data=images, progress=Bomb(2, signal.SIGTERM))
    found = checkpoint.latest(torn.output)
    assert found is not None
    taken = checkpoint.load(found)
    (found / checkpoint.WEIGHTS).write_bytes(
        checkpoint.to_bytes({name: tensor for name, tensor in taken.weights.items() if "stem" not in name})
    )
    manifest.write(found)
    with pytest.raises(Exception, match="The checkpoint is of another network"):
        train(torn, data=images)


class Everyone(Bomb):
    """Sends SIGTERM to its own process after some step, and to the readers a signal of their own."""

    def __init__(self, step: int, to_readers: signal.Signals) -> None:
        super().__init__(step, signal.SIGTERM)
        self.to_readers = to_readers

    def step(self, step: int, loss: float, amount: float) -> None:
        if step == self.last:
            for reader in multiprocessing.active_children():
                os.kill(reader.pid or 0, self.to_readers)
            super().step(step, loss, amount)
            time.sleep(0.2)


def test_a_signal_to_the_whole_group_saves(tmp_path: Path, whole: Path, images: Images):
    """As torchrun sends it."""
    torn = run_of(tmp_path / "torn", workers=1, save_every=0)
    with pytest.raises(Interrupted, match=rf"after step 3 of {STEPS}, and saved to"):
        train(torn, data=images, progress=Everyone(3, signal.SIGTERM))
    train(torn, data=images)
    same(whole, torn.output)


def test_a_signal_that_ends_the_readers_too_loses_only_what_was_not_saved(tmp_path: Path, whole: Path, images: Images):
    torn = run_of(tmp_path / "torn", workers=1)
    with pytest.raises(Interrupted, match="goes on from there") as stop:
        train(torn, data=images, progress=Everyone(3, signal.SIGKILL))
    assert stop.value.exit_code == 143
    train(torn, data=images)
    same(whole, torn.output)

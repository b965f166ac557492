"""A checkpoint is whole or not there, whatever happens while it is written."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from affinear.train import checkpoint, manifest
from affinear.train.about import About, about
from affinear.train.checkpoint import Position, Snapshot
from affinear.train.faults import RunError, SaveError
from affinear.train.records import Record

RECORD = Record(1, 3, 2.0, 1e-3, 1.5, 100.0, {"loss": 2.1, "top1": 0.5})


class Died(BaseException):
    """The process ended here."""


def snapshot_of(step: int) -> Snapshot:
    tensors = {"a.weight": torch.full((3, 4), float(step)), "a.bias": torch.randn(3)}
    rest = {"optimizer": {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": []}, "scaler": None}
    return Snapshot(Position(step, (RECORD,), 0.5, 1, 3, 0.25, 2.5, (("train", 7),)), tensors, tensors, rest)


def test_what_is_saved_comes_back(tmp_path: Path):
    saved = snapshot_of(3)
    path = checkpoint.save(tmp_path, saved)
    assert path == checkpoint.latest(tmp_path)
    loaded = checkpoint.load(path)
    assert loaded.position == saved.position
    for name, tensor in saved.weights.items():
        assert torch.equal(loaded.weights[name], tensor)
        assert loaded.average is not None
        assert torch.equal(loaded.average[name], tensor)
    assert loaded.rest["optimizer"]["state"][0]["step"] == 3


def test_only_the_newest_is_kept(tmp_path: Path):
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, snapshot_of(step))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000010"]


def test_dying_at_any_moment_leaves_one_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every call that touches the disk is once the last one, until a save gets through."""
    checkpoint.save(tmp_path, snapshot_of(1))
    seen: set[int] = set()
    for last in range(100):
        if _save_until(last, tmp_path, monkeypatch):
            break
        found = checkpoint.latest(tmp_path)
        assert found is not None
        seen.add(checkpoint.load(found).position.step)
        shutil.rmtree(tmp_path / "step-000000002", ignore_errors=True)
        if checkpoint.latest(tmp_path) is None:
            checkpoint.save(tmp_path, snapshot_of(1))
    assert last > 8  # pyright: ignore[reportPossiblyUnboundVariable]
    assert seen == {1, 2}
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000002"]


def _save_until(last: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    left = [last]

    def mortal(function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Died
            return function(*given, **named)

        return call

    with monkeypatch.context() as patch:
        for owner, name in (
            (Path, "mkdir"),
            (Path, "write_bytes"),
            (Path, "write_text"),
            (torch, "save"),
            (os, "replace"),
            (os, "fsync"),
            (os, "unlink"),
            (os, "rmdir"),
        ):
            patch.setattr(owner, name, mortal(getattr(owner, name)))
        try:
            checkpoint.save(folder, snapshot_of(2))
        except Died:
            return False
    return True


def test_a_full_disk_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint.save(tmp_path, snapshot_of(1))

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SaveError, match=r"step 2 could not be saved: no space is left.*step 1 is intact"):
        checkpoint.save(tmp_path, snapshot_of(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def test_a_limit_of_the_system_leaves_the_one_before(tmp_path: Path):
    checkpoint.save(tmp_path, snapshot_of(1))
    big = Snapshot(Position(2), {"weight": torch.randn(100_000)}, None, {})
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(SaveError, match="step 1 is intact"):
            checkpoint.save(tmp_path, big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoint.load(tmp_path / "step-000000001").position.step == 1
    assert len(list(tmp_path.iterdir())) == 1


FILES = ("weights.safetensors", "ema.safetensors", "optimizer.pt", "state.json")


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_one_is_named(tmp_path: Path, name: str):
    path = checkpoint.save(tmp_path, snapshot_of(1))
    before = (path / name).read_bytes()
    (path / name).write_bytes(before[:20])
    with pytest.raises(RunError, match=rf"step-000000001 cannot be read: {name} has 20 bytes, not {len(before)}"):
        checkpoint.load(path)
    place = random.randrange(8 * len(before))
    flipped = bytearray(before)
    flipped[place // 8] ^= 1 << place % 8
    (path / name).write_bytes(flipped)
    with pytest.raises(RunError, match=rf"{name} is not what was written: a bit of it has changed. Put back"):
        checkpoint.load(path)
    (path / name).unlink()
    with pytest.raises(RunError, match=rf"{name} is missing"):
        checkpoint.load(path)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"files": {"a": 3}}', '{"files": 3}', "[" * 10**5])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: str):
    path = checkpoint.save(tmp_path, snapshot_of(1))
    (path / "manifest.json").write_text(content)
    with pytest.raises(RunError, match=r"manifest\.json is damaged"):
        checkpoint.load(path)


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"step": 1, "epochs": [3], "skipped": []}', '{"step": "x", "epochs": [], "skipped": []}']
)
def test_a_state_of_other_types_is_named(tmp_path: Path, content: str):
    path = checkpoint.save(tmp_path, snapshot_of(1))
    (path / "state.json").write_text(content)
    manifest.write(path)
    with pytest.raises(RunError, match="step-000000001 cannot be read"):
        checkpoint.load(path)


def test_the_one_before_stays_until_the_next_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    checkpoint.save(tmp_path, snapshot_of(1))
    monkeypatch.setattr(checkpoint, "_to_disk", lambda path: _flip(path) if path.name == "ema.safetensors" else None)
    with pytest.raises(SaveError, match=r"does not give back what it was given: ema.*step 1 is intact"):
        checkpoint.save(tmp_path, snapshot_of(2))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_where_another_is_left_the_way_to_it_is_told(tmp_path: Path):
    first = checkpoint.save(tmp_path, snapshot_of(1))
    shutil.copytree(first, tmp_path / "kept")
    second = checkpoint.save(tmp_path, snapshot_of(2))
    (tmp_path / "kept").rename(first)
    _flip(second / "optimizer.pt")
    with pytest.raises(RunError, match="Remove it to go on from step-000000001"):
        checkpoint.load(second)


def test_weights_know_their_own_bytes(tmp_path: Path):
    path = tmp_path / "best.safetensors"
    checkpoint.save_weights(path, {"a": torch.randn(5)}, {"model": "mavit_tiny"})
    checkpoint.check_weights(tmp_path, path.name, "the best weights")
    content = path.read_bytes()
    for place in (random.randrange(len(content) - 20, len(content)), content.index(b"mavit") + 1):
        changed = bytearray(content)
        changed[place] ^= 2
        path.write_bytes(changed)
        with pytest.raises(RunError, match="holds the best weights, but a bit of it has changed"):
            checkpoint.check_weights(tmp_path, path.name, "the best weights")
    path.unlink()
    with pytest.raises(RunError, match=r"it is not there any more\. Put back a copy"):
        checkpoint.check_weights(tmp_path, path.name, "the best weights")


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path):
    path = checkpoint.save(tmp_path, snapshot_of(1))

    class Trap:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "trapped"),))

    torch.save({"optimizer": Trap()}, path / "optimizer.pt")
    manifest.write(path)
    with pytest.raises(RunError, match="cannot be read: Weights only load failed"):
        checkpoint.load(path)
    assert not (tmp_path / "trapped").exists()


def test_weights_tell_what_they_belong_to(tmp_path: Path):
    path = tmp_path / "best.safetensors"
    told: dict[str, Any] = {"model": "mavit_tiny", "model_args": {"depth": 3}, "recipe": {"lr": 0.5}}
    own: dict[str, Any] = {"task": "classify", "settings": {"mixup": 0.5}, "facts": {"class_names": ["猫", "dog"]}}
    checkpoint.save_weights(path, {"a": torch.ones(2)}, {**told, **own, "data": "pets"})
    assert about(path) == About(**told, **own, others={"data": "pets"})
    assert os.listdir(tmp_path) == ["best.safetensors"]


def test_weights_that_cannot_be_saved_leave_those_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "best.safetensors"
    checkpoint.save_weights(path, {"a": torch.ones(2)}, {})
    before = path.read_bytes()

    def refuse(*given: Any) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(SaveError, match="no space is left"):
        checkpoint.save_weights(path, {"a": torch.zeros(2)}, {})
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["best.safetensors"]

"""A folder has one owner, who is named to all others, and whose death frees it."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from affinear.compare.experiment import prepare
from affinear.compare.experiment import run as compare
from affinear.tasks.classify import recipe_for
from affinear.train import Run, train
from affinear.train.faults import OtherRun, SaveError
from affinear.train.ownership import OWNER, owned

FORK = multiprocessing.get_context("fork")  # which imports nothing anew


def hold(folder: Path, told: Any) -> None:
    """Hold the folder until somebody ends this process."""
    with owned(folder):
        told.send("held")
        time.sleep(600)


def hold_with_a_child(folder: Path, told: Any) -> None:
    """The same, and have a child, whose number is told."""
    with owned(folder):
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        told.send("held")
        told.send(child)
        time.sleep(600)


@contextmanager
def holder(folder: Path, work: Callable[[Path, Any], None] = hold) -> Generator[tuple[Any, Any]]:
    """Another process that holds the folder until it is killed, and what it tells."""
    heard, told = FORK.Pipe(duplex=False)
    process = FORK.Process(target=work, args=(folder, told), daemon=True)
    process.start()
    assert heard.recv() == "held"
    try:
        yield process, heard
    finally:
        process.kill()
        process.join()


def test_another_process_is_named_and_its_death_frees_the_folder(tmp_path: Path):
    folder = tmp_path / "run"
    with holder(folder) as (process, _):
        named = f"in use by process {process.pid} on {socket.gethostname()}, since .*give --output another folder"
        for _ in range(2):
            with pytest.raises(OtherRun, match=named), owned(folder):
                pass
        process.kill()
        process.join()
        assert (folder / OWNER).is_file()
        with owned(folder):
            assert json.loads((folder / OWNER).read_text())["pid"] == os.getpid()
    assert not folder.exists() or not list(folder.iterdir())


def test_training_and_comparing_ask_for_the_folder(tmp_path: Path):
    with holder(tmp_path) as (process, _):
        run = Run("affinear_trunk_micro", "digits", tmp_path, recipe_for("affinear_trunk_micro", "tiny"))
        for work in (lambda: train(run), lambda: compare(prepare("digits", output=tmp_path, seeds=1, epochs=1))):
            with pytest.raises(OtherRun, match=f"in use by process {process.pid}"):
                work()
        assert [path.name for path in tmp_path.iterdir()] == [OWNER]


def test_children_of_a_killed_owner_do_not_hold_it(tmp_path: Path):
    with holder(tmp_path, hold_with_a_child) as (process, heard):
        child = heard.recv()
        process.kill()
        process.join()
        try:
            with owned(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_folder_that_was_made_for_nothing_is_removed(tmp_path: Path):
    with owned(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / OWNER).is_file()
    assert not (tmp_path / "a" / "b").exists()
    with owned(tmp_path / "c"):
        (tmp_path / "c" / "kept").touch()
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["kept"]


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    named = pytest.raises(SaveError, match=r"file/run cannot be written to: .*Give --output another")
    with named, owned(tmp_path / "file" / "run"):
        pass


def test_a_link_in_its_place_leads_nowhere(tmp_path: Path):
    (tmp_path / "precious").write_text("kept")
    for target in ("precious", "nothing/at/all"):
        (tmp_path / OWNER).symlink_to(tmp_path / target)
        with pytest.raises(SaveError, match="cannot be written to"), owned(tmp_path):
            pass
        (tmp_path / OWNER).unlink()
    assert (tmp_path / "precious").read_text() == "kept"


def test_on_a_disk_without_locks_a_living_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def lockless(*given: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockless)
    card = {"host": socket.gethostname(), "pid": os.getppid(), "since": "today"}
    (tmp_path / OWNER).write_text(json.dumps(card))
    with pytest.raises(OtherRun, match=f"process {os.getppid()} on"), owned(tmp_path):
        pass
    (tmp_path / OWNER).write_text(json.dumps({**card, "pid": 2**22 + 1}))  # more than there can be
    with owned(tmp_path):
        pass


def test_a_folder_that_goes_while_it_is_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place, made = tmp_path / "run", Path.mkdir
    place.mkdir()

    def mkdir(path: Path, *given: Any, **others: Any) -> None:
        if path == place and place.exists():
            place.rmdir()  # by its owner, between mkdir's finding it and looking what it is
            raise FileExistsError(errno.EEXIST, "File exists", str(path))
        made(path, *given, **others)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with owned(place):
        assert (place / OWNER).is_file()


@pytest.mark.parametrize("there", ["file", "link to nothing"])
def test_what_is_no_folder_is_not_waited_for(there: str, tmp_path: Path):
    place = tmp_path / "run"
    if there == "file":
        place.touch()
    else:
        place.symlink_to(tmp_path / "nothing")
    with pytest.raises(SaveError, match="cannot be written to: File exists"), owned(place):
        pass

"""Checkpoints: a folder that appears whole or not at all, and weights that say what they belong to."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes  # a file that safetensors writes itself is nobody else's to read
from torch import Tensor

from .. import __version__
from ..models.making import short
from ..models.sealing import broken, sealed
from . import manifest
from .before import upgraded_record
from .faults import RunError, SaveError
from .records import Record
from .settings import read_object

NAME = re.compile(r"step-(\d{9})")
PART = ".part"
BEST = "best.safetensors"
LAST = "last.safetensors"
WEIGHTS, AVERAGE, OPTIMIZER, STATE = "weights.safetensors", "ema.safetensors", "optimizer.pt", "state.json"


@dataclass(frozen=True)
class Position:
    """Where a run stands.

    Attributes:
        step: Optimizer steps done.
        records: What was measured in each finished stretch: an epoch, or the steps between two evaluations.
        best: The best value of the metric so far, of the weights in `best.safetensors`; None if there is none.
        best_epoch: The epoch it came from, counted from 1; 0 if there is none.
        best_step: Steps done by then.
        loss_sum: Sum of the losses of the stretch that is not finished.
        seconds: What that stretch took so far.
        skipped: Samples that could not be read: which half, and which number.
    """

    step: int = 0
    records: tuple[Record, ...] = ()
    best: float | None = None
    best_epoch: int = 0
    best_step: int = 0
    loss_sum: float = 0.0
    seconds: float = 0.0
    skipped: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """All that a run needs to go on as if nothing had happened.

    Attributes:
        position: Where it stands.
        weights: Of the network, buffers included.
        average: The averaged weights, or None.
        rest: State of the optimizer and of the gradient scaler.
    """

    position: Position
    weights: Mapping[str, Any]
    average: Mapping[str, Tensor] | None
    rest: dict[str, Any]


def save(folder: Path, snapshot: Snapshot) -> Path:
    """Write a checkpoint beside the ones that are there, and remove those once it is proven.

    It is written under a temporary name, read back, compared with its checksums and renamed, so that a power cut, a
    kill, a full or a failing disk at any moment leaves one that can be loaded.

    Returns:
        The checkpoint's folder.

    Raises:
        SaveError: If it could not be written; the one before is intact.
    """
    final = folder / f"step-{snapshot.position.step:09d}"
    if final.is_dir():
        return final
    part = final.with_name(final.name + PART)
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        _write(part, snapshot)
        wrong = manifest.fault(part, from_disk=True)
        if wrong:
            raise OSError(f"the disk does not give back what it was given: {wrong}")
        os.replace(part, final)
        _to_disk(folder)
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise SaveError(
            f"The checkpoint of step {snapshot.position.step} could not be saved: {why(error)}. {_left(folder)}"
        ) from None
    for other in (*_found(folder).values(), *folder.glob(f"step-*{PART}")):
        if other != final:
            shutil.rmtree(other, ignore_errors=True)
    return final


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None."""
    found = _found(folder)
    return found[max(found)] if found else None


def load(checkpoint: Path) -> Snapshot:
    """Read a checkpoint; no code in it is run.

    Raises:
        RunError: If a file is missing or damaged.
    """
    try:
        wrong = "" if _is_old(checkpoint) else manifest.fault(checkpoint)
        if wrong:
            raise ValueError(wrong)
        average = checkpoint / AVERAGE
        return Snapshot(
            _position((checkpoint / STATE).read_text(encoding="utf-8")),
            load_file(checkpoint / WEIGHTS),
            load_file(average) if average.is_file() else None,
            torch.load(checkpoint / OPTIMIZER, map_location="cpu", weights_only=True),
        )
    except Exception as error:  # files that anybody may have changed make their readers raise nearly anything
        raise RunError(f"The checkpoint {checkpoint} cannot be read: {why(error)}. {_way_out(checkpoint)}") from None


def save_weights(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write weights together with what they belong to, through a temporary name.

    Raises:
        SaveError: If they could not be written; what was there before is intact.
    """
    draft = path.with_name(path.name + PART)
    try:
        told = {"format": "pt", "affinear": __version__, "about": json.dumps(about)}
        draft.write_bytes(sealed(_plain(tensors), told))
        _to_disk(draft)
        os.replace(draft, path)
    except (OSError, SafetensorError, RuntimeError) as error:
        draft.unlink(missing_ok=True)
        raise SaveError(f"The weights could not be saved to {path}: {why(error)}.") from None


def check_weights(folder: Path, name: str, what: str) -> None:
    """Raise RunError if a file of weights that a run announces is not there any more, or not what was written."""
    path = folder / name
    try:
        wrong = "a bit of it has changed" if broken(path) else ""
    except FileNotFoundError:
        wrong = "it is not there any more"
    except (OSError, ValueError) as error:
        wrong = f"it cannot be read ({why(error)})"
    if wrong:
        raise RunError(f"{path} holds {what}, but {wrong}. Put back a copy of it, or begin anew with another --output.")


def why(error: BaseException) -> str:
    r"""The reason in a few words, also where torch or safetensors wrap what the system said.

    Examples:
        >>> why(OSError(errno.ENOSPC, "No space left on device"))
        'no space is left on the disk'
        >>> why(RuntimeError("bad things\nTraceback ..."))
        'bad things'
    """
    text = str(getattr(error, "strerror", None) or error).strip()
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if full or "no space left" in text.lower() or "PytorchStreamWriter" in text or "unexpected pos" in text:
        return "no space is left on the disk"
    return (text.splitlines() or [type(error).__name__])[0].rstrip(".")


def _write(part: Path, snapshot: Snapshot) -> None:
    (part / WEIGHTS).write_bytes(to_bytes(_plain(snapshot.weights)))
    if snapshot.average is not None:
        (part / AVERAGE).write_bytes(to_bytes(_plain(snapshot.average)))
    torch.save(snapshot.rest, part / OPTIMIZER)
    (part / STATE).write_text(json.dumps(asdict(snapshot.position), indent=2), encoding="utf-8")
    manifest.write(part)
    for path in (*part.iterdir(), part):
        _to_disk(path)


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # Clones, because safetensors refuses weights that share memory, and layouts are the network's own business.
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _to_disk(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # a folder cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _found(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    return {int(match[1]): path for path in folder.iterdir() if (match := NAME.fullmatch(path.name)) and path.is_dir()}


def _is_old(checkpoint: Path) -> bool:
    """Whether it is from before there were tasks, when checkpoints had no checksums either."""
    if (checkpoint / manifest.MANIFEST).exists() or not (checkpoint / STATE).is_file():
        return False
    state = (checkpoint / STATE).read_bytes()
    return b'"epochs"' in state and b'"records"' not in state


def _position(text: str) -> Position:
    told = read_object(text, STATE)
    if "epochs" in told:  # written before there were tasks
        told["records"] = told.pop("epochs")
        told["best"] = told["best"] if told["best_epoch"] else None
    records = tuple(Record(**upgraded_record(record)) for record in told.pop("records"))
    skipped = tuple((half, index) for half, index in told.pop("skipped"))
    found = Position(**told, records=records, skipped=skipped)
    reached = (number for record in records for number in (record.epoch, record.step))
    counts = (found.step, found.best_epoch, found.best_step, *reached)
    if any(type(count) is not int or count < 0 for count in counts):
        raise ValueError(f"{STATE}: expected whole numbers of steps and epochs, got {short(counts)}")
    best = 0.0 if found.best is None else found.best
    if any(type(number) not in (int, float) for number in (best, found.loss_sum, found.seconds)):
        raise ValueError(f"{STATE}: expected numbers as best, loss_sum and seconds")
    return found


def _way_out(checkpoint: Path) -> str:
    others = [path for _, path in sorted(_found(checkpoint.parent).items()) if path != checkpoint]
    if others:
        return f"Remove it to go on from {others[-1].name}, or put back a whole copy of it."
    return "Put back a whole copy of it, or begin anew with another --output."


def _left(folder: Path) -> str:
    before = latest(folder)
    if before is None:
        return "There is none from before."
    return (
        f"The one of step {int(before.name[5:])} is intact: make room and run the same command again to go on from it."
    )

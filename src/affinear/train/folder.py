"""The folder of a run: what is in it, whether a run may begin there, and whether it is the same one."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch

from affinear.bench import machine
from affinear.lens.files import place

from ..models.making import short
from . import longer
from .before import upgraded
from .checkpoint import BEST, LAST, latest, why
from .examples import NAME as EXAMPLES
from .faults import OtherRun, SaveError
from .ownership import OWNER
from .records import EVENTS, LOG
from .settings import read_object

RUN, CURVES, REPORT = "run.json", "curves.png", "report.html"
OWN = (RUN, LOG, BEST, LAST, CURVES, REPORT, EVENTS, EXAMPLES, "glimpses")
DRAFT = re.compile(r"\.(run\.json\.\d+\.part|[0-9a-f]{32})")  # what a run leaves that is killed as it begins
PACKAGES = ("timm", "accelerate", "safetensors", "numpy")


def weights_in(source: Path) -> Path:
    """The file of weights that a user names: a file, or the folder of a run, whose best weights are taken.

    Raises:
        ValueError: If there is none.
    """
    path = source / BEST if source.is_dir() else source
    if path.is_file():
        return path
    found = f"a run that has no {BEST} yet" if (source / RUN).is_file() else f"a folder without {BEST}"
    got = found if source.exists() else "nothing of that name"
    raise ValueError(f"{source}: expected the folder of a run or a file of weights, got {got}")


def enter(folder: Path, about: Mapping[str, Any], free: Collection[str], *, resume: bool, force: bool) -> Path | None:
    """Make sure that a run may take place in a folder, before anything is computed or written.

    Args:
        folder: Made if it is not there.
        about: What the run is: task, network, data, recipe, settings.
        free: Fields of recipe and settings that need not be the same.
        resume: Whether a run that is there is continued.
        force: Without `resume`, whether a run that is there is removed.

    Returns:
        The checkpoint to go on from, or None to begin.

    Raises:
        OtherRun: If the folder holds another run, or other files.
        SaveError: If it cannot be written to.
    """
    if (folder / RUN).is_file():
        if resume:
            _compare(folder, about, free)
            _check_writable(folder)
            return latest(folder)
        if not force:
            raise OtherRun(
                f"{folder} holds a run already. Leave --no-resume out to continue it, add --force to remove it, or "
                "give --output another folder."
            )
        _clear(folder)
    elif folder.is_dir() and any(not _is_draft(path.name) for path in folder.iterdir()):
        raise OtherRun(f"{folder} holds other files and no run. Give --output a new or an empty folder.")
    _check_writable(folder)
    return None


def describe(folder: Path, about: Mapping[str, Any], device: torch.device, processes: int) -> None:
    """Write `run.json`: what the run is, on which machine, with which versions, by which command."""
    told = machine.describe(device)
    told |= {"processes": processes, "packages": {package: version(package) for package in PACKAGES}}
    try:
        place(json.dumps({**about, "machine": told}, indent=2).encode(), folder / RUN, force=True)
    except OSError as error:
        raise SaveError(f"{folder / RUN} could not be written: {why(error)}.") from None


def read(folder: Path) -> dict[str, Any]:
    """What `run.json` tells.

    Raises:
        OtherRun: If it is damaged.
    """
    try:
        return read_object((folder / RUN).read_text(encoding="utf-8"), RUN)
    except (OSError, ValueError) as error:
        raise OtherRun(f"{folder / RUN} cannot be read ({why(error)}). Give --output another folder.") from None


def differences(before: Mapping[str, Any], now: Mapping[str, Any], free: Collection[str] = ()) -> list[str]:
    """What is not the same in two runs, in words.

    Args:
        before: As it was written.
        now: As it would be written.
        free: Fields of recipe and settings that need not be the same.

    Examples:
        >>> one = {"model": "a", "recipe": {"lr": 1, "workers": 2}}
        >>> differences(one, {"model": "b", "recipe": {"lr": 1, "workers": 0}}, ["workers"])
        ["model is 'a' there and 'b' now"]
    """
    now = json.loads(json.dumps(now))  # as it would come out of the file
    told: list[str] = []
    for name, value in now.items():
        if name in ("recipe", "settings", "facts"):
            kept = before.get(name)
            old = cast("dict[str, Any]", kept) if isinstance(kept, dict) else {}
            prefix = "" if name == "facts" else f"{name}."
            told += [_told(f"{prefix}{one}", old.get(one), value[one]) for one in value if one not in free]
        elif name != "fingerprint":
            told.append(_told(name, before.get(name), value))
    found = [sentence for sentence in told if sentence]
    # Where nothing else is other; the very first runs did not have one.
    if not found and "fingerprint" in before and before["fingerprint"] != now.get("fingerprint"):
        return ["the data is not the same: names, sizes or classes of its samples have changed"]
    return found


def _compare(folder: Path, about: Mapping[str, Any], free: Collection[str]) -> None:
    before = upgraded(read(folder))
    found = differences(before, about, free)
    if found and (advice := longer.advice(folder, _object(before, "recipe"), about["recipe"], found)):
        raise OtherRun(advice)
    if found:
        more = f"; and {len(found) - 6} more" if len(found) > 6 else ""
        raise OtherRun(
            f"{folder} holds another run: {'; '.join(found[:6])}{more}. Give --output another folder, or use the same "
            "settings to continue it."
        )


def _object(told: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = told.get(name)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def recipe_of(folder: Path) -> dict[str, Any]:
    """Fields of the recipe of the run in a folder, as `run.json` has them; none if there is no run."""
    return _object(upgraded(read(folder)), "recipe") if (folder / RUN).is_file() else {}


def _told(name: str, before: Any, now: Any) -> str:
    if before == now:
        return ""
    if isinstance(before, list) and isinstance(now, list):
        return f"{name}: {_lists(before, now)}"
    return f"{name} is {short(before)} there and {short(now)} now"


def _lists(before: list[Any], now: list[Any]) -> str:
    if len(before) != len(now):
        return f"{len(before)} there and {len(now)} now"
    number = next(i for i, (one, other) in enumerate(zip(before, now, strict=True)) if one != other)
    return f"number {number} is {short(before[number])} there and {short(now[number])} now"


def _is_draft(name: str) -> bool:
    return name == OWNER or DRAFT.fullmatch(name) is not None


def _check_writable(folder: Path) -> None:
    trial = folder / f".{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as error:
        raise SaveError(f"{folder} cannot be written to: {why(error)}. Give --output another folder.") from None


def _clear(folder: Path) -> None:
    """Remove what a run left, and nothing else."""
    for path in (*(folder / name for name in OWN), *folder.glob("step-*"), *folder.glob("nonfinite-*.safetensors")):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

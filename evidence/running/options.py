"""Options that experiments in cells have in common, and what they say."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from running.cells import How
from running.ending import orderly


def add_options(
    parser: argparse.ArgumentParser, *, parallel: int, workers: int, minutes: float, seeds: str = "0,1,2"
) -> None:
    """Have a parser take which seeds there are, how cells are worked off, and what is changed in all of them.

    Args:
        parser: Of the script.
        parallel: Cells at a time, unless told otherwise; so are the others.
        workers: Processes that read.
        minutes: How long.
        seeds: With commas.
    """
    parser.add_argument("--seeds", default=seeds, help="which, with commas")
    parser.add_argument("--parallel", default=parallel, type=int, help="cells at a time, each a process")
    parser.add_argument("--workers", default=workers, type=int, help="processes of each cell that read its data")
    parser.add_argument("--minutes", default=minutes, type=float, help="stop after so many; the same command goes on")
    parser.add_argument("--mps", action="store_true", help="let processes share the GPU through NVIDIA's MPS")
    parser.add_argument("--set", action="append", help="a field of recipe or settings: field=value; may be given again")


def listed(text: str) -> list[str]:
    """Words with commas between them.

    Examples:
        >>> listed("mala, around none")
        ['mala', 'around none']
    """
    return [word.strip() for word in text.split(",")]


def numbers(text: str) -> list[int]:
    """The same of numbers.

    Examples:
        >>> numbers("0,1, 2")
        [0, 1, 2]
    """
    return [int(number) for number in text.split(",")]


def arms_of(text: str | None, usual: Sequence[str], known: Iterable[str]) -> list[str]:
    """The arms that are asked for; the usual ones if none are.

    Raises:
        ValueError: If one of them is not known.

    Examples:
        >>> arms_of("none,mala", ["mala"], ["mala", "none"]), arms_of(None, ["mala"], ["mala", "none"])
        (['none', 'mala'], ['mala'])
    """
    arms, names = listed(text) if text else list(usual), list(known)
    unknown = [arm for arm in arms if arm not in names]
    if unknown:
        raise ValueError(f"--arms: expected some of {', '.join(names)}, got {unknown[0]!r}")
    return arms


def how_of(given: argparse.Namespace, folder: Path, *, stop: bool = True, fresh: bool = False, threads: int = 1) -> How:
    """How cells are worked off by what is given; the folder is for what is shared, the rest is as `How` has it."""
    mps = folder / "mps" if given.mps else None
    return How(given.parallel, given.minutes, stop=stop, fresh=fresh, threads=threads, mps=mps)


def again(given: argparse.Namespace, *names: str) -> list[str]:
    """Options that may be given again, as a cell is told them.

    Examples:
        >>> again(argparse.Namespace(set=["lr=1", "steps=2"], model_arg=None), "set", "model_arg")
        ['--set', 'lr=1', '--set', 'steps=2']
    """
    return [word for name in names for value in getattr(given, name) or [] for word in (_option(name), value)]


def without_traceback(main: Callable[[], int]) -> int:
    """What a script's main returns; a ValueError, which is of what was asked for, ends it with a sentence.

    SIGTERM ends it when what the GPU was given is done.
    """
    try:
        with orderly():
            return main()
    except ValueError as error:
        raise SystemExit(f"{error}.") from None


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"

"""What subcommands share: saying no in one sentence, keeping files, and the packages they need."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..stopping import INTERRUPTED, stop_at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from affinear.lens.files import Placed
    from affinear.train import Task

FORMATS = (".png", ".svg", ".pdf")
TRAINING = ("timm", "accelerate", "safetensors", "torchvision", "PIL", "numpy")


@contextmanager
def told_in_a_sentence(left: str = "the last checkpoint is as it was") -> Generator[None]:
    """End with a sentence, and the exit code that fits, where training or evaluation cannot go on.

    Args:
        left: How things stand after Ctrl-C, as the end of that sentence.
    """
    import torch

    from affinear.train import Interrupted, NonFinite

    try:
        yield
    except Interrupted as asked:
        if is_first():
            print(asked, file=sys.stderr)
        sys.exit(asked.exit_code)
    except KeyboardInterrupt:
        print(f"Stopped at once; {left}.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except torch.OutOfMemoryError:
        stop(
            "The GPU's memory is full. --set accumulate=2 works a batch off in two parts; a smaller --batch-size helps "
            "too."
        )
    except NonFinite as fault:
        stop(str(fault))  # by whichever process met it
    except (ValueError, RuntimeError, OSError) as error:
        if not is_first():
            sys.exit(1)
        stop(sentence(error))


def listen() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, as there is something to finish or to tell."""
    if signal.getsignal(signal.SIGINT) is stop_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def changes_of(task: Task[Any, Any], given: list[str] | None, **options: str | None) -> dict[str, Any]:
    """Fields of recipe and settings that the command line sets; options that belong to some tasks are `--set` too.

    Raises:
        ValueError: If the task has no such field.
    """
    from affinear.train import Recipe, spelling

    spelled = [f"{name}={value}" for name, value in options.items() if value is not None]
    for name, value in options.items():
        if value is not None and name not in task.settings.names():
            raise ValueError(f"--{name.replace('_', '-')}: --task {task.name} has no such option")
    return spelling.parse([*(given or []), *spelled], Recipe, task.settings)


def is_first() -> bool:
    """Whether this process is the one that speaks."""
    # Of the processes that torchrun or accelerate started; all of them compute, one of them speaks.
    return os.environ.get("RANK", "0") == "0"


def require(extra: str, *packages: str) -> None:
    """Stop, with the extra that brings them, where packages are missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        stop(f"This command needs {' and '.join(missing)}: pip install 'affinear[{extra}]'")


def keeper(wanted: Path, what: str, force: bool) -> Callable[[bytes], Placed]:
    """A function that saves the latest version of a file: once a name is taken, over what it saved there before."""
    from affinear.lens.files import place

    listen()
    taken: list[Path] = []

    def keep(content: bytes) -> Placed:
        try:
            placed = place(content, taken[0] if taken else wanted, force=force or bool(taken))
        except OSError as error:
            stop(f"The {what} could not be saved to {wanted}: {error.strerror or error}.")
        taken.append(placed.path)
        return placed

    return keep


def check_output(
    output: Path, what: str = "The figure", formats: tuple[str, ...] = FORMATS, option: str = "--output"
) -> None:
    """Stop where a file of this name cannot be saved."""
    # Before the work, not after it.
    if output.suffix.lower() not in formats:
        named = " or ".join(filter(None, (", ".join(formats[:-1]), formats[-1])))
        stop(f"{what} can be saved as {named}, not as {output.name!r}; give {option} such a name.")
    if output.is_dir():
        stop(f"{output} is a folder; give {option} the name of a file in it.")
    if not output.parent.is_dir():
        stop(f"The folder {output.parent} does not exist; make it first or give {option} another place.")


def told(path: Path, written: bool, wanted: Path, what: str = "figure") -> str:
    """Where a file is, in a sentence."""
    if not written:
        return f"The same {what} is already in {path}."
    if path == wanted:
        return f"{what.capitalize()}: {path}"
    return f"{wanted} was there and differs, so the {what} is in {path}."


def parse_sides(text: str | None) -> tuple[int, int] | None:
    """Height and width that `--image-size` asks for, 224 or 192x256; None where it is not given.

    Raises:
        ValueError: If it is neither.
    """
    from affinear.train.settings import parse_size

    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise ValueError(f"--image-size: {error}") from None


def sentence(error: Exception) -> str:
    """What an error says, with a full stop where it ends without a sign."""
    said = str(error).rstrip(". \n")
    return said if said.endswith("?") else f"{said}."


def stop(told: str) -> NoReturn:
    """Say why in a sentence, and end."""
    print(told, file=sys.stderr)
    sys.exit(1)

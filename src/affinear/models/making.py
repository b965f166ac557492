"""The one place where a network is made from a name and arguments that a file or a command line gave."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from typing import Any, cast

import timm
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

NAME = re.compile(r"\w+(\.\w+)?")  # no path, no address, no source such as hf-hub:
WORD = re.compile(r"[\w.+-]{0,64}")
# Second wall: an argument that sounds like one of these is refused, whoever's constructor has it.
SUSPICIOUS = re.compile(r"pretrain|checkpoint|cache|(?<!drop_)path|url|file|dir\b|hub|load|device|dtype|script|jit")
LARGEST = 2**20  # of whole numbers and, in size, of all others
LONGEST, DEEPEST = 64, 3  # of lists
MOST_CALLS = 300_000  # of torch in one making, thirty times those of timm's deepest network
MOST_NUMBERS = 2**35  # 128 GiB in float32


class _Count(TorchFunctionMode):
    """Counts what is called of torch, and stops a making that never seems to end."""

    def __init__(self) -> None:
        super().__init__()
        self._left = MOST_CALLS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {MOST_CALLS} steps to make it")
        return func(*args, **(kwargs or {}))


def patience() -> AbstractContextManager[object]:
    """A region in which no more than `MOST_CALLS` of torch are made."""
    return _Count()


def make(model: str, given: Mapping[str, Any], *, room: int = MOST_NUMBERS) -> nn.Module:
    """A network with fresh weights, made with plain arguments that its own constructor takes.

    Nothing is fetched, nothing is loaded, and no file is read or written, whatever the arguments are. The network is
    made without memory first, so that arguments which ask for too much are refused before any is taken.

    Args:
        model: A name that timm knows; ours are registered by `import affinear.models`.
        given: Truths, numbers, names and lists of these.
        room: How many numbers its weights and tables may have together.

    Raises:
        ValueError: If there is no such network, it does not take an argument, or it cannot be made with what it got.

    Example:
        >>> from affinear.models.making import make
        >>> make("inline_deit_tiny", {"depth": 1, "num_classes": 7}).num_classes
        7
        >>> make("inline_deit_tiny", {"checkpoint_path": "weights.pth"})
        Traceback (most recent call last):
        ValueError: model_args: inline_deit_tiny takes no 'checkpoint_path'...
    """
    shape = outline(model, given)
    numbers = sum(tensor.numel() for tensor in (*shape.parameters(), *shape.buffers()))
    if numbers > room:
        raise ValueError(
            f"model_args: {model}{_with(given)} would have {numbers:,} numbers, and there is room for {room:,}"
        )
    return _made(model, given)


def outline(model: str, given: Mapping[str, Any]) -> nn.Module:
    """The network that `make` would make, on the meta device: names, shapes and no memory.

    Raises:
        ValueError: As `make` does.
    """
    check(model, given)
    return _made(model, given, on="meta")


def check(model: str, given: Mapping[str, Any]) -> None:
    """Raise ValueError if there is no such network, or for the first argument that it may not be made with."""
    check_given(model, takes(model), given)


def check_given(model: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ValueError for the first argument that a network may not be made with.

    Args:
        model: Its name, for the message.
        known: What it takes, with its defaults.
        given: What it is to be made with.
    """
    for name, value in given.items():
        if name not in known:
            near = get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it takes {', '.join(known)}"
            raise ValueError(f"model_args: {model} takes no {name!r}; {hint}")
        check_plain(value, f"model_args: {name}")
        _check_kind(name, value, known[name])


def takes(model: str) -> dict[str, Any]:
    """What the constructor of a network takes, with its defaults, as far as it is anybody's to choose.

    Example:
        >>> from affinear.models.making import takes
        >>> "depth" in takes("inline_deit_tiny"), "pretrained" in takes("inline_deit_tiny")
        (True, False)
    """
    check_name(model)
    found: dict[str, Any] = {}
    for part in type(_made(model, {}, on="meta")).__mro__:
        constructor = cast("Callable[..., None] | None", vars(part).get("__init__"))
        if constructor is None:
            continue
        parameters = inspect.signature(constructor).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        found = {p.name: p.default for p in named if not SUSPICIOUS.search(p.name)} | found
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break  # the rest is not for the caller to set
    return found


def check_name(model: str) -> None:
    """Raise ValueError if timm knows no network of this name, with the names that come near."""
    if not NAME.fullmatch(model) or not timm.is_model(model):
        near = get_close_matches(model[:100], timm.list_models(), n=3) or ["mavit_tiny"]
        raise ValueError(f"model: expected a network such as {' or '.join(near)}, got {short(model)}")


def check_plain(value: Any, what: str, depth: int = 0) -> None:
    """Raise ValueError unless a value is none, a truth, a number, a name, or a list of these, all within bounds."""
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        if value != value or abs(value) > LARGEST:
            raise ValueError(f"{what}: expected a number of at most {LARGEST}, got {short(value)}")
    elif isinstance(value, str):
        if not WORD.fullmatch(value):
            raise ValueError(f"{what}: expected a name of letters, digits and . + - _, got {short(value)}")
    elif isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        if depth == DEEPEST or len(items) > LONGEST:
            raise ValueError(f"{what}: expected a list of at most {LONGEST}, {DEEPEST} deep, got {short(value)}")
        for item in items:
            check_plain(item, what, depth + 1)
    else:
        raise ValueError(f"{what}: expected a number, a name or a list of these, got {type(value).__name__}")


def short(value: Any) -> str:
    """A value as a sentence can show it."""
    if isinstance(value, int) and abs(value) > 10**30:
        return "a number of more than thirty digits"  # which Python would not even print, if it has thousands
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _check_kind(name: str, value: Any, default: Any) -> None:
    """A truth where one is expected, a name where one is, numbers where one is; what has no default can be any."""
    kinds: tuple[tuple[type, tuple[type, ...], str], ...] = (
        (bool, (bool,), "true or false"),
        (int, (int, float, list, tuple), "a number"),
        (float, (int, float, list, tuple), "a number"),
        (str, (str,), "a name"),
    )
    for kind, fitting, expected in kinds:
        if isinstance(default, kind):
            wrong = not isinstance(value, fitting) or (isinstance(value, bool) and kind is not bool)
            if wrong and value is not None:
                raise ValueError(f"model_args: {name}: expected {expected}, got {short(value)}")
            if isinstance(default, (int, float)) and default >= 0 and _least(value) < 0:
                raise ValueError(f"model_args: {name}: expected a number of at least 0, got {short(value)}")
            return


def _least(value: Any) -> float:
    if isinstance(value, (list, tuple)):
        return min((_least(item) for item in cast("Sequence[Any]", value)), default=0.0)
    return value if isinstance(value, (int, float)) else 0.0


def _made(model: str, given: Mapping[str, Any], on: str | None = None) -> nn.Module:
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        if on is None:
            return timm.create_model(model, pretrained=False, **given)
        # What is drawn on the way shall not be felt outside.
        with torch.random.fork_rng(devices=[]), torch.device(on), _Count():
            return timm.create_model(model, pretrained=False, **given)
    except Exception as error:  # constructors, timm's most of all, raise whatever comes up
        said = (str(error).strip().splitlines() or [""])[0].rpartition("__init__() ")[2][:200]
        raise ValueError(f"model_args: {model} cannot be made{_with(given)} ({said or type(error).__name__})") from None


def _with(given: Mapping[str, Any]) -> str:
    named = [f"{name}={short(value)}" for name, value in given.items()]
    return f" with {', '.join(named)}" if named else ""

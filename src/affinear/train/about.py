"""What a file of weights says about itself: read in one place, every field of it checked, nothing of it run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from ..models import making
from ..models.recognising import complaint
from .before import upgraded
from .settings import read_object

FIELD = re.compile(r"[a-z]\w{0,63}")


@dataclass(frozen=True)
class About:
    """What trained weights belong to.

    Attributes:
        task: Name of what they were trained for.
        model: Name of the network, of letters, digits and signs that no path or address could do with.
        model_args: What it is made with: truths, numbers, names and lists, within the bounds of `making.check_plain`.
        recipe: What it was trained with, by field; the recipe itself checks each.
        settings: The same for the task's own settings.
        facts: What the data told, such as names of classes; the task checks them.
        others: All else that the file says: values of JSON, to print and to compare, and for nothing else.
    """

    task: str
    model: str
    model_args: Mapping[str, Any]
    recipe: Mapping[str, Any]
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    others: Mapping[str, Any]


def about(path: Path) -> About | None:
    """What a file of safetensors says about itself, or None if it says nothing, as bare weights do.

    Raises:
        ValueError: If it is no file of safetensors, or a field is missing or holds what it may not.
    """
    text = _metadata(path).get("about")
    return None if text is None else parse(text, str(path))


def named(path: Path, asked: str | None) -> str | None:
    """Name of the network of bare weights: what `affinear convert` wrote beside them, or else what the user says.

    Raises:
        ValueError: If the two contradict each other.
    """
    known = _metadata(path).get("model") if path.suffix == ".safetensors" else None
    if known is not None and asked is not None and known != asked:
        raise ValueError(f"{path}: these weights are of {making.short(known)[1:-1]}, not of {asked}")
    return known or asked


def check_asked(told: About, path: Path, model: str | None, model_args: Mapping[str, Any]) -> None:
    """Raise ValueError if a user asks for another network than the one that weights were trained in."""
    if model is not None and model != told.model:
        raise ValueError(f"{path}: these weights are of {told.model}, not of {model}")
    for name, value in model_args.items():
        known = told.model_args.get(name)
        if name not in told.model_args or _plain(known) != _plain(value):
            trained = f"{name}={making.short(known)}" if name in told.model_args else f"no {name} set"
            raise ValueError(
                f"{path}: these weights were trained with {trained}, not with {name}={making.short(value)}; leave "
                f"{name} out"
            )


def _plain(value: Any) -> Any:
    return list(cast("Sequence[Any]", value)) if isinstance(value, (list, tuple)) else value


def _metadata(path: Path) -> Mapping[str, str]:
    if path.is_file() and (said := complaint(path)):
        raise ValueError(f"{path}: {said}")
    try:
        with safe_open(path, "pt") as file:  # pyright: ignore[reportGeneralTypeIssues]
            return cast("Mapping[str, str]", file.metadata() or {})
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: expected a file of safetensors, got what cannot be read as such ({error})") from None


def parse(text: str, source: str) -> About:
    """What JSON that describes weights says. What was written before there were tasks is read as well.

    Args:
        text: JSON, from a file or from anywhere.
        source: What it came from, for errors.

    Raises:
        ValueError: If a field is missing or holds what it may not.

    Example:
        >>> from affinear.train.about import parse
        >>> fields = '"task": "classify", "model": "mavit_tiny", "model_args": {}, "recipe": {}, "settings": {}'
        >>> parse("{" + fields + ', "facts": {"class_names": ["cat", "dog"]}}', "best.safetensors").facts
        {'class_names': ['cat', 'dog']}
        >>> parse('{"task": "classify", "model": 3}', "best.safetensors")
        Traceback (most recent call last):
        ValueError: best.safetensors: model: expected the name of a network, got 3
    """
    told = upgraded(read_object(text, source))
    task, model = told.pop("task", None), told.pop("model", None)
    if not isinstance(task, str) or not FIELD.fullmatch(task):
        raise ValueError(f"{source}: task: expected the name of a task, got {making.short(task)}")
    if not isinstance(model, str) or not making.NAME.fullmatch(model):
        raise ValueError(f"{source}: model: expected the name of a network, got {making.short(model)}")
    found = {name: _fields(told, name, source) for name in ("model_args", "recipe", "settings", "facts")}
    for name, value in found["model_args"].items():
        making.check_plain(value, f"{source}: model_args: {name}")
    return About(task, model, **found, others=told)


def _fields(told: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    found = told.pop(name, None)
    if not isinstance(found, dict) or not all(FIELD.fullmatch(key) for key in cast("dict[str, Any]", found)):
        raise ValueError(f"{source}: {name}: expected an object of named fields, got {making.short(found)}")
    return cast("dict[str, Any]", found)

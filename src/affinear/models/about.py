"""What a file of weights says about itself: read in one place, every field of it checked, nothing of it run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from . import making

LONGEST = 2**24  # characters
MOST_CLASSES = 2**20
MOST_CHANNELS = 2**10
FIELD = re.compile(r"[a-z]\w{0,63}")


@dataclass(frozen=True)
class About:
    """What trained weights belong to.

    Attributes:
        model: Name of the network, of letters, digits and signs that no path or address could do with.
        model_args: What it is made with: truths, numbers, names and lists, within the bounds of `making.check_plain`.
        class_names: What its outputs mean.
        channels: Of its images.
        recipe: What it was trained with, by field; the recipe itself checks each.
        others: All else that the file says: values of JSON, to print and to compare, and for nothing else.
    """

    model: str
    model_args: Mapping[str, Any]
    class_names: tuple[str, ...]
    channels: int
    recipe: Mapping[str, Any]
    others: Mapping[str, Any]


def about(path: Path) -> About | None:
    """What a file of safetensors says about itself, or None if it says nothing, as bare weights do.

    Raises:
        ValueError: If it is no file of safetensors, or a field is missing or holds what it may not.
    """
    try:
        with safe_open(path, "pt") as file:  # pyright: ignore[reportGeneralTypeIssues]
            metadata = cast("Mapping[str, str]", file.metadata() or {})
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path}: expected a file of safetensors, got what cannot be read as such ({error})") from None
    text = metadata.get("about")
    return None if text is None else parse(text, str(path))


def parse(text: str, source: str) -> About:
    """What JSON that describes weights says.

    Args:
        text: JSON, from a file or from anywhere.
        source: What it came from, for errors.

    Raises:
        ValueError: If a field is missing or holds what it may not.

    Example:
        >>> from affinear.models.about import parse
        >>> fields = '"model": "mavit_tiny", "model_args": {}, "class_names": ["cat", "dog"], "channels": 3'
        >>> parse("{" + fields + ', "recipe": {}}', "best.safetensors").class_names
        ('cat', 'dog')
        >>> parse('{"model": 3}', "best.safetensors")
        Traceback (most recent call last):
        ValueError: best.safetensors: model: expected the name of a network, got 3
    """
    told = read_object(text, source)
    model = told.pop("model", None)
    if not isinstance(model, str) or not making.NAME.fullmatch(model):
        raise ValueError(f"{source}: model: expected the name of a network, got {making.short(model)}")
    model_args, recipe = _fields(told, "model_args", source), _fields(told, "recipe", source)
    for name, value in model_args.items():
        making.check_plain(value, f"{source}: model_args: {name}")
    return About(model, model_args, _class_names(told, source), _channels(told, source), recipe, told)


def read_object(text: str, source: str) -> dict[str, Any]:
    """An object of JSON out of a file that anybody may have written.

    Raises:
        ValueError: If it is not JSON, too long, too deep, or no object.
    """
    if len(text) > LONGEST:
        raise ValueError(f"{source}: expected at most {LONGEST:,} characters of JSON, got {len(text):,}")
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: expected JSON, got what cannot be read as such ({error})") from None
    if not isinstance(told, dict):
        raise ValueError(f"{source}: expected an object of fields in JSON, got {making.short(told)}")
    return cast("dict[str, Any]", told)


def _fields(told: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    found = told.pop(name, None)
    if not isinstance(found, dict) or not all(FIELD.fullmatch(key) for key in cast("dict[str, Any]", found)):
        raise ValueError(f"{source}: {name}: expected an object of named fields, got {making.short(found)}")
    return cast("dict[str, Any]", found)


def _class_names(told: dict[str, Any], source: str) -> tuple[str, ...]:
    found = told.pop("class_names", None)
    names = cast("list[Any]", found) if isinstance(found, list) else []
    if not 0 < len(names) <= MOST_CLASSES or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{source}: class_names: expected names in a list, got {making.short(found)}")
    return tuple(names)


def _channels(told: dict[str, Any], source: str) -> int:
    found = told.pop("channels", None)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 < found <= MOST_CHANNELS:
        raise ValueError(
            f"{source}: channels: expected a whole number from 1 to {MOST_CHANNELS}, got {making.short(found)}"
        )
    return found

"""Settings: a frozen dataclass whose fields are checked when it is made, set by name, and readable as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar, TypeGuard, cast

from typing_extensions import Self

from ..models.making import short

LONGEST = 2**24  # characters of JSON


def parse_size(text: str) -> tuple[int, int] | None:
    """Height and width, written as 192x256, or as one number for both.

    Examples:
        >>> parse_size("224"), parse_size("192x256")
        ((224, 224), (192, 256))
    """
    if text.strip().lower() == "none":
        return None
    sides = text.lower().replace(",", "x").split("x")
    if len(sides) > 2 or not all(side.strip().isdecimal() and int(side) > 0 for side in sides):
        raise ValueError(f"expected a side such as 224, or height and width such as 192x256, got {text!r}")
    return int(sides[0]), int(sides[-1])


def parse_value(text: str) -> Any:
    """None, a truth, a number, several numbers with commas, or else the text itself.

    Examples:
        >>> [parse_value(text) for text in ("none", "true", "3", "1e-3", "0.9,0.95", "adamw")]
        [None, True, 3, 0.001, (0.9, 0.95), 'adamw']
    """
    words: dict[str, Any] = {"none": None, "true": True, "yes": True, "false": False, "no": "no"}
    if text.lower() in words:
        return words[text.lower()]
    if "," in text:
        return tuple(parse_value(part.strip()) for part in text.split(",") if part.strip())
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True)
class Check:
    """What a field may hold.

    Attributes:
        expected: In words, for the error.
        good: Whether a value will do.
        read: How the command line's spelling of it is read.
    """

    expected: str
    good: Callable[[Any], bool]
    read: Callable[[str], Any] = parse_value


@dataclass(frozen=True)
class Settings:
    """Fields that are checked. A subclass is a frozen dataclass with a check for each field.

    Attributes:
        kind: What errors call it.
        checks: What each field may hold, by its name.
        free: Fields that change how fast a run goes or what is written, not what comes out of it; a run may be
            continued with others.
        bound: Fields that weights are trained for. Whoever uses the weights cannot choose others.
        tuned: Fields that the network is made with and its weights do not depend on. Whoever uses the weights may
            choose others, and the network is made with those.

    Examples:
        >>> @dataclass(frozen=True)
        ... class Reading(Settings):
        ...     context: int = 512
        ...     checks = {"context": whole(1)}
        >>> Reading().changed(context=64)
        Reading(context=64)
        >>> Reading(context=0)
        Traceback (most recent call last):
        ValueError: context: expected a whole number of at least 1, got 0
    """

    kind: ClassVar[str] = "settings"
    checks: ClassVar[Mapping[str, Check]] = {}
    free: ClassVar[tuple[str, ...]] = ()
    bound: ClassVar[tuple[str, ...]] = ()
    tuned: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value, check = getattr(self, field.name), self.checks[field.name]
            if not check.good(value):
                raise ValueError(f"{field.name}: expected {check.expected}, got {value!r}")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(field.name for field in fields(cls))

    def changed(self, **changes: Any) -> Self:
        """The same with some fields set; one that does not exist is an error that names those that come near."""
        check_fields(changes, self.names(), self.kind)
        return dataclasses.replace(self, **{name: tidy(value) for name, value in changes.items()})

    def as_dict(self) -> dict[str, Any]:
        """Every field by its name."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """All of it as JSON, one field per line."""
        return json.dumps(self.as_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote.

        Raises:
            ValueError: If it is not JSON, or a field is unknown or holds what it may not.
        """
        return cls().changed(**read_object(text, cls.kind))


def read_object(text: str, source: str) -> dict[str, Any]:
    """An object of JSON out of a file that anybody may have written.

    Args:
        text: JSON.
        source: What the error begins with.

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
        raise ValueError(f"{source}: expected an object of fields in JSON, got {short(told)}")
    return cast("dict[str, Any]", told)


def check_fields(given: Iterable[str], known: Iterable[str], kind: str) -> None:
    """Raise ValueError for the first name that is no field, with those that come near."""
    known = list(known)
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"{kind}: no field is called {name!r}; {hint}")


def check_values(changes: Mapping[str, Any], *kinds: type[Settings]) -> None:
    """Raise ValueError for the first change that is no field of these kinds, or holds what the field may not."""
    checks = {name: check for kind in kinds for name, check in kind.checks.items()}
    check_fields(changes, checks, " and ".join(kind.kind for kind in kinds))
    for name, value in changes.items():
        if not checks[name].good(tidy(value)):
            raise ValueError(f"{name}: expected {checks[name].expected}, got {value!r}")


def tidy(value: Any) -> Any:
    """The value as a field holds it: JSON's lists are tuples, also those in lists."""
    return tuple(tidy(part) for part in value) if isinstance(value, list) else value


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a finite number, and no truth."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def whole(least: int, optional: bool = False) -> Check:
    """A whole number from some number on."""

    def good(value: Any) -> bool:
        if value is None:
            return optional
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    return Check(f"a whole number of at least {least}{' or none' if optional else ''}", good)


def at_least_0(optional: bool = False) -> Check:
    """A number that is not negative."""
    return Check(
        f"a number of at least 0{' or none' if optional else ''}",
        lambda value: optional if value is None else is_number(value) and value >= 0,
    )


def more_than_0(optional: bool = False) -> Check:
    """A positive number."""
    return Check(
        f"a number above 0{' or none' if optional else ''}",
        lambda value: optional if value is None else is_number(value) and value > 0,
    )


def share(below: bool = False, optional: bool = False) -> Check:
    """A number from 0 to 1, perhaps without 1."""

    def good(value: Any) -> bool:
        if value is None:
            return optional
        return is_number(value) and 0 <= value <= 1 and not (below and value == 1)

    text = "a number from 0 to 1" + (", and less than 1" if below else "") + (", or none" if optional else "")
    return Check(text, good)


def numbers(count: int | None, optional: bool, above: float = -math.inf) -> Check:
    """So many numbers, or any number of them for None."""

    def good(value: Any) -> bool:
        if value is None:
            return optional
        fits = isinstance(value, tuple) and (len(value) == count if count else len(value) > 0)
        return fits and all(is_number(x) and x > above for x in value)

    text = f"{count or 'as many'} numbers{' above 0' if above == 0 else ''}{' or none' if optional else ''}"
    return Check(text, good)


def one_of(choices: tuple[str, ...], optional: bool = False) -> Check:
    """One of some names."""
    named = ", ".join(choices) + (" or none" if optional else "")
    return Check(f"one of {named}", lambda value: value in choices or (optional and value is None))


def truth(optional: bool = False) -> Check:
    """True or false."""
    text = "true, false or none" if optional else "true or false"
    return Check(text, lambda value: optional if value is None else isinstance(value, bool))


def text(optional: bool = False) -> Check:
    """A name that is not empty."""
    return Check(
        f"a name{' or none' if optional else ''}",
        lambda value: optional if value is None else isinstance(value, str) and bool(value),
    )


def size(optional: bool = True) -> Check:
    """Height and width."""

    def good(value: Any) -> bool:
        if value is None:
            return optional
        return isinstance(value, tuple) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)

    return Check(f"height and width in pixels{', or none' if optional else ''}", good, parse_size)

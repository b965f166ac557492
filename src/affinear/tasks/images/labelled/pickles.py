"""Pickles that hold arrays of bytes, read without running any code of theirs.

The files of CIFAR are pickles, and a pickle may call whatever it names. This reader knows a handful of names, the
ones that arrays and bytes are made of in pickles of any age, and puts harmless stand-ins of its own in their place.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

BYTES = ("u1", "uint8")


class Refused(pickle.UnpicklingError):
    """The pickle asks for something that is not in a file of arrays."""


class _Type:
    """Stands in for numpy's dtype, of which only the name matters."""

    def __init__(self, name: str | bytes, *ignored: object) -> None:
        self.name = _text(name).lstrip("|<>=")

    def __setstate__(self, state: object) -> None:
        pass  # byte order and the like, which bytes do not have


class _Array:
    """Stands in for numpy's ndarray, until all of it is read."""

    def __init__(self, *ignored: object) -> None:
        self.found: NDArray[np.uint8] | None = None

    def __setstate__(self, state: tuple[object, tuple[int, ...], _Type, bool, bytes | str]) -> None:
        _, shape, kind, by_column, content = state
        # Where a pickle of Python 2 was copied by Python 3, bytes may have become text.
        raw = content.encode("latin1") if isinstance(content, str) else content
        self.found = _array(raw, kind, shape, "F" if by_column else "C")


def _array(raw: bytes | bytearray, kind: _Type, shape: tuple[int, ...], order: str) -> NDArray[np.uint8]:
    if kind.name not in BYTES:
        raise Refused(f"an array of {kind.name}; expected bytes (uint8)")
    if len(raw) != math.prod(shape):
        raise Refused(f"an array of shape {shape} with {len(raw)} bytes")
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if _text(order) == "F" else "C")


def _encoded(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise Refused(f"bytes written as {encoding}")
    return text.encode("latin1")


def _text(name: str | bytes) -> str:
    return name.decode("latin1") if isinstance(name, bytes) else name


STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Array for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _array for core in ("core", "_core")},
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encoded,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return STAND_INS[module, name]
        except KeyError:
            raise Refused(f"it would run {module}.{name}") from None


def _check_memo(content: bytes) -> None:
    """Refuse to keep an object under a number out of turn: Python makes room for every number below it."""
    for count, (step, number, _) in enumerate(pickletools.genops(content)):
        if "PUT" in step.name and number is not None and number > count:
            raise Refused(f"it keeps an object as number {number}, and has made {count} at most")


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a pickle file: numbers, texts, lists and arrays of bytes, under names as text.

    Args:
        path: A file of Python 2 or 3.

    Raises:
        ValueError: If it is no such file, or would run code.
    """
    try:
        raw = path.read_bytes()
        _check_memo(raw)
        content = _Reader(io.BytesIO(raw), encoding="bytes").load()
    except Refused as error:
        raise ValueError(f"{path}: refused, because of what the pickle holds: {error}") from None
    except Exception as error:  # damaged pickles make the reader raise nearly anything
        raise ValueError(f"{path}: not a whole pickle ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a dictionary, got {type(content).__name__}")
    found = cast("dict[Any, Any]", content)
    named = {_text(name): value for name, value in found.items() if isinstance(name, (str, bytes))}
    return {name: value.found if isinstance(value, _Array) else value for name, value in named.items()}

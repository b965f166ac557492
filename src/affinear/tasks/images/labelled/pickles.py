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
from functools import partial
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


class _Kind:
    """Stands in for numpy's ndarray where it is named alone."""


class _Array:
    """Stands in for an array, until all of it is read."""

    def __init__(self, encoded: Callable[[str], bytes], *ignored: object) -> None:
        self.encoded = encoded
        self.found: NDArray[np.uint8] | None = None

    def __setstate__(self, state: tuple[object, tuple[int, ...], _Type, bool, bytes | str]) -> None:
        _, shape, kind, by_column, content = state
        # Where a pickle of Python 2 was copied by Python 3, bytes may have become text.
        raw = self.encoded(content) if isinstance(content, str) else content
        self.found = _array(raw, kind, shape, "F" if by_column else "C")


def _array(raw: bytes | bytearray, kind: _Type, shape: tuple[int, ...], order: str) -> NDArray[np.uint8]:
    if kind.name not in BYTES:
        raise Refused(f"an array of {kind.name}; expected bytes (uint8)")
    if len(raw) != math.prod(shape):
        raise Refused(f"an array of shape {shape} with {len(raw)} bytes")
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if _text(order) == "F" else "C")


def _text(name: str | bytes) -> str:
    return name.decode("latin1") if isinstance(name, bytes) else name


STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    **{(f"numpy.{core}.numeric", "_frombuffer"): _array for core in ("core", "_core")},
    ("numpy", "ndarray"): _Kind,
    ("numpy", "dtype"): _Type,
}
ARRAYS = {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}


class _Reader(pickle.Unpickler):
    def __init__(self, raw: bytes) -> None:
        super().__init__(io.BytesIO(raw), encoding="bytes")
        self._bytes: dict[int, tuple[str, bytes]] = {}

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in ARRAYS:
            return partial(_Array, self._encoded)
        if (module, name) == ("_codecs", "encode"):
            return self._encoded
        try:
            return STAND_INS[module, name]
        except KeyError:
            raise Refused(f"it would run {module}.{name}") from None

    def _encoded(self, text: str, encoding: str = "latin1") -> bytes:
        """The bytes of a text; of one that a pickle names a million times, the same ones."""
        if encoding not in ("latin1", "latin-1"):
            raise Refused(f"bytes written as {encoding}")
        if id(text) not in self._bytes:
            self._bytes[id(text)] = text, text.encode("latin1")  # beside the text, so that no other gets its number
        return self._bytes[id(text)][1]


def _check_steps(content: bytes) -> None:
    """Refuse steps that make much of a few bytes.

    Python makes room for every number below the one that an object is kept under; and a tuple that is used again in
    others, those again and so on, takes the age of the world to be looked up as the key of a dictionary.
    """
    kept, tuples, last = 0, set[int](), ""
    for count, (step, number, _) in enumerate(pickletools.genops(content)):
        if step.name == "MEMOIZE" or "PUT" in step.name:
            place = kept if step.name == "MEMOIZE" else number or 0
            if place > count:
                raise Refused(f"it keeps an object as number {place}, and has made {count} at most")
            kept += 1
            (tuples.add if "TUPLE" in last else tuples.discard)(place)
        elif step.name == "DUP" or ("GET" in step.name and number in tuples):
            raise Refused("it uses a tuple again, which no file of arrays does")
        last = step.name


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a pickle file: numbers, texts, lists and arrays of bytes, under names as text.

    Args:
        path: A file of Python 2 or 3.

    Raises:
        ValueError: If it is no such file, or would run code.
    """
    try:
        raw = path.read_bytes()
        _check_steps(raw)
        content = _Reader(raw).load()
    except Refused as error:
        raise ValueError(f"{path}: refused, because of what the pickle holds: {error}") from None
    except Exception as error:  # damaged pickles make the reader raise nearly anything
        raise ValueError(f"{path}: not a whole pickle ({type(error).__name__}: {error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a dictionary, got {type(content).__name__}")
    found = cast("dict[Any, Any]", content)
    named = {_text(name): value for name, value in found.items() if isinstance(name, (str, bytes))}
    return {name: value.found if isinstance(value, _Array) else value for name, value in named.items()}

"""A data set in one file, so that what takes minutes to make is made once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ...lens.files import place
from .sequences import KINDS, Ranges, Rows, Split

PARTS = ("train", "validation", "test")
SUFFIX = ".safetensors"


def keep(data: Ranges, path: Path, *, force: bool = False) -> Path:
    """Write a data set; `--data PATH` opens it.

    Args:
        data: Open.
        path: A name that ends in .safetensors.
        force: Whether to replace what is there; otherwise a free name is taken.

    Returns:
        Where it is.
    """
    if path.suffix != SUFFIX:
        raise ValueError(f"path: expected a name that ends in {SUFFIX}, got {path.name}")
    tensors: dict[str, Any] = {}
    for part in PARTS:
        split: Split = getattr(data, part)
        tensors[f"{part}.labels"] = split.labels
        for number, column in enumerate(split.rows):
            tensors[f"{part}.{number}.tokens"] = np.ascontiguousarray(column.tokens)
            tensors[f"{part}.{number}.starts"] = np.ascontiguousarray(column.starts)
    about = {
        "name": data.name,
        "kind": data.kind,
        "classes": list(data.classes),
        "symbols": data.symbols,
        "length": data.length,
    }
    return place(save(tensors, {"ranges": json.dumps(about)}), path, force=force).path


def read(path: Path) -> Ranges:
    """What `keep` wrote.

    Raises:
        ValueError: If it is no such file, or not whole.
    """
    try:
        with safe_open(path, "np") as file:  # pyright: ignore[reportGeneralTypeIssues]
            about = json.loads((file.metadata() or {}).get("ranges", "null"))
            if not isinstance(about, dict):
                raise ValueError("it does not say that it is a data set of sequences")
            told = cast("dict[str, Any]", about)
            names = set(cast("list[str]", list(file.keys())))
            train, validation, test = (_split(file, part, names) for part in PARTS)
            found = Ranges(
                str(told["name"]),
                str(told["kind"]),
                train,
                validation,
                test,
                tuple(str(name) for name in told["classes"]),
                int(told["symbols"]),
                int(told["length"]),
            )
        _check(found)
        return found
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise ValueError(f"data: {path} is no data set that was kept ({said})") from None


def _split(file: Any, part: str, names: set[str]) -> Split:
    columns = [number for number in range(2) if f"{part}.{number}.tokens" in names]
    rows = tuple(
        Rows(file.get_tensor(f"{part}.{number}.tokens"), file.get_tensor(f"{part}.{number}.starts"))
        for number in columns
    )
    return Split(rows, file.get_tensor(f"{part}.labels"), part)


def _check(data: Ranges) -> None:
    """Raise ValueError unless all numbers are within what they point at."""
    if data.kind not in KINDS or not 1 <= data.symbols <= 256 or not 1 <= data.length <= 2**20:
        raise ValueError("kind, symbols or length are not what a data set has")
    for part in PARTS:
        split: Split = getattr(data, part)
        labels = split.labels
        if labels.dtype != np.int64 or labels.ndim != 1 or not len(labels) or not split.rows:
            raise ValueError(f"{part} has no classes")
        if labels.min() < 0 or labels.max() >= len(data.classes):
            raise ValueError(f"{part} has classes beyond {len(data.classes)}")
        for column in split.rows:
            starts, tokens = column.starts, column.tokens
            if starts.dtype != np.int64 or tokens.dtype != np.uint8 or starts.shape != (len(labels) + 1,):
                raise ValueError(f"{part} has other sequences than classes")
            if starts[0] != 0 or starts[-1] != len(tokens) or (np.diff(starts) < 1).any():
                raise ValueError(f"{part} has sequences that lie outside of it")
            if len(tokens) and tokens.max() >= data.symbols:
                raise ValueError(f"{part} has tokens beyond {data.symbols}")

"""States in files: safetensors, written and read with nothing but torch. A file holds numbers and names, no code."""

from __future__ import annotations

import ctypes
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .mechanisms import Mechanism, mechanisms

if TYPE_CHECKING:
    from .state import State

FORMAT = "affinear.State"
NAMES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
LONGEST_HEADER = 10_000  # characters; ours have some five hundred
WORD = 8  # bytes; data begin at a multiple of it


def save(state: State, path: str | os.PathLike[str]) -> Path:
    """Write a state to a file that does not exist yet."""
    target = Path(path)
    if target.exists():
        raise ValueError(f"path: expected a file that does not exist yet, got {target}; remove it or choose another")
    folder = target.parent
    if not folder.exists():
        raise FileNotFoundError(
            f"path: expected a file in a folder that exists, got {target}; make {folder} first or choose another"
        )
    if not folder.is_dir():
        raise NotADirectoryError(f"path: expected a file in a folder, got {target}, and {folder} is none")
    name = state.mechanism.name
    if mechanisms().get(name) != state.mechanism:
        raise ValueError(
            f"mechanism: expected a registered one, as a file holds only its name, got {name!r}; "
            "call affinear.register first"
        )
    tensors = {name: x.detach().cpu().contiguous() for name, x in _tensors(state).items()}
    draft = target.with_name(f"{target.name}.{os.getpid()}.draft")
    try:
        with draft.open("wb") as file:
            file.write(_header(tensors, name))
            for x in tensors.values():
                file.write(ctypes.string_at(x.data_ptr(), x.nbytes))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
    return target


def load(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], Mechanism]:
    """The tensors of a state by name, and its mechanism."""
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        folder = Path(path).parent
        where = "there is no such file" if folder.is_dir() else f"there is no folder {folder}"
        raise FileNotFoundError(
            f"path: expected a file that State.save wrote, got {path}, and {where}; save a state there first, or is it "
            "elsewhere?"
        ) from None
    try:
        end = WORD + int.from_bytes(raw[:WORD], "little")
        if end > min(len(raw), LONGEST_HEADER):
            raise ValueError("its header is too long")
        header: dict[str, Any] = json.loads(raw[WORD:end])
        told: dict[str, str] = header.pop("__metadata__")
        if told["format"] != FORMAT:
            raise ValueError(f"it is a {told['format']}")
        tensors = {name: _tensor(entry, raw, end) for name, entry in header.items()}
        _check_shapes(tensors)
        name = str(told["mechanism"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"path: expected a file that State.save wrote, got {path} ({error})") from error
    known = mechanisms().get(name)
    if known is None:
        raise ValueError(
            f"path: expected a state of a registered mechanism, got {name!r} in {path}; "
            "call affinear.register before loading it"
        )
    return tensors, known


def _tensors(state: State) -> dict[str, Tensor]:
    found = {name: getattr(state, name) for name in ("count", "key_mean", "value_mean", "covariance")}
    return found if state.rotated_key_mean is None else found | {"rotated_key_mean": state.rotated_key_mean}


def _header(tensors: dict[str, Tensor], mechanism: str) -> bytes:
    """Length and table of contents, filled up with blanks to whole words."""
    table: dict[str, Any] = {"__metadata__": {"format": FORMAT, "mechanism": mechanism}}
    start = 0
    for name, x in tensors.items():
        table[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [start, start + x.nbytes]}
        start += x.nbytes
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % WORD)
    return len(text).to_bytes(WORD, "little") + text


def _tensor(entry: dict[str, Any], raw: bytes, base: int) -> Tensor:
    dtype, shape, (start, stop) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    size = math.prod(shape) * dtype.itemsize
    if not 0 <= start <= stop <= len(raw) - base or stop - start != size:
        raise ValueError("it is cut short, or its table of contents is wrong")
    if not size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(raw[base + start : base + stop]), dtype=dtype).reshape(shape)


def _check_shapes(tensors: dict[str, Tensor]) -> None:
    """A state of any batch, heads and widths, but of one."""
    batch, heads, features, values = tensors["covariance"].shape
    expected = {
        "count": (batch, heads),
        "key_mean": (batch, heads, features),
        "value_mean": (batch, heads, values),
        "covariance": (batch, heads, features, values),
        "rotated_key_mean": (batch, heads, features),
    }
    dtype = tensors["covariance"].dtype
    for name, x in tensors.items():
        if tuple(x.shape) != expected[name] or x.dtype != (torch.int64 if name == "count" else dtype):
            raise ValueError(f"its {name} is {x.dtype} in shape {tuple(x.shape)}")

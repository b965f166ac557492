"""Files of weights that know their own bytes: a checksum of all that a file says and holds, kept in the file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

from safetensors.torch import save
from torch import Tensor

from .recognising import LONGEST

SEAL = "sha256"
PIECE = 2**20


def sealed(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """A file of safetensors whose metadata hold the checksum of everything else in it; the same one each time.

    Args:
        tensors: By name, contiguous, on the CPU.
        metadata: What the file says beside them.

    Example:
        >>> import tempfile, torch
        >>> from affinear.models.sealing import broken, sealed
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "a.safetensors")
        ...     content = sealed({"a": torch.zeros(3)}, {"format": "pt"})
        ...     _ = path.write_bytes(content)
        ...     whole = broken(path)
        ...     _ = path.write_bytes(content[:-1] + b"x")
        ...     whole, broken(path)
        (False, True)
    """
    plain = _in_order(save(tensors, dict(metadata)))
    size = 8 + int.from_bytes(plain[:8], "little")
    digest = _begun(json.loads(plain[8:size]))
    digest.update(memoryview(plain)[size:])
    return _in_order(save(tensors, {**metadata, SEAL: digest.hexdigest()}))


def _in_order(content: bytes) -> bytes:
    """The same file with its metadata in order: safetensors writes them in another each time."""
    size = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:size])
    told = header.pop("__metadata__", {})
    text = json.dumps({"__metadata__": dict(sorted(told.items())), **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    return len(text).to_bytes(8, "little") + text + content[size:]


def broken(path: Path) -> bool:
    """Whether a file of safetensors has a checksum that is not that of its content; without one it cannot be told.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no file of safetensors.
    """
    with path.open("rb") as file:
        header = _header(file)
        wanted = header.get("__metadata__", {}).pop(SEAL, None)
        if wanted is None:
            return False
        digest = _begun(header)
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest() != wanted


def _header(file: IO[bytes]) -> dict[str, Any]:
    size = int.from_bytes(file.read(8), "little")
    if size > LONGEST:
        raise ValueError("expected a header of safetensors, got one that is too long")
    try:
        header = json.loads(file.read(size))
    except RecursionError:
        header = None
    known = cast("dict[str, Any]", header) if isinstance(header, dict) else {"__metadata__": None}
    if not isinstance(known.get("__metadata__", {}), dict):
        raise ValueError("expected a header of safetensors, got something else")
    return known


def _begun(header: Mapping[str, Any]) -> Any:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode())

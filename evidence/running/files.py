"""Files that are there whole or not at all."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any


def keep(path: Path, content: Any) -> None:
    """Write JSON. What it does not know is written as its fields, if it has some, or as text."""
    write(path, json.dumps(content, indent=1, default=_plain) + "\n")


def write(path: Path, text: str) -> None:
    """Write a text under another name first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.part")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)

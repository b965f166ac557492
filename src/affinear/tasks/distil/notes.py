"""What distilling notes beside its stages, as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def keep(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(content, indent=2), encoding="utf-8")
    os.replace(draft, path)

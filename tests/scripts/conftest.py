"""Files of scripts/ as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What imports a script by its name."""
    monkeypatch.syspath_prepend(str(SCRIPTS))  # scripts import each other by name

    def found(name: str) -> Any:
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    return found

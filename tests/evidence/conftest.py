"""Files of evidence/ as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

EVIDENCE = Path(__file__).resolve().parents[2] / "evidence"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What imports one by its name."""
    monkeypatch.syspath_prepend(str(EVIDENCE))  # they import each other by name

    def found(name: str) -> Any:
        for file in EVIDENCE.glob("*.py"):  # tests may have a package of that name
            monkeypatch.delitem(sys.modules, file.stem, raising=False)
        return importlib.import_module(name)

    return found

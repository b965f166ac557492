"""Pages of results, made as a user would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..conftest import EVIDENCE


@pytest.fixture
def written() -> Callable[..., str]:
    """What makes a page out of the folder of what was found, into another."""
    return made


def made(page: str, found: Path, output: Path, *more: str) -> str:
    """The page, made by the script in a process of its own."""
    command = [sys.executable, str(EVIDENCE / "pages" / "media.py"), page]
    command += ["--found", str(found), "--output", str(output), *more]
    environment = {**os.environ, "PYTHONPATH": str(EVIDENCE)}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((output / f"{page}.json").read_text())
    text = (output / "README.md").read_text(encoding="utf-8")
    assert text.index("What cannot be concluded") < text.index("```sh")
    return text

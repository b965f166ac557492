"""What the documentation has from scripts of benchmarks/ is what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_cost_of_many_gpus_in_the_docs_is_what_the_script_calculates():
    command = [sys.executable, str(ROOT / "benchmarks" / "mesh_cost.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    tables = printed.strip().split("\n\n")
    page = (ROOT / "docs" / "mesh.md").read_text(encoding="utf-8")
    assert len(tables) == 2
    assert all(table in page for table in tables)

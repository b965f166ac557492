"""The documentation builds without a warning, loads nothing from elsewhere, and its examples run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import affinear

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FOREIGN_ASSET = re.compile(r"<(?:script|img|iframe)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//")


def python_blocks(page: Path) -> Iterator[str]:
    """The Python examples of a page, each moved down by blank lines so that tracebacks show the page's line numbers."""
    text = page.read_text(encoding="utf-8")
    for block in FENCE.finditer(text):
        yield "\n" * text.count("\n", 0, block.start(1)) + block[1]


def test_site_builds_strictly_and_stands_alone(tmp_path: Path):
    # Not with --quiet: mkdocs then does not count its warnings, and nothing is strict any more.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = {page: page.read_text(encoding="utf-8") for page in tmp_path.rglob("*.html")}
    assert [str(page) for page, text in pages.items() if FOREIGN_ASSET.search(text)] == []
    documented = set(re.findall(r'<h3 id="affinear\.(?:\w+\.)*(\w+)"', pages[tmp_path / "api" / "index.html"]))
    assert {name for name in affinear.__all__ if not name.startswith("_")} <= documented


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.usefixtures("own_registry")  # pages register mechanisms
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # an example may save a file
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), namespace)

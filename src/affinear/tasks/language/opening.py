"""From what a user writes after `--data` to text, token files, puzzles or questions."""

from __future__ import annotations

from pathlib import Path

from . import puzzles, questions, tokens
from .puzzles import Puzzles
from .questions import Questions
from .reading import Reading, Texts, open_texts
from .settings import LanguageSettings
from .tokens import TokenFiles

Corpus = Texts | TokenFiles | Puzzles | Questions


def open_corpus(spec: str, settings: LanguageSettings) -> Corpus:
    """Open what is learnt from, or judged by.

    Args:
        spec: A file or a folder of text, JSON lines or parquet; a data set of Hugging Face; a folder of token files;
            "recall" or "copy", with options after a colon; or, to be judged by alone, "lambada:FILE", "piqa:FILE",
            "hellaswag:FILE", "winogrande:FILE".
        settings: How files are read.

    Raises:
        ValueError: If it is not there, not recognised or damaged.
    """
    kind, _, rest = spec.partition(":")
    if kind in puzzles.USUAL:
        return puzzles.made(spec)
    if kind in questions.TESTS and rest:
        return questions.read(kind, Path(rest).expanduser())
    path = Path(spec).expanduser()
    if (path / tokens.MANIFEST).is_file():
        return tokens.read(path)
    return open_texts(path, Reading(settings.documents, settings.text_field, settings.held_out))

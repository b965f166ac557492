"""LAMBADA, PIQA, HellaSwag and WinoGrande out of the files they are published in, as texts to be continued.

Contexts and answers are those of lm-eval's tasks lambada_openai, piqa, hellaswag and winogrande.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ..told import text_of
from .reading import decoded

BRACKETS = re.compile(r"\[.*?\]")
PLACE = "_"  # where WinoGrande's options go


@dataclass(frozen=True)
class Question:
    """A choice among continuations.

    Attributes:
        contexts: What stands before each.
        answers: The continuations, each with the space before it.
        right: The number of the right one.
    """

    contexts: tuple[str, ...]
    answers: tuple[str, ...]
    right: int


@dataclass(frozen=True, eq=False)
class Questions:
    """A test of common sense that is open.

    Attributes:
        name: For people.
        test: "lambada", "piqa", "hellaswag" or "winogrande".
        asked: All questions.
        fingerprint: Of the file.
    """

    name: str
    test: str
    asked: tuple[Question, ...]
    fingerprint: str

    @property
    def sizes(self) -> tuple[int, int]:
        """Nothing to learn from."""
        return 0, len(self.asked)


def read(test: str, path: Path) -> Questions:
    """A published file of one of the tests.

    Raises:
        ValueError: If it is not there, or a line lacks a field.
    """
    content = _content(test, path)
    asked = tuple(question for question, _ in asked_in(test, path, content))
    digest = hashlib.blake2b(content, digest_size=12).hexdigest()
    return Questions(f"{test} in {path}", test, asked, digest)


def asked_in(test: str, path: Path, content: bytes | None = None) -> Iterator[tuple[Question, dict[str, Any]]]:
    """Every question of a published file, and its line, with the answer of PIQA that lies in another file.

    Raises:
        ValueError: As `read` does.
    """
    content = _content(test, path) if content is None else content
    labels = _labels(path) if test == "piqa" else None
    count = 0
    for number, line in enumerate(decoded(content, path).split("\n"), 1):  # nothing else ends a line of JSON
        if not line.strip():
            continue
        try:
            told: Any = json.loads(line)
            if not isinstance(told, dict):
                raise TypeError
            fields = cast("dict[str, Any]", told)
            if labels is not None and "label" not in fields:
                fields = {**fields, "label": labels[count]}
            question = TESTS[test](fields)
        except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
            said = f"no {error}" if isinstance(error, KeyError) else type(error).__name__
            raise ValueError(f"{path}: line {number}: expected a question of {test}, as published ({said})") from None
        count += 1
        yield question, fields
    if not count:
        raise ValueError(f"{path}: expected questions of {test}, got none")


def _content(test: str, path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"data: {test}: expected a file with a question in each line, got no such: {path}")
    return path.read_bytes()


def _labels(path: Path) -> list[int] | None:
    """PIQA's answers, which lie beside the questions: valid.jsonl and valid-labels.lst."""
    beside = path.with_name(f"{path.stem}-labels.lst")
    if not beside.is_file():
        return None
    told = text_of(beside).split()
    wrong = next((word for word in told if word not in ("0", "1")), None)
    if wrong is not None:
        raise ValueError(f"{beside}: expected 0 or 1 for every question, got {wrong[:20]!r}")
    return [int(word) for word in told]


def _lambada(fields: Mapping[str, Any]) -> Question:
    context, _, word = _text(fields["text"]).rpartition(" ")
    return Question((context,), (" " + word,), 0)


def _piqa(fields: Mapping[str, Any]) -> Question:
    context = f"Question: {_text(fields['goal'])}\nAnswer:"
    answers = (" " + _text(fields["sol1"]), " " + _text(fields["sol2"]))
    return Question((context, context), answers, _number(fields["label"], 2))


def _hellaswag(fields: Mapping[str, Any]) -> Question:
    begun = f"{_text(fields['ctx_a'])} {_text(fields['ctx_b']).capitalize()}"
    context = without_brackets(f"{_text(fields['activity_label'])}: {begun}")
    answers = tuple(" " + without_brackets(_text(ending)) for ending in fields["endings"])
    return Question((context,) * len(answers), answers, _number(fields["label"], len(answers)))


def _winogrande(fields: Mapping[str, Any]) -> Question:
    before, place, after = _text(fields["sentence"]).partition(PLACE)
    if not place:
        raise ValueError
    contexts = (before + _text(fields["option1"]), before + _text(fields["option2"]))
    rest = " " + after.strip()
    return Question(contexts, (rest, rest), _number(int(fields["answer"]) - 1, 2))


def without_brackets(text: str) -> str:
    """A text of WikiHow without its marks.

    Examples:
        >>> without_brackets("Bake [header] a cake [title] Mix [step] it")
        'Bake a cake. Mix it'
    """
    text = BRACKETS.sub("", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _number(value: Any, below: int) -> int:
    found = int(value)
    if not 0 <= found < below:
        raise ValueError
    return found


TESTS: Mapping[str, Callable[[Mapping[str, Any]], Question]] = {
    "lambada": _lambada,
    "piqa": _piqa,
    "hellaswag": _hellaswag,
    "winogrande": _winogrande,
}

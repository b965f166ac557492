"""Text of every kind of file becomes tokens, and what is no text is refused in a sentence."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from affinear.tasks.language import spelling as spellings
from affinear.tasks.language import tokens
from affinear.tasks.language.opening import open_corpus
from affinear.tasks.language.reading import Texts
from affinear.tasks.language.samples import TextRows
from affinear.tasks.language.settings import LanguageSettings
from affinear.tasks.language.spelling import Spelling, learnt
from affinear.train.draws import NOTHING, Draw

SETTINGS = LanguageSettings(held_out=2)


def some_texts(count: int = 6) -> list[str]:
    words = ["état", "cell", "protein", "数据", "patient", "the", "of"]
    return [f"{number} " + " ".join(random.choices(words, k=12)) for number in range(count)]


def texts_of(path: Path, settings: LanguageSettings = SETTINGS) -> tuple[list[str], list[str]]:
    found = open_corpus(str(path), settings)
    assert isinstance(found, Texts)
    return list(found.texts("train")), list(found.texts("test"))


def test_files_lines_and_paragraphs_are_documents(tmp_path: Path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree", encoding="utf-8")
    (tmp_path / "b.md").write_text("four", encoding="utf-8")
    assert texts_of(tmp_path) == (["one\ntwo\n\nthree"], ["four"])
    by_line = LanguageSettings(held_out=2, documents="line")
    assert texts_of(tmp_path, by_line) == (["one", "three"], ["two", "four"])
    by_paragraph = LanguageSettings(held_out=2, documents="paragraph")
    assert texts_of(tmp_path / "a.txt", by_paragraph) == (["one\ntwo"], ["three"])


def test_files_that_are_called_test_are_judged_by(tmp_path: Path):
    texts = some_texts()
    for name, part in (("train-0.jsonl", texts[:4]), ("validation.jsonl", texts[4:])):
        lines = [json.dumps({"body": text, "id": 3}) for text in part]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    settings = LanguageSettings(text_field="body")
    assert texts_of(tmp_path, settings) == (texts[:4], texts[4:])
    with pytest.raises(
        ValueError, match=r"line 1: expected a text in the field 'text', got body, id; --set text_field"
    ):
        open_corpus(str(tmp_path), LanguageSettings())


def test_parquet_and_data_sets_are_read_alike(tmp_path: Path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    texts = some_texts()
    (tmp_path / "p").mkdir()
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "p" / "part.parquet")
    halves = datasets.DatasetDict(
        train=datasets.Dataset.from_dict({"text": texts[::2]}), test=datasets.Dataset.from_dict({"text": texts[1::2]})
    )
    halves.save_to_disk(str(tmp_path / "h"))
    assert texts_of(tmp_path / "p") == (texts[::2], texts[1::2]) == texts_of(tmp_path / "h")
    (tmp_path / "p" / "part.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"part\.parquet: expected parquet"):
        open_corpus(str(tmp_path / "p"), SETTINGS)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "has no text at all"),
        ("a.txt", b" \n ", "has no text at all"),
        ("a.txt", b"caf\xe9", r"a\.txt: expected text in UTF-8, got the byte 0xe9 at 3"),
        ("a.jsonl", b"{", r"a\.jsonl: line 1: expected JSON"),
        ("a.jsonl", b'{"text": 3}', r"line 1: expected a text in the field 'text', got text"),
        ("a.zip", b"PK", r"has no text\. Looked for: files that end in .* Found: a\.zip"),
        ("a.txt", b"one document", "has 1 documents to learn from and 0 to be judged by"),
    ],
)
def test_what_is_no_corpus_is_refused_in_a_sentence(tmp_path: Path, name: str, content: bytes, said: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as refused:
        open_corpus(str(tmp_path), SETTINGS)
    assert "\n" not in str(refused.value)


def test_a_learnt_tokenizer_spells_every_text_and_gives_it_back():
    spelling = learnt(iter(some_texts(40)), 300)
    assert spelling.size == 300
    again = Spelling(spelling.text)
    for text in (*some_texts(3), "never seen: \U0001f600 \x00 ß"):
        ids = again.encode([text])[0]
        assert again.decode(ids) == text
        assert "".join(again.pieces(iter(ids))) == text
        assert again.end not in ids
    assert len(again.encode(["protein protein"])[0]) < len("protein protein")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "expected the JSON of a tokenizer"),
        ('{"model": {"type": "WordPiece"}}', "expected one of the kind BPE, got WordPiece"),
        ('{"model": {"type": "BPE"}}', "it cannot be read"),
        ("numbers:1", "expected from 2 to"),
    ],
)
def test_what_is_no_tokenizer_is_refused(text: str, said: str):
    with pytest.raises(ValueError, match=said):
        Spelling(text)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path):
    text = learnt(iter(some_texts()), 280).text.replace("<|end|>", "<|other|>")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"expected a token that ends a text, one of .* got none of them: .*json"):
        spellings.read(tmp_path)


@pytest.mark.parametrize("bpe", [False, True])
def test_token_files_hold_every_document_after_the_end_of_the_last(tmp_path: Path, bpe: bool):
    texts = some_texts(9)
    (tmp_path / "c").mkdir()
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    (tmp_path / "c" / "a.jsonl").write_text(lines, encoding="utf-8")
    corpus = open_corpus(str(tmp_path / "c"), LanguageSettings(held_out=3))
    assert isinstance(corpus, Texts)
    spelling = learnt(iter(texts), 300) if bpe else Spelling("bytes")
    tokens.write(corpus, spelling, tmp_path / "t")
    found = open_corpus(str(tmp_path / "t"), SETTINGS)
    assert isinstance(found, tokens.TokenFiles)
    assert isinstance(found.train, np.memmap)
    assert found.sizes == corpus.sizes == (6, 3)
    stream = found.test.tolist()
    starts = [index for index, token in enumerate(stream) if token == spelling.end]
    parts = [stream[first + 1 : last] for first, last in zip(starts, [*starts[1:], len(stream)], strict=True)]
    assert [spelling.decode(part) for part in parts] == texts[2::3]
    with pytest.raises(ValueError, match="holds other files"):
        tokens.write(corpus, spelling, tmp_path / "c")


def test_damaged_token_files_are_refused_in_a_sentence(tmp_path: Path):
    (tmp_path / "a.txt").write_text("\n".join(some_texts(8)), encoding="utf-8")
    corpus = open_corpus(str(tmp_path / "a.txt"), LanguageSettings(held_out=2, documents="line"))
    assert isinstance(corpus, Texts)
    folder = tokens.write(corpus, Spelling("bytes"), tmp_path / "t")
    whole = (folder / "train.bin").read_bytes()
    for damage in (whole[:-2], b"\xff\xff" + whole[2:]):
        (folder / "train.bin").write_bytes(damage)
        with pytest.raises(ValueError, match=r"data: the token files in .* cannot be used: train\.bin"):
            open_corpus(str(folder), SETTINGS)
    (folder / "manifest.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="cannot be used: the manifest is of another version"):
        open_corpus(str(folder), SETTINGS)


def test_rows_hold_the_whole_stream_once_and_know_where_documents_begin():
    stream = np.array([0, 5, 6, 0, 7, 0, 8, 9, 3, 4, 0], np.uint16)
    rows = TextRows(stream, 4, 0, whole=True)
    batch = rows.__getitems__([Draw(index, 0) for index in (0, 1, 2, NOTHING)])
    assert batch.tokens.tolist()[:2] == [[0, 5, 6, 0], [7, 0, 8, 9]]
    assert batch.targets.tolist() == [[5, 6, 0, 7], [0, 8, 9, 3], [4, 0, -100, -100], [-100] * 4]
    assert batch.fresh.tolist()[:2] == [[True, False, False, True], [False, True, False, False]]
    assert batch.fresh[2:].tolist() == [[False] * 4] * 2  # what only fills up begins nothing
    assert len(TextRows(stream, 4, 0, whole=False)) == 2

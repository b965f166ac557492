"""Text of every kind of file becomes tokens, and what is no text is refused in a sentence."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from affinear.models.letters import whole_letters
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
        ("a.jsonl", b'{"text": 3}', r"line 1: expected a text in the field 'text', got int"),
        ("a.jsonl", b'{"text": null}', r"line 1: expected a text in the field 'text', got NoneType"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', r"a\.jsonl: line 2: expected text in UTF-8, got the byte 0xff"),
        ("a.jsonl", b'{"text": "a \\ud800"}', r"line 1: expected Unicode, got half a pair of surrogates at 2"),
        ("a.zip", b"PK", r"has no text\. Looked for: files that end in .* Found: a\.zip"),
        ("a.txt", b"one document", "has 1 documents to learn from and 0 to be judged by"),
    ],
)
def test_what_is_no_corpus_is_refused_in_a_sentence(tmp_path: Path, name: str, content: bytes, said: str):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said) as refused:
        open_corpus(str(tmp_path), SETTINGS)
    assert "\n" not in str(refused.value)


def test_a_file_to_be_judged_by_that_is_empty_is_named(tmp_path: Path):
    (tmp_path / "a.txt").write_text("\n\n".join(some_texts()))
    (tmp_path / "valid.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"is judged by valid\.txt, in which there is no text"):
        open_corpus(str(tmp_path), SETTINGS)


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


def test_what_lies_below_is_judged_by_as_well_if_it_is_called_so(tmp_path: Path):
    names = ("data/train-0.txt", "data/test-0.txt", "en/Val/a.TXT", "testimony.txt")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    learnt_from, judged_by = texts_of(tmp_path)
    assert sorted(judged_by) == ["data/test-0.txt", "en/Val/a.TXT"]
    assert sorted(learnt_from) == ["data/train-0.txt", "testimony.txt"]


def test_another_word_anywhere_is_another_corpus(tmp_path: Path):
    marks: set[str] = set()
    for word in ("here", "gone"):
        (tmp_path / "a.txt").write_text(f"{word}\n\n{'x' * 500}", encoding="utf-8")
        found = open_corpus(str(tmp_path / "a.txt"), LanguageSettings(documents="paragraph", held_out=2))
        assert isinstance(found, Texts)
        marks.add(found.fingerprint)
    assert len(marks) == 2


def test_files_of_windows_have_lines_and_paragraphs_too(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\r\nthree\r\n \r\nfour")
    assert texts_of(tmp_path, LanguageSettings(documents="paragraph", held_out=3)) == (
        ["one", "two\r\nthree"],
        ["four"],
    )
    assert texts_of(tmp_path, LanguageSettings(documents="line", held_out=4)) == (["one", "two", "three"], ["four"])
    (tmp_path / "a.txt").unlink()
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n{"text": "two"}\r\n')
    assert texts_of(tmp_path) == (["one"], ["two"])


def test_a_text_with_the_name_of_the_end_in_it_is_one_text():
    spelling = learnt(iter(some_texts()), 300)
    text = f"before {spellings.END} after"
    (row,) = spelling.encode([text])
    assert spelling.end not in row
    assert spelling.decode(row) == text
    with pytest.raises(ValueError, match="text: expected Unicode, got half a pair of surrogates"):
        spelling.encode(["half \ud800"])


@pytest.mark.parametrize("bpe", [False, True])
def test_a_long_document_is_spelled_in_pieces_as_the_whole_would_be(monkeypatch: pytest.MonkeyPatch, bpe: bool):
    documents = [" ".join(some_texts(40)) + "  two  spaces\n\tand a tab ", "short", "", "x" * 300]
    spelling = learnt(iter(documents), 400) if bpe else Spelling(spellings.BYTES)
    whole = [token for row in spelling.encode(documents) for token in (spelling.end, *row)]
    monkeypatch.setattr(spellings, "PIECE", 50)
    monkeypatch.setattr(tokens, "SIGNS", 120)
    assert len(list(spelling.cut(documents[0]))) > 20
    parts = list(tokens.spelled(iter(documents), spelling))
    assert len(parts) > 10
    assert [token for part in parts for token in part] == whole


def test_a_tokenizer_that_may_join_words_gets_texts_whole():
    told = json.loads(learnt(iter(some_texts()), 300).text)
    told["pre_tokenizer"] = None
    text = "a b " * spellings.PIECE
    assert list(Spelling(json.dumps(told)).cut(text)) == [text]


def test_letters_come_whole_and_what_is_none_is_shown_after_a_while():
    spelling = Spelling(spellings.BYTES)
    assert list(spelling.pieces(iter("aé数".encode()))) == ["a", "é", "数"]
    endless = spelling.pieces(iter([0xFF] * 100))
    assert set("".join(endless)) == {"\ufffd"}


def test_a_long_text_is_spelled_in_linear_time():
    asked = 0

    def decode(some: list[int]) -> str:
        nonlocal asked
        asked += len(some)
        return bytes(some).decode("utf-8", "replace")

    said = "".join(whole_letters(iter(b"word " * 400), decode))
    assert said == "word " * 400
    assert asked <= 4 * 2000

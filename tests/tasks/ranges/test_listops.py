"""ListOps: what is made up is what the benchmark defines, and what is read is checked."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from affinear.tasks.ranges import listops
from affinear.tasks.ranges.listops import made, read, text_of, tokens_of


def value(words: list[str]) -> int:
    """The definition, word by word."""
    word = words.pop(0)
    if not word.startswith("["):
        return int(word)
    args: list[int] = []
    while words[0] != "]":
        args.append(value(words))
    words.pop(0)
    assert 2 <= len(args) <= 10
    rules = {"[MIN": min, "[MAX": max, "[MED": lambda a: int(np.median(a)), "[SM": lambda a: sum(a) % 10}
    return int(rules[word](args))


def depth(words: list[str]) -> int:
    deep = most = 0
    for word in words:
        deep += word.startswith("[") - (word == "]")
        most = max(most, deep)
    return most


def test_values_are_those_of_the_definition_and_lengths_are_within_bounds():
    data = made(f"listops:train=300,validation=20,test=20,shortest=20,longest=300,seed={random.randrange(10**6)}")
    rows = data.train.rows[0]
    for index in range(len(rows)):
        words = text_of(rows[index]).split()
        assert depth(words) < 10
        assert value(words) == data.train.labels[index]
        assert words == []
    assert 20 < data.train.shortest <= data.train.longest < 300
    assert len({rows[index].tobytes() for index in range(len(rows))}) == len(rows)


def test_the_published_size_has_published_lengths():
    data = made("listops:train=40,validation=2,test=2")
    assert 500 < data.train.shortest <= data.train.longest < 2000
    assert (data.symbols, len(data.classes)) == (15, 10)


def test_three_in_four_nodes_are_digits():
    levels = listops.grow(5000, np.random.default_rng(), 10, 10)
    inner = [count for level in levels[:9] for count in level.count.tolist()]
    share = np.mean(np.asarray(inner) > 0)
    assert share == pytest.approx(0.25, abs=0.01)
    counts = np.asarray([count for count in inner if count])
    assert (counts.min(), counts.max()) == (2, 10)
    assert counts.mean() == pytest.approx(6, abs=0.1)
    assert not levels[9].count.any()


def test_the_same_seed_makes_the_same_trees_and_another_makes_others():
    spec = "listops:train=30,validation=2,test=2,shortest=4,longest=60,seed="
    assert made(spec + "1").fingerprint == made(spec + "1").fingerprint != made(spec + "2").fingerprint


def test_files_of_the_benchmark_are_read(tmp_path: Path):
    lines = "Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n( ( ( [SM 7 ) ( ( ( [MIN 5 ) 6 ) ] ) ) ] )\t2\n"
    for name in listops.FILES.values():
        (tmp_path / name).write_text(lines, encoding="utf-8")
    data = read(tmp_path)
    assert [text_of(data.test.rows[0][i]) for i in range(2)] == ["[MAX 2 9 ]", "[SM 7 [MIN 5 6 ] ]"]
    assert data.test.labels.tolist() == [9, 2]
    (tmp_path / "basic_val.tsv").write_text("[MAX 2 ]\tnine\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"basic_val.tsv: line 1: expected an expression, a tab and a digit"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("listops:tran=3", "listops takes no 'tran'; did you mean 'train'?"),
        ("listops:train=many", "train: expected a whole number, such as 96000, got 'many'"),
        ("listops:train=0", "expected at least one sequence"),
        ("listops:train=10,test=1,validation=1,shortest=50000,longest=60000,depth=2", "hardly any tree"),
        ("listops:train=300,test=1,validation=1,shortest=0,longest=2", "too few different trees"),
    ],
)
def test_what_cannot_be_made_is_said_in_a_sentence(spec: str, said: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listops, "PATIENCE", 2)
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        made(spec)


def test_an_expression_of_other_words_is_refused():
    with pytest.raises(ValueError, match=r"asked: expected digits, \[MIN, .* got 'seven'"):
        tokens_of("[MAX seven 3 ]", "asked")

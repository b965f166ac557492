"""Spelling: plain words, letters, and pairs as the tokenizers library joins them."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from affinear.tasks.speech.text import SPACE, Spelling, learn_merges, plain


def random_texts(count: int = 60) -> list[str]:
    random = np.random.default_rng()
    letters = list("aabbbcde'")
    words = ["".join(random.choice(letters, size=random.integers(1, 8))).strip("'") or "a" for _ in range(40)]
    return [" ".join(random.choice(words, size=random.integers(1, 9))) for _ in range(count)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, World!", "hello world"),
        ("DON\u2019T -- stop", "don't stop"),
        ("'quoted' it's", "quoted it's"),
        ("\ufb01ne \uff11\uff12", "fine 12"),
        ("Ünïcode ... ", "ünïcode"),
        ("?!", ""),
    ],
)
def test_texts_become_plain_words(text: str, expected: str):
    assert plain(text) == expected
    assert plain(plain(text)) == plain(text)


@pytest.mark.parametrize("pairs", [False, True])
def test_what_is_spelled_reads_the_same(pairs: bool):
    texts = random_texts()
    spelling = Spelling.of_pairs(texts, 40) if pairs else Spelling.of_letters(texts)
    for text in texts:
        numbers = spelling.encode(text)
        assert spelling.decode(numbers) == text
        assert all(0 < number < spelling.size for number in numbers)


def test_pairs_are_joined_as_tokenizers_joins_them():
    texts = random_texts()
    spelling = Spelling.of_pairs(texts, 60)
    assert len(spelling.merges) > 10
    names = {piece: number for number, piece in enumerate(spelling.pieces)}
    oracle = Tokenizer(models.BPE(vocab=names, merges=list(spelling.merges)))
    oracle.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")  # pyright: ignore[reportAttributeAccessIssue]
    for text in texts:
        assert [spelling.pieces[number - 1] for number in spelling.encode(text)] == oracle.encode(text).tokens


def test_merges_are_of_the_commonest_pair_that_is_left():
    words = Counter(word for text in random_texts() for word in text.split())
    spelled = {word: [SPACE, *word] for word in words}
    for pair in learn_merges(words, 12):
        counts: Counter[tuple[str, str]] = Counter()
        for word, pieces in spelled.items():
            for neighbours in itertools.pairwise(pieces):
                counts[neighbours] += words[word]
        assert counts[pair] == max(counts.values())
        for pieces in spelled.values():
            place = 0
            while place < len(pieces) - 1:
                if (pieces[place], pieces[place + 1]) == pair:
                    pieces[place : place + 2] = ["".join(pair)]
                place += 1


def test_letters_outside_the_alphabet_are_told():
    spelling = Spelling.of_letters([], "ABC'")
    assert spelling.pieces == (SPACE, "'", "a", "b", "c")
    assert spelling.missing("abc zebra") == "erz"
    assert spelling.decode(spelling.encode("zebra")) == "ba"

"""Tokens as text, piece by piece, each as soon as its letters are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

UNFINISHED = "\ufffd"  # what a tokenizer shows where a letter's last bytes are still to come
LONGEST = 4  # tokens of one letter: UTF-8 has no more bytes


def whole_letters(tokens: Iterable[int], decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Text of tokens as they come, never half a letter. Only the latest tokens are remembered.

    Args:
        tokens: One after the other.
        decode: What makes text of some of them.

    Example:
        >>> from affinear.models.letters import whole_letters
        >>> list(whole_letters("a\u00e9".encode(), lambda some: bytes(some).decode("utf-8", "replace")))
        ['a', '\u00e9']
    """
    known: list[int] = []  # spelled already, but how the next ones are spelled may depend on them
    new: list[int] = []
    for token in tokens:
        new.append(token)
        before, text = decode(known), decode(known + new)
        whole = not text.endswith(UNFINISHED) or len(new) > LONGEST  # bytes that no letter has are shown as such
        if len(text) > len(before) and whole:
            yield text[len(before) :]
            known, new = new, []

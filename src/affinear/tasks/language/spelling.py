"""From text to tokens and back: bytes, numbers, or a byte-level BPE that was learnt or given."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...models.letters import whole_letters

BYTES, NUMBERS = "bytes", "numbers:"
END = "<|end|>"
ENDS = (END, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
LONGEST = 2**23  # characters of a tokenizer out of a file
MOST = 2**20  # tokens of a vocabulary
PIECE = 2**16  # characters of a long text that are spelled together
BETWEEN_WORDS = re.compile(r"(?<=\S) (?=\S)")


class Spelling:
    """How text is spelled in tokens. A document begins with the token `end`, which also says that the last one is over.

    Args:
        text: "bytes"; "numbers:V" for V numbers, with spaces between them; or the JSON of a tokenizer.

    Raises:
        ValueError: If it is none of these.

    Example:
        >>> from affinear.tasks.language.spelling import Spelling
        >>> spelling = Spelling("bytes")
        >>> spelling.encode(["Hi"]), spelling.decode([72, 105]), spelling.size
        ([[72, 105]], 'Hi', 257)
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if text == BYTES:
            self.size, self.end = 257, 256
        elif text.startswith(NUMBERS):
            count = text[len(NUMBERS) :]
            if not count.isdecimal() or not 2 <= int(count) <= MOST:
                raise ValueError(f"tokenizer: expected from 2 to {MOST} numbers, got {count[:20]!r}")
            self.size, self.end = int(count), 0
        else:
            self.size, self.end = _sizes(text, self._tokenizer)

    @cached_property
    def _tokenizer(self) -> Any:
        need()
        from tokenizers import Tokenizer

        if len(self.text) > LONGEST:
            raise ValueError(f"tokenizer: expected at most {LONGEST:,} characters, got {len(self.text):,}")
        try:
            kind = json.loads(self.text)["model"]["type"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError("tokenizer: expected the JSON of a tokenizer, got something else") from None
        if kind != "BPE":
            raise ValueError(f"tokenizer: expected one of the kind BPE, got {str(kind)[:40]}")
        try:
            with _panics_told():
                found: Any = Tokenizer.from_str(self.text)
        except Exception as error:  # the library raises Exception itself
            said = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise ValueError(f"tokenizer: it cannot be read ({said})") from None
        found.encode_special_tokens = True  # a text that has the name of a token in it stays a text
        # A file may ask for every text to be filled up to billions of tokens, or cut to none.
        found.no_padding()
        found.no_truncation()
        return found

    @property
    def plain(self) -> bool:
        """Whether it needs no tokenizer."""
        return self.text == BYTES or self.text.startswith(NUMBERS)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without `end`."""
        if self.text == BYTES:
            return [list(text.encode("utf-8", "surrogatepass")) for text in texts]
        if self.plain:
            return [[self._number(word) for word in text.split()] for text in texts]
        try:
            with _panics_told():
                found: list[Any] = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except TypeError:  # what the library says to half a pair of surrogates
            raise ValueError("text: expected Unicode, got half a pair of surrogates") from None
        return [one.ids for one in found]

    def cut(self, text: str) -> Iterator[str]:
        """A long text in pieces that are spelled as the whole would be; whole where that is not sure."""
        start = 0
        while self._keeps_words and len(text) - start > PIECE:
            found = BETWEEN_WORDS.search(text, start + PIECE)
            if found is None:
                break
            yield text[start : found.start()]
            start = found.start()
        yield text[start:]

    @cached_property
    def _keeps_words(self) -> bool:
        """Whether no token goes from one word into the next, so that a text may be cut between them."""
        if self.plain:
            return self.text == BYTES
        told: Any = json.loads(self.text)
        before = told.get("pre_tokenizer") or {}
        plain = before.get("type") == "ByteLevel" and before.get("use_regex") and not before.get("add_prefix_space")
        return bool(plain) and told.get("normalizer") is None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; `end` has none."""
        kept = [token for token in tokens if token != self.end]
        if self.text == BYTES:
            return bytes(kept).decode("utf-8", "replace")
        if self.plain:
            return " ".join(map(str, kept))
        with _panics_told():
            return self._tokenizer.decode(kept)

    def number_of(self, name: str) -> int | None:
        """The token that is called so, such as "<|en|>"; None if there is none."""
        found = None if self.plain else self._tokenizer.token_to_id(name)
        return None if found is None else int(found)

    @property
    def added(self) -> frozenset[int]:
        """Tokens that no text is spelled with, which mean something by themselves; `end` among them."""
        own = {} if self.plain else self._tokenizer.get_added_tokens_decoder()
        return frozenset({self.end, *map(int, own)})

    def pieces(self, tokens: Iterator[int]) -> Iterator[str]:
        """Text as it comes, never half a letter."""
        return whole_letters(tokens, self.decode)

    def _number(self, word: str) -> int:
        if not word.isdecimal() or int(word) >= self.size:
            raise ValueError(f"prompt: expected numbers from 0 to {self.size - 1}, got {word[:40]!r}")
        return int(word)


@contextmanager
def _panics_told() -> Generator[None]:
    """Tell where the library gives up, which it says in a way that no `except Exception` hears."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"tokenizer: it does not fit together ({str(error)[:120]})") from None


def _sizes(text: str, tokenizer: Any) -> tuple[int, int]:
    """Tokens that there are, and the one that ends a text."""
    size = int(tokenizer.get_vocab_size(with_added_tokens=True))
    if not 2 <= size <= MOST:
        raise ValueError(f"tokenizer: expected from 2 to {MOST} tokens, got {size}")
    last = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if last >= size:
        raise ValueError(f"tokenizer: expected {size} tokens with the numbers from 0 to {size - 1}, got one of {last}")
    for name in ENDS:
        found = tokenizer.token_to_id(name)
        if found is not None:
            return size, int(found)
    raise ValueError(f"tokenizer: expected a token that ends a text, one of {', '.join(ENDS)}, got none of them")


def learnt(texts: Iterator[str], vocabulary: int) -> Spelling:
    """A byte-level BPE, learnt from texts: every text can be spelled in it."""
    need()
    import tokenizers

    kit: Any = tokenizers
    tokenizer = kit.Tokenizer(kit.models.BPE())
    tokenizer.pre_tokenizer = kit.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = kit.decoders.ByteLevel()
    trainer = kit.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(kit.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Spelling(tokenizer.to_str())


def read(path: Path) -> Spelling:
    """A tokenizer out of a file (tokenizer.json), or out of a folder with one.

    Raises:
        ValueError: If it is not there, or none.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"tokenizer: expected train, bytes, or a file such as tokenizer.json, got no such: {path}")
    if file.stat().st_size > 4 * LONGEST:
        raise ValueError(f"tokenizer: {file} is too large for one")
    try:
        return Spelling(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"tokenizer: {file} is no text in UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{error}: {file}") from None


def need() -> None:
    """Raise ValueError where the package is missing."""
    if find_spec("tokenizers") is None:
        raise ValueError("tokenizer: BPE needs tokenizers: pip install 'affinear[language]', or --set tokenizer=bytes")

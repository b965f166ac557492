"""`--data`, open: LibriSpeech's folders, or manifests with a recording on every line."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from ...models.making import short
from ..threads import in_threads
from ..told import text_of
from .audio import SUFFIXES, CorruptAudio, seconds_of
from .recordings import LOUDEST, Recording, Recordings, Voices, fingerprint
from .text import plain

TESTS = ("dev-clean", "validation", "valid", "val", "dev", "test-clean", "test")
MOST_SECONDS = 1e7  # that a manifest may tell of: a hundred days
HELD_OUT = 10  # one speaker, or recording, in so many, where nobody says which are for testing
LAYOUT = (
    'a manifest with a line such as {"audio": "a.wav", "text": "hello"} for every recording, train.jsonl and '
    "test.jsonl in a folder, or LibriSpeech's folders, train-clean-100/SPEAKER/CHAPTER/ID.flac beside a .trans.txt"
)


def open_voices(spec: str, *, sample_rate: int, test_split: str | None, memory: bool) -> Voices:
    """Recordings and transcripts, open, their lengths looked up.

    Args:
        spec: A manifest, a folder with two, or LibriSpeech's folder.
        sample_rate: Samples of a second that recordings are brought to.
        test_split: Name of the half to be judged by; None for the first of `TESTS` that is there.
        memory: Whether all recordings are decoded now and kept, as whole numbers of 16 bits.

    Raises:
        ValueError: If it is not there or of no such kind, or a line or a transcript is wrong.
    """
    root = Path(spec).expanduser()
    if root.is_file():
        halves, how = [_manifest(root)], ""
    elif root.is_dir():
        halves, how = _folder(root, test_split)
    else:
        raise ValueError(f"data: expected {LAYOUT}; got {spec!r}, which is not there")
    if len(halves) == 1:
        halves, how = _hold_out(halves[0], root)
    base = root if root.is_dir() else root.parent
    wordless = sum(not row.text for half in halves for row in half)
    how += f"; {wordless:,} without a word left out" if wordless else ""
    halves = [_measured(half) for half in halves]
    for half, noun in zip(halves, ("to learn from", "to be judged by"), strict=True):
        if not half:
            raise ValueError(f"data: expected recordings {noun} in {root}, found none with a word in its transcript")
    train, test = (Recordings(half, sample_rate) for half in halves)
    if memory:
        train, test = _stored(train), _stored(test)
    return Voices(f"speech in {root} ({how})", train, test, fingerprint(base, halves))


def _folder(root: Path, test_split: str | None) -> tuple[list[list[Recording]], str]:
    manifests = {path.stem: path for path in sorted(root.glob("*.jsonl"))}
    folders = {path.name: path for path in sorted(root.iterdir()) if path.is_dir() and any(path.rglob("*.trans.txt"))}
    known = manifests or folders
    if not known and any(root.rglob("*.trans.txt")):
        known = {root.name: root}
    if not known:
        here = ", ".join(sorted(path.name for path in root.iterdir())[:6]) or "nothing"
        raise ValueError(f"data: expected {LAYOUT}; found {here} in {root}")
    read = _manifest if manifests else _librispeech
    trains = [name for name in known if name.startswith("train")]
    if not trains:
        if test_split is not None:
            raise ValueError(f"test_split: expected none, as {root} has no half to learn from, got {test_split!r}")
        return [[row for path in known.values() for row in read(path)]], ""
    tests = [test_split] if test_split else [name for name in TESTS if name in known]
    tests += [] if test_split else [name for name in known if name.startswith(("dev", "val", "test"))]
    if not tests or tests[0] not in known:
        raise ValueError(
            f"{'test_split' if test_split else 'data'}: expected recordings to be judged by in {root}, such as "
            f"{test_split or 'test'}, found {', '.join(known)}"
        )
    halves = [[row for name in trains for row in read(known[name])], read(known[tests[0]])]
    return halves, f"{' and '.join(trains)}, judged by {tests[0]}"


def _manifest(path: Path) -> list[Recording]:
    """The recordings of a manifest."""
    text = path.read_text(encoding="utf-8-sig", errors="surrogateescape")
    found: list[Recording] = []
    # Texts may hold signs that end lines elsewhere.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found.append(_row(path, number, line))
    return found


def _row(path: Path, number: int, line: str) -> Recording:
    where = f"{path}: line {number}"
    try:
        told: Any = json.loads(line)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise ValueError(f"{where}: expected an object of JSON with the fields audio and text, got {line[:60]!r}")
    fields = cast("dict[str, Any]", told)
    for name in ("audio", "text"):
        if not isinstance(fields.get(name), str):
            raise ValueError(f"{where}: expected a text in the field {name!r}, got {short(fields.get(name))}")
    for name in ("begin", "end", "duration"):
        value = fields.get(name)
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value <= MOST_SECONDS):
            raise ValueError(f"{where}: expected seconds in the field {name!r}, got {short(value)}")
    begin, end = float(fields.get("begin") or 0.0), fields.get("end")
    if end is None and fields.get("begin") is not None and fields.get("duration"):
        end = begin + fields["duration"]
    if end is not None and end <= begin:
        raise ValueError(f"{where}: expected an end after the beginning at {begin:g} s, got {end:g} s")
    length = fields.get("duration") if end is None else end - begin
    return Recording(
        path=os.path.join(path.parent, fields["audio"]),
        text=plain(fields["text"]),
        speaker=str(fields.get("speaker") or ""),
        seconds=float(length or 0.0),
        begin=begin,
        end=None if end is None else float(end),
        line=number,
        written=fields["text"],
    )


def _librispeech(folder: Path) -> list[Recording]:
    """The recordings of a folder SPEAKER/CHAPTER/ID.flac with SPEAKER-CHAPTER.trans.txt beside them."""
    found: list[Recording] = []
    for told in sorted(folder.rglob("*.trans.txt")):
        files = {path.stem: path for path in told.parent.iterdir() if path.suffix.lower() in SUFFIXES}
        for line in text_of(told).splitlines():
            name, _, text = line.strip().partition(" ")
            if not name:
                continue
            if name not in files:
                raise ValueError(
                    f"data: expected a recording {name}.flac beside {told}, which has its text, found none"
                )
            found.append(Recording(str(files[name]), plain(text), name.partition("-")[0], 0.0, written=text))
    return found


def _hold_out(rows: Sequence[Recording], root: Path) -> tuple[list[list[Recording]], str]:
    """Two halves of what comes in one: some speakers by a digest of their names, or else some recordings."""
    speakers = sorted({row.speaker for row in rows})
    by_speaker = len(speakers) > 2 and "" not in speakers
    files = {row.path: os.path.basename(row.path) for row in rows}
    if len(set(files.values())) < len(files):
        files = {path: os.path.relpath(path, root) for path in files}
    names = [row.speaker if by_speaker else f"{files[row.path]} {row.begin}" for row in rows]
    order = sorted(set(names), key=lambda name: hashlib.blake2b(name.encode("utf-8", "surrogatepass")).digest())
    if len(order) < 2:
        raise ValueError(
            f"data: expected two recordings or more in {root}, as one in {HELD_OUT} is held out, got {len(order)}"
        )
    held = set(order[: max(1, len(order) // HELD_OUT)])
    halves = [[row for row, name in zip(rows, names, strict=True) if (name in held) == out] for out in (False, True)]
    return halves, f"one {'speaker' if by_speaker else 'recording'} in {HELD_OUT} held out for testing"


def _measured(rows: Sequence[Recording]) -> list[Recording]:
    """Recordings with a word in them, with their lengths; of one that cannot be read nothing, until it is needed."""

    def length(row: Recording) -> Recording:
        if row.seconds:
            return row
        try:
            return replace(row, seconds=max(0.0, seconds_of(row.path) - row.begin))
        except CorruptAudio:
            return row

    return in_threads(length, [row for row in rows if row.text])


def _stored(half: Recordings) -> Recordings:
    """The half with everything decoded; what cannot be is left to be found out later."""

    def decode(index: int) -> Any:
        try:
            return (half[index] * LOUDEST).round().clamp(-LOUDEST, LOUDEST - 1).numpy().astype(np.int16)
        except CorruptAudio:
            return None

    waves = in_threads(decode, range(len(half)))
    if any(wave is None for wave in waves):
        return half
    return replace(half, stored=waves)

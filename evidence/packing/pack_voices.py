"""The voices of The Ur-Quan Masters as features, packed for a machine that cannot read audio.

    PYTHONPATH=src python evidence/packing/pack_voices.py --voices voice/3dovoice --texts content/base/comm \
        --out packed

takes the unpacked voices (`uqm-*-voice.uqm`, a zip file) and texts (`uqm-*-content.uqm`) of the game and cuts every
clip into its lines, which a file of times beside the clips tells. What comes out is `voices.json`, a row for every line
(speaker, text, frames), and `voices.bz2`, log-mel features at the clips' own 11,025 Hz, two megabytes an hour: of every
two frames the mean, rounded to a whole number. `read_packed` reads them, and puts a frame between any two. `--hours`
takes some of the lines, the same share of every speaker's. The recordings are CC BY-NC-SA 2.5; do not give them away
with this library.
"""

from __future__ import annotations

import argparse
import bz2
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from affinear.models.speech import LogMel

RATE, BANDS = 11_025, 40
STEP, FLOOR = 0.5, -14.0  # of a feature that is read; whatever is quieter than the floor is silence
HIGHEST = 127  # of what is packed, in steps twice as large, so that the sum of two is still a byte
SHORTEST = 0.1  # seconds of a line
SEED = 20  # which lines are taken
CLIP = re.compile(r"^#\(([^)]*)\)[ \t]+(\S+\.ogg)[^\n]*\n(.*?)(?=^#\(|\Z)", re.DOTALL | re.MULTILINE)
TIMES = re.compile(r"^#\(([^)]*)\)[ \t]*([\d, \t]*)$", re.MULTILINE)


@dataclass(frozen=True)
class Line:
    """A line of a clip: file, speaker, from where to where in seconds, and what is said."""

    path: Path
    speaker: str
    begin: float
    end: float | None
    text: str


def lines_of(voices: Path, texts: Path) -> Iterator[Line]:
    """Every line of every clip whose lines and times go together, each clip once."""
    clips = {path.name: path for path in sorted(voices.rglob("*.ogg"))}
    times = {
        (path.parent.name, name): [int(number) / 1000 for number in told.replace(",", " ").split()]
        for path in sorted(voices.glob("*/*.ts"))
        for name, told in TIMES.findall(path.read_text(encoding="utf-8", errors="replace"))
    }
    for file in sorted(texts.glob("*/*.txt")):
        for name, clip, told in CLIP.findall(file.read_text(encoding="utf-8", errors="replace")):
            path = clips.pop(clip, None)
            said = [line.strip() for line in told.splitlines() if line.strip()]
            lengths = None if path is None else times.get((path.parent.name, name))
            if path is None or lengths is None or len(lengths) != len(said) - 1:
                continue
            cuts = [0.0, *np.cumsum(lengths).tolist()]
            for begin, end, text in zip(cuts, [*cuts[1:], None], said, strict=True):
                yield Line(path, path.parent.name, begin, end, text)


def some_of(lines: list[Line], share: float) -> list[Line]:
    """The same share of the lines of every speaker, drawn at random and the same every time, in their order."""
    chosen: set[int] = set()
    for speaker in sorted({line.speaker for line in lines}):
        mine = [number for number, line in enumerate(lines) if line.speaker == speaker]
        chosen.update(random.Random(f"{SEED} {speaker}").sample(mine, round(share * len(mine))))
    return [line for number, line in enumerate(lines) if number in chosen]


def pack(features: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Features (T, F) as (F, T / 2): means of two frames in steps, each by how it differs along time and bands."""
    pairs = features[: len(features) // 2 * 2].reshape(-1, 2, features.shape[1]).mean(axis=1)
    steps = np.clip(np.round((pairs - FLOOR) / (2 * STEP)), 0, HIGHEST).astype(np.uint8)
    along = np.diff(steps, axis=0, prepend=np.zeros_like(steps[:1]))
    return np.ascontiguousarray(np.diff(along, axis=1, prepend=np.zeros_like(along[:, :1])).T)


def unpack(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What `pack` rounded, (T, F), in steps half as large above the floor: between two frames there is their mean."""
    along = np.cumsum(packed.T, axis=1, dtype=np.uint8)
    steps = np.cumsum(along, axis=0, dtype=np.uint8)
    return np.stack([2 * steps, steps + np.concatenate([steps[1:], steps[-1:]])], axis=1).reshape(-1, steps.shape[1])


def read_packed(folder: Path) -> tuple[list[dict[str, Any]], list[NDArray[np.uint8]]]:
    """All rows, and the features of each in steps: `FLOOR + STEP * features`."""
    rows: list[dict[str, Any]] = json.loads((folder / "voices.json").read_text(encoding="utf-8"))
    content = np.frombuffer(bz2.decompress((folder / "voices.bz2").read_bytes()), np.uint8)
    sizes = [row["frames"] // 2 * BANDS for row in rows]
    parts = np.split(content, np.cumsum(sizes)[:-1])
    return rows, [unpack(part.reshape(BANDS, -1)) for part in parts]


def main() -> None:
    """Cut, compute, compress and write."""
    import soundfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--voices", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hours", type=float, help="about how many; all unless told")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    lines = list(lines_of(given.voices, given.texts))
    if given.hours is not None:
        whole = sum(soundfile.info(path).duration for path in {line.path for line in lines}) / 3600
        lines = some_of(lines, min(1.0, given.hours / whole))
    mel, rows, packed = LogMel(RATE, BANDS), list[dict[str, Any]](), list[bytes]()
    for line in lines:
        first, last = round(line.begin * RATE), None if line.end is None else round(line.end * RATE)
        wave, rate = soundfile.read(line.path, dtype="float32", start=first, stop=last)
        assert rate == RATE, f"{line.path}: expected {RATE} Hz, got {rate}"
        if len(wave) < SHORTEST * RATE:
            continue
        made = pack(mel(torch.from_numpy(wave)[None])[0].numpy())
        rows.append({"speaker": line.speaker, "text": line.text, "frames": 2 * made.shape[1]})
        packed.append(made.tobytes())
    content = bz2.compress(b"".join(packed))
    (given.out / "voices.bz2").write_bytes(content)
    (given.out / "voices.json").write_text(json.dumps(rows), encoding="utf-8")
    hours = sum(row["frames"] for row in rows) / 360_000
    print(f"{len(rows)} lines, {hours:.2f} hours, {len(content) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

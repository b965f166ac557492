"""The voices of The Ur-Quan Masters as features, packed for a machine that cannot read audio.

    PYTHONPATH=src python evidence/packing/pack_voices.py --voices voice/3dovoice --texts content/base/comm \
        --out packed

takes the unpacked voices (`uqm-*-voice.uqm`, a zip file) and texts (`uqm-*-content.uqm`) of the game and cuts every
clip into its lines, which a file of times beside the clips tells. What comes out is `voices.json`, a row for every line
(speaker, text, frames), and its log-mel features at the clips' own 11,025 Hz in parts of some megabytes, rounded to
steps of 0.4 and compressed. `read_packed` reads them. The recordings are CC BY-NC-SA 2.5; do not give them away with
this library.
"""

from __future__ import annotations

import argparse
import bz2
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from affinear.models.speech import LogMel

RATE, BANDS = 11_025, 80
STEP, FLOOR = 0.4, -14.0  # of a rounded feature; whatever is quieter than the floor is silence
PART = 28 * 2**20  # bytes of a part, compressed, about
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


def pack(features: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Features (T, F) in steps, each as the difference to the frame before, band by band."""
    steps = np.clip(np.round((features - FLOOR) / STEP), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(np.diff(steps, axis=0, prepend=np.zeros_like(steps[:1])).T)


def unpack(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What `pack` rounded, (T, F): steps above the floor."""
    return np.cumsum(packed.T, axis=0, dtype=np.uint8)


def read_packed(folder: Path) -> tuple[list[dict[str, Any]], list[NDArray[np.uint8]]]:
    """All rows, and the features of each in steps: `FLOOR + STEP * features`."""
    rows: list[dict[str, Any]] = json.loads((folder / "voices.json").read_text(encoding="utf-8"))
    features: list[NDArray[np.uint8]] = []
    parts = sorted({row["part"] for row in rows})
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # bz2 lets other threads run
        contents = list(pool.map(bz2.decompress, [(folder / part).read_bytes() for part in parts]))
    for part, packed in zip(parts, contents, strict=True):
        content = np.frombuffer(packed, np.uint8)
        first = 0
        for row in (row for row in rows if row["part"] == part):
            size = row["frames"] * BANDS
            features.append(unpack(content[first : first + size].reshape(BANDS, -1)))
            first += size
    return rows, features


def main() -> None:
    """Cut, compute, compress and write."""
    import soundfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--voices", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    mel, rows = LogMel(RATE, BANDS), list[dict[str, Any]]()
    written, part, compressor = 0, 0, bz2.BZ2Compressor()
    file = (given.out / "voices-0.bz2").open("wb")
    for line in lines_of(given.voices, given.texts):
        wave, rate = soundfile.read(line.path, dtype="float32")
        assert rate == RATE, f"{line.path}: expected {RATE} Hz, got {rate}"
        first, last = round(line.begin * rate), None if line.end is None else round(line.end * rate)
        features = mel(torch.from_numpy(wave[first:last])[None])[0].numpy()
        if len(features) < 7:
            continue
        rows.append({"part": f"voices-{part}.bz2", "speaker": line.speaker, "text": line.text, "frames": len(features)})
        written += file.write(compressor.compress(pack(features).tobytes()))
        if written > PART:
            file.write(compressor.flush())
            file.close()
            print(f"{len(rows)} lines", flush=True)
            written, part, compressor = 0, part + 1, bz2.BZ2Compressor()
            file = (given.out / f"voices-{part}.bz2").open("wb")
    file.write(compressor.flush())
    file.close()
    (given.out / "voices.json").write_text(json.dumps(rows), encoding="utf-8")
    print(f"{len(rows)} lines, {sum(row['frames'] for row in rows) / 360_000:.2f} hours")


if __name__ == "__main__":
    main()

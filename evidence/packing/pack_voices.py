"""The voices of The Ur-Quan Masters as features, packed for a machine that cannot read audio.

    PYTHONPATH=src python evidence/packing/pack_voices.py --voices voice/3dovoice --texts content/base/comm \
        --out packed

takes the unpacked voices (`uqm-*-voice.uqm`, a zip file) and texts (`uqm-*-content.uqm`) of the game and cuts every
clip into its lines, which a file of times beside the clips tells. What comes out is `voices.json`, a row for every line
(speaker, text, frames), and `voices.webp`, a picture of the log-mel features at the clips' own 11,025 Hz: of every two
frames the mean, as a column of 40 grey pixels, all lines one behind the other in strips. At a `--quality` of 50 all
11.2 hours are about nine megabytes, and features are off by half a neper. `read_packed` reads them, and puts a frame
between any two. `--hours` takes some of the lines, the same share of every speaker's. The recordings are CC BY-NC-SA
2.5; do not give them away with this library.
"""

from __future__ import annotations

import argparse
import io
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
from PIL import Image

from affinear.models.speech import LogMel

RATE, BANDS = 11_025, 40
STEP, FLOOR = 24 / 255, -14.0  # of a feature that is read; whatever is quieter than the floor is silence
ACROSS = 8192  # frames of a strip of the picture
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


def halved(features: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Features (T, F) as (T / 2, F): means of two frames in steps above the floor."""
    pairs = features[: len(features) // 2 * 2].reshape(-1, 2, features.shape[1]).mean(axis=1)
    return np.clip(np.round((pairs - FLOOR) / STEP), 0, 255).astype(np.uint8)


def doubled(frames: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Twice as many frames (T, F): between any two their mean, and the last one twice."""
    after = np.concatenate([frames[1:], frames[-1:]])
    return np.stack([frames, ((frames.astype(np.uint16) + after) // 2).astype(np.uint8)], axis=1).reshape(-1, BANDS)


def pictured(frames: NDArray[np.uint8], quality: int) -> bytes:
    """Frames (T, F) as a picture: strips one below the other, the last one filled up with silence."""
    room = np.zeros((-(-len(frames) // ACROSS) * ACROSS, BANDS), np.uint8)
    room[: len(frames)] = frames
    strips = np.ascontiguousarray(room.reshape(-1, ACROSS, BANDS).transpose(0, 2, 1)).reshape(-1, ACROSS)
    file = io.BytesIO()
    Image.fromarray(strips).save(file, "WEBP", quality=quality, method=4)
    return file.getvalue()


def seen(picture: bytes) -> NDArray[np.uint8]:
    """All frames (T, F) of a picture, and the silence behind them."""
    with Image.open(io.BytesIO(picture)) as image:
        strips = np.asarray(image.convert("L"))
    return strips.reshape(-1, BANDS, ACROSS).transpose(0, 2, 1).reshape(-1, BANDS)


def read_packed(folder: Path) -> tuple[list[dict[str, Any]], list[NDArray[np.uint8]]]:
    """All rows, and the features of each in steps: `FLOOR + STEP * features`."""
    rows: list[dict[str, Any]] = json.loads((folder / "voices.json").read_text(encoding="utf-8"))
    frames, ends = seen((folder / "voices.webp").read_bytes()), np.cumsum([row["frames"] // 2 for row in rows])
    return rows, [doubled(part) for part in np.split(frames[: ends[-1]], ends[:-1])]


def write_packed(folder: Path, rows: list[dict[str, Any]], parts: list[NDArray[np.uint8]], quality: int) -> int:
    """Write rows and the halved features of each; say how many bytes they are."""
    folder.mkdir(parents=True, exist_ok=True)
    content = pictured(np.concatenate(parts), quality)
    (folder / "voices.webp").write_bytes(content)
    (folder / "voices.json").write_text(json.dumps(rows), encoding="utf-8")
    return len(content)


def main() -> None:
    """Cut, compute, compress and write."""
    import soundfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--voices", type=Path, required=True)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hours", type=float, help="about how many; all unless told")
    parser.add_argument("--quality", type=int, default=50, help="of the picture, to 100")
    given = parser.parse_args()
    lines = list(lines_of(given.voices, given.texts))
    if given.hours is not None:
        whole = sum(soundfile.info(path).duration for path in {line.path for line in lines}) / 3600
        lines = some_of(lines, min(1.0, given.hours / whole))
    mel, rows, packed = LogMel(RATE, BANDS), list[dict[str, Any]](), list[NDArray[np.uint8]]()
    for line in lines:
        first, last = round(line.begin * RATE), None if line.end is None else round(line.end * RATE)
        wave, rate = soundfile.read(line.path, dtype="float32", start=first, stop=last)
        assert rate == RATE, f"{line.path}: expected {RATE} Hz, got {rate}"
        if len(wave) < SHORTEST * RATE:
            continue
        packed.append(halved(mel(torch.from_numpy(wave)[None])[0].numpy()))
        rows.append({"speaker": line.speaker, "text": line.text, "frames": 2 * len(packed[-1])})
    size = write_packed(given.out, rows, packed, given.quality)
    hours = sum(row["frames"] for row in rows) / 360_000
    print(f"{len(rows)} lines, {hours:.2f} hours, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()

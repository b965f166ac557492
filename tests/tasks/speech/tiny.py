"""Speech, as small as it goes, for the contract of tasks."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np

MODEL = "conformer_small"
MODEL_ARGS: dict[str, Any] = {
    "dim": 16,
    "depth": 1,
    "num_heads": 2,
    "kernel_size": 5,
    "conv_norm": "layer",  # batch norms see half of a batch where two processes share it
    "dropout": 0.0,
}
CHANGES: dict[str, Any] = {
    "batch_size": 4,
    "batch_seconds": 3.0,  # so that some batches have empty places
    "sample_rate": 8000,
    "bands": 16,
    "band_width": 4,
    "ema_decay": 0.9,
    "test_batch": 2,
    "lr": 1e-3,
}
WITHOUT_CHANCE: dict[str, Any] = {"band_masks": 0, "time_masks": 0}
RATE = 8000


def data(folder: Path) -> str:
    """Write a data set, and say what `--data` takes."""
    random = np.random.default_rng()
    for half, count in (("train", 9), ("test", 3)):
        rows: list[str] = []
        for number in range(count):
            seconds = random.uniform(0.4, 1.2)
            text = "".join(random.choice(list("ab c"), size=6)).strip() or "a"
            write(folder / f"{half}{number}.wav", random.normal(0, 0.1, int(seconds * RATE)))
            rows.append(json.dumps({"audio": f"{half}{number}.wav", "text": text, "speaker": f"{number % 2}"}))
        (folder / f"{half}.jsonl").write_text("\n".join(rows))
    return str(folder)


def write(path: Path, samples: Any, rate: int = RATE, width: int = 2, channels: int = 1) -> Path:
    """A WAV file of numbers from -1 to 1; several channels follow each other sample by sample."""
    whole = np.clip(
        np.round(np.asarray(samples) * 2 ** (8 * width - 1)), -(2 ** (8 * width - 1)), 2 ** (8 * width - 1) - 1
    )
    content = (whole + 128).astype("u1") if width == 1 else whole.astype(f"<i{width}")
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(content.tobytes())
    return path


def wrong(folder: Path) -> str:
    """Write what is no data set, and say what `--data` would take."""
    (folder / "train.jsonl").write_text('{"audio": "a.wav"}')
    return str(folder)


def sources(folder: Path) -> tuple[list[str], list[str]]:
    """What predictions are asked about: what can be answered, and what cannot."""
    good = [str(write(folder / "silence.wav", np.zeros(4000))), str(write(folder / "one.wav", np.ones(1)))]
    (folder / "broken.wav").write_bytes(b"RIFF and then nothing")
    return good, [str(folder / "broken.wav"), str(folder / "absent.wav")]

"""Distilling a recogniser, as small as it goes, for the contract of tasks."""

from __future__ import annotations

import json
import os
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import WhisperConfig, WhisperForConditionalGeneration

from affinear.tasks.language.spelling import END, learnt

MODEL = "whisper"
MODEL_ARGS: dict[str, Any] = {}
CHANGES: dict[str, Any] = {
    "batch_size": 4,
    "window": 4,
    "sinks": 1,
    "ema_decay": 0.9,
    "test_batch": 2,
    "warmup_steps": 1,
}
RATE = 8000
SIZES: dict[str, Any] = {
    "num_mel_bins": 16,
    "max_source_positions": 50,  # a second
    "max_target_positions": 32,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "init_std": 0.4,  # a teacher that tells tokens apart has something to teach
}
BEGIN, TIMELESS = "<|startoftranscript|>", "<|notimestamps|>"


def data(folder: Path) -> str:
    """Write a data set and a teacher, and say what `--data` takes."""
    seed = os.environ.get("AFFINEAR_SEED")
    random = np.random.default_rng(None if seed is None else int(seed))
    if seed is not None:  # a test's own comes after what its file shares
        torch.manual_seed(int(seed))
    for half, count in (("train", 9), ("test", 3)):
        rows: list[str] = []
        for number in range(count):
            text = f"A{''.join(random.choice(list('Ab.'), size=number))}b c"  # each of another length, in tokens too
            write(folder / f"{half}{number}.wav", random.normal(0, 0.1, int(random.uniform(0.3, 0.85) * RATE)))
            rows.append(json.dumps({"audio": f"{half}{number}.wav", "text": text, "speaker": f"{number % 2}"}))
        (folder / f"{half}.jsonl").write_text("\n".join(rows))
    CHANGES["teacher"] = teacher(folder.parent / "teacher")
    return str(folder)


def write(path: Path, samples: Any, rate: int = RATE) -> Path:
    """A WAV file of numbers from -1 to 1."""
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))
        file.writeframes(np.clip(np.round(np.asarray(samples) * 2**15), -(2**15), 2**15 - 1).astype("<i2").tobytes())
    return path


def teacher(folder: Path, *more: str, **changes: Any) -> str:
    """Write a fresh Whisper with a tokenizer, as transformers would; `more` are tokens of its own."""
    tokenizer: Any = Tokenizer.from_str(learnt(iter(["a b c"]), 300).text)
    tokenizer.add_special_tokens([BEGIN, TIMELESS, *more])
    end, begin = tokenizer.token_to_id(END), tokenizer.token_to_id(BEGIN)
    ends = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end, "decoder_start_token_id": begin}
    config = WhisperConfig(vocab_size=tokenizer.get_vocab_size() + 3, **{**SIZES, **ends, **changes})
    network: Any = WhisperForConditionalGeneration(config)
    torch.nn.init.normal_(network.model.decoder.embed_positions.weight, std=0.4)
    network.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    return str(folder)


def wrong(folder: Path) -> str:
    """Write what is no data set, and say what `--data` would take."""
    (folder / "train.jsonl").write_text('{"audio": "a.wav"}')
    return str(folder)


def sources(folder: Path) -> tuple[list[str], list[str]]:
    """What predictions are asked about: what can be answered, and what cannot."""
    good = [str(write(folder / "silence.wav", np.zeros(4000))), str(write(folder / "one.wav", np.ones(1)))]
    (folder / "broken.wav").write_bytes(b"RIFF and then nothing")
    long = str(write(folder / "long.wav", np.zeros(9000)))
    return good, [str(folder / "broken.wav"), str(folder / "absent.wav"), long]

"""What a report shows of a network that hears: spectrograms, and below them what was said and heard, word by word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from ...train.page import Section, figure, png
from ..fewer import places
from .audio import CorruptAudio
from .decoding import greedy
from .hearing import Ear
from .metric import Errors, Step, align, compare
from .recordings import Recordings
from .text import Spelling

LOOKED_AT = 64  # test recordings, evenly among all, of which some are shown
SHOWN = 6
WIDTH, HEIGHT = 960, 120  # of a spectrogram on the page
STOPS = ((0, 0, 4), (81, 18, 124), (183, 55, 121), (252, 137, 97), (252, 253, 191))  # from quiet to loud
COLOURS = {"same": "inherit", "wrong": "var(--c5)", "missed": "var(--c4)", "extra": "var(--c1)"}


@dataclass(frozen=True)
class Shown:
    """A test recording, its features (T, F), and how what was heard goes with what was said."""

    name: str
    features: Tensor
    steps: Sequence[Step]
    errors: Errors


@torch.no_grad()
def sections(network: nn.Module, half: Recordings, ear: Ear, spelling: Spelling, device: torch.device) -> list[Section]:
    """Some test recordings, from those that were heard best to those that were heard worst."""
    seen: list[Shown] = []
    for index in places(len(half), LOOKED_AT):
        try:
            wave = half[index].to(device)
        except CorruptAudio:
            continue
        features, frames = ear(wave[None])
        logits, _ = network(features, frames)
        heard = spelling.decode(greedy(logits[0].argmax(dim=-1).tolist()))
        seen.append(shown(half.path(index), features[0], half.rows[index].text, heard))
    return best_to_worst(seen)


def shown(name: str, features: Tensor, said: str, heard: str) -> Shown:
    """A test recording with features (T, F), what was said in it and what was heard, both in plain words."""
    return Shown(name, features.cpu(), align(said.split(), heard.split()), compare(said, heard))


def best_to_worst(seen: Sequence[Shown]) -> list[Section]:
    """Some of the recordings that were looked at, in the order of their word errors; nothing where there are none."""
    if not seen:
        return []
    ordered = sorted(seen, key=lambda one: one.errors.numbers["wer"])
    chosen = [ordered[i] for i in sorted(set(np.linspace(0, len(ordered) - 1, SHOWN).astype(int).tolist()))]
    note = (
        f"Of {len(seen)} test recordings, from the one that was heard best to the one that was heard worst. Bands from "
        "low to high, and what was said above what was heard, word by word."
    )
    return [Section("What was heard", _key() + "".join(map(_row, chosen)), note)]


def spectrogram(features: NDArray[np.float32]) -> Image.Image:
    """Features (T, F) as a picture: time goes to the right, bands go up, what is loud is bright."""
    low, high = np.percentile(features, [2, 99.5])
    level = np.clip((features.T[::-1] - low) / max(high - low, 1e-6), 0, 1)
    place = np.linspace(0, 1, len(STOPS))
    pixels = np.stack([np.interp(level, place, [stop[i] for stop in STOPS]) for i in range(3)], axis=-1)
    image = Image.fromarray(pixels.round().astype(np.uint8))
    return image.resize((min(WIDTH, image.width), image.height))


def alignment(steps: Sequence[Step]) -> str:
    """Words that were said, and below each the one that was heard; a dash where there is none."""
    words = "".join(
        f'<span style="display: inline-block; margin: 0 .5rem .4rem 0; color: {COLOURS[step.kind]}" '
        f'title="{step.kind}">{escape(step.said or "-")}<br>{escape(step.heard or "-")}</span>'
        for step in steps
    )
    return f"<p>{words}</p>"


def _row(one: Shown) -> str:
    numbers = one.errors.numbers
    name = one.name.replace("\\", "/").rpartition("/")[2]
    caption = f"{name}; {len(one.features) / 100:.1f} s, WER {numbers['wer']:.0%}, CER {numbers['cer']:.0%}"
    picture = png(spectrogram(one.features.numpy()))
    shown = figure(picture, caption, alt=f"Spectrogram of {name}").replace(
        "<img ", f'<img style="width: 100%; height: {HEIGHT}px" ', 1
    )
    return shown + alignment(one.steps)


def _key() -> str:
    told = {"wrong": "another word was heard", "missed": "nothing was heard", "extra": "nothing was said"}
    items = "".join(f'<li style="color: {COLOURS[kind]}">{text}</li>' for kind, text in told.items())
    return f'<ul class="key">{items}</ul>'

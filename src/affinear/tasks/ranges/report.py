"""What a report shows of a network that judges sequences: those it is most wrong about."""

from __future__ import annotations

import math
from html import escape

import numpy as np
import torch
from PIL import Image
from torch import nn

from ...train.draws import Draw
from ...train.page import Section, cards, figure, png
from .listops import text_of
from .samples import Sequences
from .sequences import Ranges, Tokens

LOOKED_AT = 64  # sequences, evenly among all, from which the hardest are shown
SHOWN = 8
WIDTH = 160  # of a picture on the page
SIGNS = 400  # of a text


@torch.no_grad()
def sections(network: nn.Module, data: Ranges, length: int, device: torch.device) -> list[Section]:
    """The sequences, among some that it is judged by, whose class the network finds least likely."""
    split = data.held
    chosen = np.linspace(0, len(split) - 1, min(len(split), LOOKED_AT)).astype(int).tolist()
    batch = Sequences(split, length).__getitems__([Draw(index, 0) for index in chosen])
    found: list[tuple[float, int, str]] = []
    for row, index in enumerate(chosen):  # one at a time: a report is no place to run out of memory
        logits = network(batch.tokens[row : row + 1].long().to(device), batch.lengths[row : row + 1].to(device))
        shares = logits.float().softmax(-1)[0]
        label, guess = int(split.labels[index]), int(shares.argmax())
        told = f"{data.classes[label]} ({float(shares[label]):.0%}), taken for {data.classes[guess]}"
        found.append((float(shares[label]), index, told))
    hardest = sorted(found)[:SHOWN]
    shown = "".join(_shown(data, index, told) for _, index, told in hardest)
    if data.kind in ("image", "pathfinder"):
        shown = cards([_shown(data, index, told) for _, index, told in hardest])
    note = f"Of {len(chosen)} {split.title} sequences, those whose class the network finds least likely."
    return [Section("The hardest sequences", shown, note)]


def _shown(data: Ranges, index: int, told: str) -> str:
    rows = [column[index] for column in data.held.rows]
    if data.kind in ("image", "pathfinder"):
        return figure(png(picture(rows[0])), told, width=WIDTH)
    texts = [text_of(row[:SIGNS]) if data.kind == "listops" else _text(row[:SIGNS]) for row in rows]
    quoted = "".join(f"<p>{escape(text)}</p>" for text in texts)
    return f'<p class="note">{escape(told)}</p>{quoted}'


def _text(tokens: Tokens) -> str:
    text = tokens.tobytes().decode("utf-8", "replace")
    return "".join(sign if sign.isprintable() else " " for sign in text)


def picture(tokens: Tokens) -> Image.Image:
    """A square picture out of its pixels."""
    side = math.isqrt(len(tokens))
    return Image.fromarray(np.ascontiguousarray(tokens[: side * side].reshape(side, side)))

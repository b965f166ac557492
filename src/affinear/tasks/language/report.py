"""What a report shows of a language model: how it profits from what came before, and how it goes on."""

from __future__ import annotations

from html import escape

from torch import nn

from ...train.page import Section, table
from .generating import spoken
from .samples import Rows
from .scoring import Sums, perplexity
from .settings import Speaking
from .spelling import Spelling

SHOWN = 3  # texts
BEGIN, TOLD = 24, 64  # tokens of a prompt, and of what follows


def sections(network: nn.Module, spelling: Spelling, rows: Rows, sums: Sums) -> list[Section]:
    """Perplexity by position over some test rows, and texts that go on from their beginnings."""
    counts, losses, hits = sums.table.tolist()
    lines = [
        [f"{first} to {last - 1}", f"{int(n):,}", f"{perplexity(loss / n):.2f}", f"{hit / n:.1%}"]
        for first, last, n, loss, hit in zip(sums.edges, sums.edges[1:], counts, losses, hits, strict=False)
        if n
    ]
    note = f"Over {len(rows.tokens)} test rows: by how many tokens of its document, or of the row, came before."
    head = ["tokens before", "tokens", "perplexity", "likeliest was right"]
    shown = "".join(_text(network, spelling, row) for row in rows.tokens[:SHOWN].tolist())
    told = "The beginning of a test row, and how the network goes on: the likeliest token each time."
    return [Section("By position", table(head, lines), note), Section("How it goes on", shown, told)]


def _text(network: nn.Module, spelling: Spelling, row: list[int]) -> str:
    begin = [token for token in row if token != spelling.end][:BEGIN]
    if not begin:
        return ""
    prompt = spelling.decode(begin)
    if not spelling.encode([prompt])[0]:
        return ""
    said = "".join(spoken(network, spelling, prompt, Speaking(tokens=TOLD, temperature=0.0, top_k=None)))
    clean = ["".join(sign if sign.isprintable() else " " for sign in text) for text in (prompt, said)]
    return f"<p>{escape(clean[0])} <strong>{escape(clean[1])}</strong></p>"

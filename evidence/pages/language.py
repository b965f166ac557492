"""The page of language: perplexity, perplexity by position, and recall."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from pages.kinds import Cells, arms_of, compared, limits, origin, speed, spread

RECALL = (
    "Recall is that of two small layers after few steps, without rotary positions: what is learnt by then, not what "
    "would fit."
)
ROWS = (
    "Rows of text are taken as they are, in all arms alike: a document sees those that stand before it in its row, in "
    "training and when it is judged."
)
MAMBA = (
    "`mamba2` stands for the state space models: Mamba itself scans token by token without its own kernels. It has "
    "none either, but scans in products of matrices (`evidence/running/scan.py`): its time says nothing about kernels "
    "that are made for it."
)


def language_page(found: Mapping[str, Any], alone: Mapping[str, Any] | None) -> str:
    """Perplexity, perplexity by position, recall, and speed."""
    cells: Cells = found["cells"]
    text, recall = ([one for one in cells if one["kind"] == kind] for kind in ("text", "recall"))
    lines = ["# Language models, small", "", *limits(found)]
    lines += [
        f"One corpus, PubMed's abstracts{_seen(text)}; about 15M parameters; one recipe and one rate, tuned for no "
        "arm. A difference in perplexity here says nothing about 340M parameters and 15 billion tokens."
        + f" {RECALL}" * bool(recall)
        + f" {ROWS}" * bool(text)
        + f" {MAMBA}" * ("mamba2" in arms_of(cells)),
        "",
    ]
    if text:
        lines += ["## Perplexity on documents not seen", ""]
        lines += compared(text, "perplexity", "softmax", lambda value: value, "lower is better")
        lines += ["", "By how many tokens of its document came before, mean over seeds:", "", *_positions(text), ""]
    if recall:
        widths = sorted({one["width"] for one in recall})
        lines += ["## Associative recall, accuracy in percent by width of a head", ""]
        lines += [f"| arm | {' | '.join(map(str, widths))} |", "|---" * (len(widths) + 1) + "|"]
        for arm in arms_of(recall):
            mine = [one for one in recall if one["arm"] == arm]
            parts = [spread([100 * one["score"]["accuracy"] for one in mine if one["width"] == w]) for w in widths]
            lines.append(f"| {arm} | {' | '.join(parts)} |")
        lines.append("")
    return "\n".join(lines + speed(found, alone) + origin(found, "language.py"))


def _seen(cells: Cells) -> str:
    """How many tokens a training saw, and of how many."""
    if not cells or not cells[0].get("data"):
        return ""
    recipe, one = cells[0]["recipe"], cells[0]
    seen = recipe["steps"] * recipe["batch_size"] * one["settings"]["context"]
    return f", {seen / 1e6:.1f} million tokens seen in training, of {one['data']['train_tokens'] / 1e6:.1f} million"


def _positions(cells: Cells) -> list[str]:
    names = list(dict.fromkeys(name for one in cells for name in one["positions"]))
    lines = [f"| arm | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for arm in arms_of(cells):
        mine = [one["positions"] for one in cells if one["arm"] == arm]
        parts = [[one[name]["perplexity"] for one in mine if name in one] for name in names]
        lines.append(f"| {arm} | {' | '.join(f'{statistics.mean(p):.2f}' if p else '-' for p in parts)} |")
    return lines

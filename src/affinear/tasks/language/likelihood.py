"""How likely a network finds a continuation: the sum that tests of common sense are judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .network import IGNORED
from .spelling import Spelling

TOGETHER = 2**15  # tokens that are judged at once


@dataclass(frozen=True)
class Likelihood:
    """Of one continuation.

    Attributes:
        total: Its logarithm, in nats.
        greedy: Whether every token of it was the likeliest.
    """

    total: float
    greedy: bool


def tokens_of(spelling: Spelling, context: str, answer: str) -> tuple[list[int], int]:
    """The tokens of both, spelled together, after the token that begins a text; and how many are the context's.

    Spaces at the end of the context belong to the answer, as tokens begin with a space. Where a token goes from one
    into the other, the context is spelled by itself, and the answer is what the whole has beyond as many tokens, as
    lm-eval counts; at least one.
    """
    stripped = context.rstrip()
    context, answer = stripped, context[len(stripped) :] + answer
    whole, before = spelling.encode([context + answer])[0], spelling.encode([context])[0]
    before = before[: len(whole) - 1]
    return [spelling.end, *before, *whole[len(before) :]], 1 + len(before)


@torch.no_grad()
def likelihoods(
    network: nn.Module,
    spelling: Spelling,
    pairs: Sequence[tuple[str, str]],
    device: torch.device,
    longest: int | None = None,
) -> list[Likelihood]:
    """How likely each answer is after its context.

    Args:
        network: In evaluation mode: a `LanguageNetwork`, wrapped or not.
        spelling: Of its tokens.
        pairs: Contexts and answers.
        device: Where the network is.
        longest: The most tokens of both together; the context's beginning is cut off. None for all.
    """
    rows = [tokens_of(spelling, context, answer) for context, answer in pairs]
    if longest is not None:
        rows = [(ids[-longest - 1 :], max(1, known - max(0, len(ids) - longest - 1))) for ids, known in rows]
    order = sorted(range(len(rows)), key=lambda number: len(rows[number][0]))
    found: dict[int, Likelihood] = {}
    while order:
        size = max(1, TOGETHER // len(rows[order[-1]][0]))
        some, order = order[-size:], order[:-size]  # the longest first, which shows at once whether they fit
        for number, one in zip(some, _judged(network, [rows[n] for n in some], device, spelling.end), strict=True):
            found[number] = one
    return [found[number] for number in range(len(rows))]


def _judged(
    network: nn.Module, rows: Sequence[tuple[list[int], int]], device: torch.device, end: int
) -> list[Likelihood]:
    """Rows of tokens with padding behind them, which nothing before it sees."""
    width = max(len(ids) for ids, _ in rows) - 1
    tokens = torch.full((len(rows), width), end)
    targets = torch.full((len(rows), width), IGNORED)
    for number, (ids, known) in enumerate(rows):
        row = torch.tensor(ids)
        tokens[number, : len(ids) - 1] = row[:-1]
        targets[number, known - 1 : len(ids) - 1] = row[known:]
    losses, right = network(tokens.to(device), targets.to(device), None, each=True)
    asked = targets.to(device) != IGNORED
    totals, greedy = -(losses.double() * asked).sum(1), (right | ~asked).all(1)
    return [Likelihood(total, all_right) for total, all_right in zip(totals.tolist(), greedy.tolist(), strict=True)]

"""CTC's loss without a look at a length from the host, so that a training step can be a CUDA graph.

Paper: Connectionist Temporal Classification, ICML 2006. Every step of time is a few operations over all recordings and
all states at once; what comes before a state and what comes after it are found together, as the way back is the way
forward through everything reversed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NOWHERE = -1e30  # the logarithm of nothing: finite, so that differences of it are numbers
IMPOSSIBLE = -1e29  # what has less cannot be said in so few tokens


def ctc(logs: Tensor, counts: Tensor, pieces: Tensor, lengths: Tensor, blank: int = 0) -> Tensor:
    """The loss (B,) of each recording; 0, without a gradient, where its pieces do not fit into its tokens.

    Args:
        logs: (B, N, C), logarithms of probabilities at every token.
        counts: (B,), int64, tokens of each recording, 1 or more.
        pieces: (B, L), int64, what was said; whatever lies behind the end does not count.
        lengths: (B,), int64, pieces of each.
        blank: What is said between pieces.
    """
    states = torch.full((len(pieces), 2 * pieces.shape[1] + 1), blank, device=pieces.device, dtype=pieces.dtype)
    states[:, 1::2] = pieces
    last = 2 * lengths  # the last state: a blank
    beyond = torch.arange(states.shape[1], device=states.device) > last[:, None]
    # A path may leave a blank out between two pieces that differ.
    leaps = torch.zeros_like(beyond)
    leaps[:, 2:] = (states[:, 2:] != blank) & (states[:, 2:] != states[:, :-2]) & ~beyond[:, 2:]
    said = logs.gather(2, states[:, None].expand(-1, logs.shape[1], -1)).masked_fill(beyond[:, None], NOWHERE)
    return _Paths.apply(said, leaps, counts, last)  # pyright: ignore[reportReturnType]


class _Paths(torch.autograd.Function):
    """Minus the logarithm of the sum over all paths, (B,), of logarithms of states (B, N, S)."""

    @staticmethod
    def forward(ctx: Any, said: Tensor, leaps: Tensor, counts: Tensor, last: Tensor) -> Tensor:
        tokens, states = (_reversing(ends, size) for ends, size in ((counts - 1, said.shape[1]), (last, said.shape[2])))
        back = _turned(said, tokens, states)
        # Backwards, it is the state that a leap began at which may be reached by one.
        ahead = torch.cat((leaps[:, 2:], torch.zeros_like(leaps[:, :2])), dim=1).gather(1, states)
        begun, ended = _sums(torch.cat((said, back)), torch.cat((leaps, ahead))).chunk(2)
        whole = _at_the_end(begun, counts, last)
        ctx.save_for_backward(begun + _turned(ended, tokens, states) - said, whole, counts)
        return torch.where(whole > IMPOSSIBLE, -whole, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        through, whole, counts = ctx.saved_tensors
        share = (through - whole[:, None, None]).exp()  # of all paths, by token and state
        inside = torch.arange(share.shape[1], device=share.device) < counts[:, None]
        kept = inside[..., None] & (whole > IMPOSSIBLE)[:, None, None] & (through > IMPOSSIBLE)
        return -(grads[0][:, None, None] * share).masked_fill(~kept, 0), None, None, None


def _sums(said: Tensor, leaps: Tensor) -> Tensor:
    """The logarithm of the sum over all paths to each token and state, both included, (B, N, S)."""
    batch, count, states = said.shape
    closed = torch.where(leaps, 0.0, NOWHERE).to(said.dtype)
    # Two more states in front, which nothing ever reaches, so that every state has two before it.
    found = said.new_full((count, batch, states + 2), NOWHERE)
    found[0, :, 2:4] = said[:, 0, :2]
    for token in range(1, count):
        before = found[token - 1]
        near = torch.logaddexp(before[:, 2:], before[:, 1:-1])
        torch.add(torch.logaddexp(near, before[:, :-2] + closed), said[:, token], out=found[token, :, 2:])
    return found[..., 2:].transpose(0, 1)


def _reversing(ends: Tensor, size: int) -> Tensor:
    """Where each place comes from when the first `ends + 1` of `size` places are reversed, (B, size)."""
    places = torch.arange(size, device=ends.device)
    back = ends[:, None] - places
    return torch.where(back < 0, places, back)


def _turned(x: Tensor, tokens: Tensor, states: Tensor) -> Tensor:
    """Tokens and states (B, N, S) in these orders."""
    rows = torch.arange(len(x), device=x.device)[:, None, None]
    return x[rows, tokens[:, :, None], states[:, None]]


def _at_the_end(begun: Tensor, counts: Tensor, last: Tensor) -> Tensor:
    """Of all paths that end with the last piece or the blank behind it, (B,)."""
    rows = torch.arange(len(begun), device=begun.device)
    final = begun[rows, counts - 1]
    blank, piece = final[rows, last], final[rows, (last - 1).clamp(min=0)]
    return torch.where(last > 0, torch.logaddexp(blank, piece), blank)

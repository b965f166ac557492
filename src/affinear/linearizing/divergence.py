"""Divergence of one vocabulary's distribution from another's, a chunk of tokens at a time.

The logits of a batch of text are its largest tensor, and distilling has two of them. Here neither is ever whole: each
chunk is computed, its loss and its gradient taken, and forgotten. The gradient is found on the way forward, so that
no logit is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.precision import exact, widen

IGNORED = -100


def chunked_divergence(
    hidden: Tensor,
    weight: Tensor,
    target_hidden: Tensor,
    target_weight: Tensor,
    labels: Tensor,
    *,
    logits: float = 1.0,
    label: float = 0.0,
    temperature: float = 1.0,
    chunk: int = 2048,
) -> Tensor:
    """`logits` times the divergence from the teacher's distribution, and `label` times cross entropy; mean over tokens.

    Args:
        hidden: (..., C), the student's final features.
        weight: (V, C), of its head.
        target_hidden: (..., D), the teacher's.
        target_weight: (V, D), of its head.
        labels: (...), int64, the next tokens; tokens with -100 do not count at all.
        logits: What the divergence counts.
        label: What the cross entropy counts.
        temperature: Of both distributions in the divergence, which is multiplied with its square.
        chunk: Tokens taken together.

    Returns:
        The loss, a scalar in float32 (float64 for float64).

    Example:
        >>> import torch
        >>> from affinear.linearizing.divergence import chunked_divergence
        >>> hidden, weight, tokens = torch.randn(2, 5, 8), torch.randn(11, 8), torch.zeros(2, 5, dtype=torch.long)
        >>> abs(float(chunked_divergence(hidden, weight, hidden, weight, tokens))) < 1e-5
        True
    """
    if hidden.shape[:-1] != labels.shape or target_hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden: expected features beside labels of {tuple(labels.shape)}, got {tuple(hidden.shape)} and "
            f"{tuple(target_hidden.shape)}"
        )
    if weight.shape[0] != target_weight.shape[0]:
        raise ValueError(f"weight: expected one vocabulary, got {weight.shape[0]} and {target_weight.shape[0]} tokens")
    if not hidden.is_meta and torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with exact(hidden):
        loss: Any = _Divergence.apply(
            hidden, weight, target_hidden.detach(), target_weight.detach(), labels, (logits, label, temperature), chunk
        )
        return loss


class _Divergence(torch.autograd.Function):
    """The loss, with its gradients computed beside it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target_hidden: Tensor,
        target_weight: Tensor,
        labels: Tensor,
        counts: tuple[float, float, float],
        chunk: int,
    ) -> Tensor:
        ours, theirs, wanted = hidden.flatten(0, -2), target_hidden.flatten(0, -2), labels.flatten()
        total = (wanted != IGNORED).sum().clamp(min=1)
        asked: list[bool] = ctx.needs_input_grad
        d_hidden = torch.zeros_like(ours) if asked[0] else None
        d_weight = torch.zeros_like(widen(weight)) if asked[1] else None
        loss = widen(ours.new_zeros(()))
        for first in range(0, len(ours), chunk):
            part = slice(first, first + chunk)
            given = widen(ours[part] @ weight.mT)
            target = (theirs[part] @ target_weight.mT).to(given.dtype)
            losses, slope = _of_chunk(given, target, wanted[part], counts)
            loss = loss + losses / total
            rounded = slope.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = rounded @ weight
            if d_weight is not None:
                d_weight += rounded.mT @ ours[part]
        ctx.save_for_backward(d_hidden, d_weight, total)
        ctx.shape, ctx.dtype = hidden.shape, weight.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, total = ctx.saved_tensors
        by = grads[0] / total  # here, after float16's scale is on it: a slope over all tokens would vanish there
        return (
            None if d_hidden is None else (d_hidden * by.to(d_hidden.dtype)).view(ctx.shape),
            None if d_weight is None else (d_weight * by.to(d_weight.dtype)).to(ctx.dtype),
            None, None, None, None, None,
        )  # fmt: skip


def _of_chunk(
    given: Tensor, target: Tensor, wanted: Tensor, counts: tuple[float, float, float]
) -> tuple[Tensor, Tensor]:
    """The loss of some tokens, summed, and its slope by their logits, (T, V)."""
    by_logits, by_label, heat = counts
    there = wanted != IGNORED
    loss, slope = given.new_zeros(()), torch.zeros_like(given)
    if by_logits:
        log_q, log_p = (given / heat).log_softmax(-1), (target / heat).log_softmax(-1)
        p = log_p.exp()
        loss = loss + by_logits * heat**2 * ((p * (log_p - log_q)).sum(-1) * there).sum()
        slope += by_logits * heat * (log_q.exp_() - p)
    if by_label:
        log_q = given.log_softmax(-1)
        chosen = wanted.masked_fill(~there, 0)[:, None]
        loss = loss - by_label * (log_q.gather(1, chosen)[:, 0] * there).sum()
        slope += by_label * log_q.exp_()
        slope.scatter_add_(1, chosen, slope.new_full((len(wanted), 1), -by_label))
    return loss, slope * there[:, None]

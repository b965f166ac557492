"""Cross entropy of a vocabulary, a chunk of tokens at a time: the logits of a long text are never all in memory."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...ops.precision import exact, widen

IGNORED = -100


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    chunk: int = 2048,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """`F.cross_entropy(hidden @ weight.T + bias, targets)`, with at most `chunk` x V logits at once, backwards too.

    Logits have the dtype of the tokens, sums and the loss are float32 (float64 for float64). The backward pass makes
    the logits once more; the gradient of the weights is summed in float32.

    Args:
        hidden: (..., C), what the network makes of the tokens.
        weight: (V, C), of the head, in the same dtype (autocast casts both).
        targets: (...), int64, the token that each of them should have foretold: shifted already.
        bias: (V,), of the head.
        ignore_index: A target that costs nothing.
        chunk: Tokens taken together.
        reduction: "mean" over the targets that count, "sum", or "none" for the loss of each token, zero where ignored.

    Returns:
        The loss, or one for each token, (...).

    Raises:
        ValueError: If shapes do not fit, or a target is no token.

    Example:
        >>> import torch
        >>> from affinear.models.language import chunked_cross_entropy
        >>> hidden, weight = torch.randn(2, 10, 8), torch.randn(50, 8)
        >>> targets = torch.randint(50, (2, 10))
        >>> loss = chunked_cross_entropy(hidden, weight, targets, chunk=3)
        >>> logits = (hidden @ weight.T).flatten(0, 1)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(logits, targets.flatten()))
        True
    """
    _check(hidden, weight, targets, chunk, reduction)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    flat = targets.flatten()
    with exact(hidden):
        losses: Tensor = _Losses.apply(hidden.flatten(0, -2), weight, bias, flat, ignore_index, chunk)  # pyright: ignore
        if reduction == "none":
            return losses.view(targets.shape)
        if reduction == "sum":
            return losses.sum()
        return losses.sum() / (flat != ignore_index).sum()


class _Losses(torch.autograd.Function):
    """The loss of every token, zero where it is ignored."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignored: int, chunk: int
    ) -> Tensor:
        losses = widen(hidden.new_empty(hidden.shape[0]))
        levels = torch.empty_like(losses)
        for part in _parts(hidden.shape[0], chunk):
            logits = _logits(hidden[part], weight, bias)
            counts = targets[part] != ignored
            chosen = logits.gather(1, targets[part].masked_fill(~counts, 0)[:, None])[:, 0]
            levels[part] = logits.logsumexp(1)
            losses[part] = (levels[part] - chosen).masked_fill(~counts, 0)
        ctx.save_for_backward(hidden, weight, bias, targets, levels)
        ctx.ignored, ctx.chunk = ignored, chunk
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, levels = ctx.saved_tensors
        wanted: list[bool] = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight = torch.zeros_like(widen(weight)) if wanted[1] else None
        d_bias = torch.zeros_like(widen(bias)) if bias is not None and wanted[2] else None
        for part in _parts(hidden.shape[0], ctx.chunk):
            counts = targets[part] != ctx.ignored
            slope = (_logits(hidden[part], weight, bias) - levels[part][:, None]).exp_()
            rows = torch.arange(slope.shape[0], device=slope.device)
            slope[rows, targets[part].masked_fill(~counts, 0)] -= 1
            slope *= (grads[0][part] * counts)[:, None]
            if d_bias is not None:
                d_bias += slope.sum(0)
            rounded = slope.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = rounded @ weight
            if d_weight is not None:
                d_weight += rounded.mT @ hidden[part]
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None or bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In the dtype of sums."""
    logits = widen(hidden @ weight.mT)
    return logits if bias is None else logits + bias


def _parts(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, reduction: str) -> None:
    if hidden.shape[:-1] != targets.shape or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden: expected (..., C) beside targets (...) and a weight (V, C), got {tuple(hidden.shape)}, "
            f"{tuple(targets.shape)} and {tuple(weight.shape)}"
        )
    if chunk < 1:
        raise ValueError(f"chunk: expected a positive number of tokens, got {chunk}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")

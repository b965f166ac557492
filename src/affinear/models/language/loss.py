"""Cross entropy of a vocabulary, a chunk of tokens at a time: the logits of a long text are never all in memory."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ...ops.precision import exact, widen
from ...ops.sieve import can_be_read

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
        ValueError: If shapes do not fit, or a target is no token, which is looked at on a CPU alone.

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
    _check_targets(targets, ignore_index, weight.shape[0])
    if not hidden.is_meta and torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with exact(hidden):
        losses: Tensor = _Losses.apply(hidden, weight, bias, targets, ignore_index, chunk)  # pyright: ignore
        if reduction == "none":
            return losses
        return losses.sum() if reduction == "sum" else losses.sum() / (targets != ignore_index).sum()


class _Losses(torch.autograd.Function):
    """The loss of every token, zero where it is ignored."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignored: int, chunk: int
    ) -> Tensor:
        tokens, wanted = hidden.flatten(0, -2), targets.flatten()
        losses = widen(hidden.new_empty(targets.shape))
        flat, levels = losses.view(-1), torch.empty_like(losses).view(-1)
        for part in _parts(tokens.shape[0], chunk):
            logits = _logits(tokens[part], weight, bias)
            counts = wanted[part] != ignored
            chosen = logits.gather(1, wanted[part].masked_fill(~counts, 0)[:, None])[:, 0]
            levels[part] = logits.logsumexp(1)
            flat[part] = (levels[part] - chosen).masked_fill(~counts, 0)
        ctx.save_for_backward(hidden, weight, bias, wanted, levels)
        ctx.ignored, ctx.chunk = ignored, chunk
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, wanted, levels = ctx.saved_tensors
        tokens, grad = hidden.flatten(0, -2), grads[0].flatten()
        asked: list[bool] = ctx.needs_input_grad
        d_tokens = torch.empty_like(tokens) if asked[0] else None
        d_weight = torch.zeros_like(widen(weight)) if asked[1] else None
        d_bias = torch.zeros_like(widen(bias)) if bias is not None and asked[2] else None
        for part in _parts(tokens.shape[0], ctx.chunk):
            counts = wanted[part] != ctx.ignored
            slope = (_logits(tokens[part], weight, bias) - levels[part][:, None]).exp_()
            rows = torch.arange(slope.shape[0], device=slope.device)
            slope[rows, wanted[part].masked_fill(~counts, 0)] -= 1
            slope *= (grad[part] * counts)[:, None]
            if d_bias is not None:
                d_bias += slope.sum(0)
            rounded = slope.to(hidden.dtype)
            if d_tokens is not None:
                d_tokens[part] = rounded @ weight
            if d_weight is not None:
                d_weight += rounded.mT @ tokens[part]
        d_hidden = None if d_tokens is None else d_tokens.view(hidden.shape)
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


def _check_targets(targets: Tensor, ignored: int, vocabulary: int) -> None:
    if targets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"targets: expected tokens in int64, got {targets.dtype}; cast them")
    if can_be_read(targets):
        wrong = targets[(targets != ignored) & ((targets < 0) | (targets >= vocabulary))]
        if wrong.numel():
            raise ValueError(
                f"targets: expected tokens 0 to {vocabulary - 1}, or {ignored} where there is none, got "
                f"{int(wrong[0])}; the tokenizer is of another vocabulary"
            )

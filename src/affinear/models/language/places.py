"""Where tokens stand: positions, padding and documents, worked out once for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.rotary import Rotary
from ...ops.tracing import is_compiling
from .share import Share


@dataclass(frozen=True)
class Places:
    """What every layer needs to know of the tokens that it is given.

    Rotary positions are relative: moving all of a text's tokens changes nothing. So positions are columns, and padding
    before a text needs no others.

    Attributes:
        rotary: Cosines and sines, each (N, D); None without rotary positions.
        key_mask: (B, N), where there is a token; None where there is one everywhere.
        cu_seqlens: (S + 1,), where packed documents begin; None for a plain batch.
        since: (N,), how many tokens of its own document stand before each; None for a plain batch.
        seen: Columns before these.
        share: What of the text this rank has, where it lies over a mesh; `cu_seqlens` is then of all.
        whole_mask: (B, seen + N), the padding of all columns, for softmax layers that keep keys; None for none.
    """

    rotary: Rotary | None
    key_mask: Tensor | None
    cu_seqlens: Tensor | None
    since: Tensor | None
    seen: int
    share: Share | None = None
    whole_mask: Tensor | None = None


def place(
    tokens: Tensor,
    *,
    head_width: int,
    rope_theta: float | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    seen: int,
    share: Share | None = None,
) -> Places:
    """The places of tokens (B, N, C) that come after `seen` others, or are a share of a text over a mesh.

    Raises:
        ValueError: If mask, positions and documents do not fit the tokens, or each other.
    """
    mask = _mask(tokens, attention_mask, seen)
    if cu_seqlens is None and share is None:
        cu_seqlens = documents(tokens, position_ids, mask, seen)
    if cu_seqlens is not None:
        _check_documents(tokens, cu_seqlens, mask, seen)
    column = torch.arange(tokens.shape[1], device=tokens.device) + (seen if share is None else share.start)
    since = None
    if cu_seqlens is not None:
        since = column - cu_seqlens.long()[torch.searchsorted(cu_seqlens[1:], column.to(cu_seqlens.dtype), right=True)]
    rotary = None
    if rope_theta is not None:
        rotary = tables(column if since is None else since, head_width, rope_theta)
    return Places(rotary, mask, cu_seqlens, since, seen, share)


def tables(position: Tensor, width: int, base: float) -> Rotary:
    """Cosines and sines of positions (N,), each (N, D) in float32, as `affinear.ops.rotary_1d` has them."""
    # In float64: at a million tokens float32 would be off by a tenth of a radian.
    frequency = base ** -(torch.arange(0, width, 2, device=position.device, dtype=torch.float64) / width)
    angle = torch.outer(position.double(), frequency).repeat_interleave(2, dim=-1)
    return angle.cos().float(), angle.sin().float()


def _mask(tokens: Tensor, attention_mask: Tensor | None, seen: int) -> Tensor | None:
    """The columns of these tokens, as booleans; None where all are there."""
    if attention_mask is None:
        return None
    batch, length = tokens.shape[:2]
    if (
        attention_mask.ndim != 2
        or attention_mask.shape[0] != batch
        or attention_mask.shape[1] not in (length, seen + length)
    ):
        raise ValueError(
            f"attention_mask: expected padding, ({batch}, {length}) for the new tokens"
            + (f" or ({batch}, {seen + length}) for all" if seen else "")
            + f", got {tuple(attention_mask.shape)}"
        )
    mask = attention_mask[:, attention_mask.shape[1] - length :].to(torch.bool)
    return mask if is_compiling() or not bool(mask.all()) else None


def documents(tokens: Tensor, position_ids: Tensor | None, mask: Tensor | None = None, seen: int = 0) -> Tensor | None:
    """Where positions begin anew, as transformers tells packed documents, (S + 1,); None where they do not.

    Args:
        tokens: (B, N, ...), of which the shape matters.
        position_ids: (B, N) or (1, N).
        mask: (B, N), where there is a token; None for everywhere.
        seen: Columns before these.
    """
    length = tokens.shape[1]
    if position_ids is None or length == 1 or is_compiling():
        return None
    ids = position_ids if position_ids.ndim == 2 else position_ids[None]
    step = ids[:, 1:] - ids[:, :-1]
    begins = step != 1
    if mask is not None:  # padding has no position
        begins = begins & mask[:, 1:] & mask[:, :-1]
    if not bool(begins.any()):
        return None
    plain = tokens.shape[0] == 1 and mask is None and not seen
    starts = begins.nonzero()[:, 1] + 1
    if not plain or ids.shape != tokens.shape[:2] or bool((ids[0, starts] != ids[0, 0]).any()):
        raise ValueError(
            "position_ids: expected positions that count up, or, in a batch of one without padding and cache, begin "
            "anew with every document; got others, which rotary positions that are columns cannot follow"
        )
    ends = torch.tensor([0, length], device=ids.device)
    return torch.cat((ends[:1], starts, ends[1:]))


def _check_documents(tokens: Tensor, cu_seqlens: Tensor, mask: Tensor | None, seen: int) -> None:
    if tokens.shape[0] != 1:
        raise ValueError(
            f"cu_seqlens: expected documents packed into a batch of one, got a batch of {tokens.shape[0]}; flatten it"
        )
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens: expected (S + 1,), where documents begin and the last one ends, got {tuple(cu_seqlens.shape)}"
        )
    if mask is not None:
        raise ValueError("cu_seqlens: expected no padding beside packed documents, got an attention_mask; leave it out")
    if seen:
        raise ValueError(
            "cu_seqlens: expected no past_key_values beside packed documents; go on from one text at a time"
        )

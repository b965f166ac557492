"""Softmax attention, through torch's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import reference
from .mechanisms import Mechanism, find
from .packing import visibility
from .precision import widen
from .rotary import Rotary, rotate
from .sieve import can_be_read

TAME = 2.0**60  # up to here no product of two numbers, summed over a head, overflows float32
LOUD = 2.0**14  # scores from here on are rounded by 1e-3 and more in float32


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mechanism: Mechanism,
    scale: float,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    rotary: Rotary | None,
) -> Tensor:
    """Answers (B, N, H, E). Wild tokens, NaN or beyond all measure, do not reach the rows that do not see them."""

    def visible() -> Tensor:
        return visibility(query, key, causal, key_mask, cu_seqlens_q, cu_seqlens_k)

    seen = None if key_mask is None and cu_seqlens_k is None else visible()
    if seen is not None and cu_seqlens_k is None and not causal:
        seen = seen[:, :, :1]  # the same for all queries: of all pairs, it may have more entries than 32 bits can count

    def answer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.dtype == torch.float16 and query.device.type == "cpu":
            # Turned keys, and the gradients of scores, may be beyond 65504 where answers and gradients are not.
            query, key, value = widen(query), widen(key), widen(value)
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        return _answer(query, key, value, scale, seen, causal)

    def exact() -> Tensor:
        return reference.attention(
            query, key, value, mechanism=mechanism, scale=scale, causal=causal, key_mask=key_mask,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, rotary=rotary, initial_state=None, return_state=False,
        )[0]  # fmt: skip

    readable = all(map(can_be_read, (query, key, value)))
    if cu_seqlens_k is None and not causal:
        return answer(query, key, value)  # every row sees every token, wild or not
    if cu_seqlens_k is None and not readable:
        return _marked(answer, query, key, value, key_mask)
    return _apart(answer, exact if readable else None, query, key, value, visible)


def _marked(
    answer: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
) -> Tensor:
    """Causal answers without what is not finite; those that saw some of it are NaN. Nobody waits to learn whether."""
    # Zero, or NaN: of a query for its row, of a key for all rows from its own on, of a value in its channel.
    of_query, of_key = ((0 * x.detach()).sum(-1, keepdim=True) for x in (query, key))
    of_keys = of_key + 0 * value.detach()
    if key_mask is not None:
        shown = key_mask[:, :, None, None]
        of_keys = of_keys.masked_fill(~shown, 0)
        of_query = of_query.masked_fill(shown.cumsum(1) == 0, 0)
    of_keys = of_keys.cumsum(1)
    if query.shape[2] != key.shape[2]:
        of_keys = of_keys.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    out = answer(*(x.nan_to_num(0.0, 0.0, 0.0) for x in (query, key, value)))
    return out + (of_query + of_keys).to(out.dtype)


def _apart(
    answer: Callable[[Tensor, Tensor, Tensor], Tensor],
    exact: Callable[[], Tensor] | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Callable[[], Tensor],
) -> Tensor:
    """Answers without wild tokens; for the rows that see one, `exact` ones, or NaN where it is too late to choose."""
    limit = torch.finfo(query.dtype).max if exact is None else TAME
    wild_query, wild_key, wild_value = (~(x.detach().abs() <= limit).all(-1, keepdim=True) for x in (query, key, value))
    if exact is not None and not any(bool(wild.any()) for wild in (wild_query, wild_key, wild_value)):
        return answer(query, key, value)
    wild_key = wild_key | wild_value
    out = answer(query.masked_fill(wild_query, 0), key.masked_fill(wild_key, 0), value.masked_fill(wild_key, 0))
    seen = torch.einsum("bhnm,bmgo->bngo", visible().to(torch.float32), wild_key.to(torch.float32)) > 0
    seen = wild_query | seen.repeat_interleave(query.shape[2] // key.shape[2], dim=2)
    if exact is None:
        return out + torch.zeros_like(out).masked_fill(seen, torch.nan)
    return torch.where(seen, exact().to(out.dtype), out)


def _answer(query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None, causal: bool) -> Tensor:
    """Answers (B, N, H, E) to what `visible` (B or 1, 1, N or 1, M) says, or the flag where that says it all."""
    if _weights_are_kept(query, key, value, scale):
        with sdpa_kernel(SDPBackend.MATH):
            return _ask_torch(query, key, value, scale, visible, causal)
    return _ask_torch(query, key, value, scale, visible, causal)


def _weights_are_kept(query: Tensor, key: Tensor, value: Tensor, scale: float) -> bool:
    """Whether gradients need the very weights of the forward pass, and the memory for them.

    Fused attention makes them anew, from the scores and the logarithm of their sum, which it has rounded: rows of large
    scores would sum to anything.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))):
        return False
    if not (query.numel() and key.numel() and can_be_read(query) and can_be_read(key)):
        return False
    longest = [float(torch.linalg.vector_norm(x.detach(), dim=-1).amax()) for x in (query, key)]
    return abs(scale) * longest[0] * longest[1] > LOUD


def _ask_torch(query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None, causal: bool) -> Tensor:
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    grouped = True if query.shape[1] != key.shape[1] else False  # noqa: SIM210 - of traced sizes, a choice, not a symbol
    if visible is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)
    # A row that sees nothing is given everything, and its answer is then taken away: no NaN, no gradient.
    blind = ~visible.any(dim=-1, keepdim=True)
    key, value = (x.masked_fill(~visible.any(dim=-2)[..., None], 0) for x in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, visible | blind, scale=scale, enable_gqa=grouped)
    return out.masked_fill(blind, 0).transpose(1, 2)


def attend_latest(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Causal softmax of queries that are the latest of the keys, as where a cache has kept the earlier ones.

    Args:
        query: (B, N, H, D).
        key: (B, M, G, D), M at least N, G a divisor of H.
        value: (B, M, G, E).
        key_mask: (B, M), boolean. False takes a key out.
        scale: Factor of the scores; None is D ** -0.5.

    Returns:
        (B, N, H, E). A query that sees no key, as padding does, has an answer that nobody should read, and no NaN. On a
        CPU a token that is not finite does not reach the rows before it; elsewhere nobody waits to look for one.
    """
    if query.shape[1] == 1 or not any(can_be_read(x) and _is_wild(x) for x in (query, key, value)):
        return _latest(query, key, value, key_mask, scale)
    earlier = key.shape[1] - query.shape[1]
    whole = attention(
        F.pad(query, (0, 0, 0, 0, earlier, 0)), key, value, mechanism=find("softmax"),
        scale=query.shape[-1] ** -0.5 if scale is None else scale, causal=True, key_mask=key_mask,
        cu_seqlens_q=None, cu_seqlens_k=None, rotary=None,
    )  # fmt: skip
    return whole[:, earlier:]


def _is_wild(x: Tensor) -> bool:
    """Whether a number is NaN or beyond all measure."""
    return not bool((x.detach().abs() <= TAME).all())


def _latest(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scale: float | None) -> Tensor:
    tokens, keys = query.shape[1], key.shape[1]
    seen = None
    if tokens > 1 and (key_mask is not None or tokens != keys):
        seen = torch.ones(tokens, keys, dtype=torch.bool, device=query.device).tril(keys - tokens)[None]
    if key_mask is not None:
        seen = key_mask[:, None] if seen is None else seen & key_mask[:, None]
    if seen is not None:  # a row that sees nothing is shown everything
        seen = (seen | ~seen.any(-1, keepdim=True))[:, None]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(
        query, key, value, seen,
        is_causal=seen is None and tokens > 1, scale=scale, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2)

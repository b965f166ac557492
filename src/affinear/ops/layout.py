"""How tokens become matrices: heads before tokens, (B, H, N, D), and (B, H, T, C, D) in chunks.

Queries that share a key head lie side by side as rows of one matrix, so that grouped heads cost no copies of keys.
"""

from __future__ import annotations

from torch import Tensor

from .mechanisms import Mechanism
from .packing import Chunks, packed_chunks, plain_chunks
from .rotary import Rotary, rotate
from .tracing import is_compiling

CHUNK = 64  # tokens; scores within a chunk then cost as much as the states between chunks


def cut_into_chunks(x: Tensor, size: int, cu_seqlens: Tensor | None) -> Chunks:
    """Chunks of tokens (B, N, ...), shorter ones where there are few tokens."""
    length = x.shape[1]
    if not is_compiling() or length == 1:
        size = min(size, max(length, 1))
    if cu_seqlens is None:
        return plain_chunks(length, size, x.device)
    return packed_chunks(cu_seqlens, length, size)


def arrange_keys(
    key: Tensor,
    value: Tensor,
    mechanism: Mechanism,
    key_mask: Tensor | None,
    rotary: Rotary | None,
    chunks: Chunks | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Features of keys, their rotated twins, and values, all (B, H, N, ...) or (B, H, T, C, ...), zero where masked."""
    if key_mask is None:
        features = mechanism.key_map(key)
    else:
        # What is masked may hold anything, even NaN, which zero times would not remove.
        hidden = ~key_mask[..., None, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
        features = mechanism.key_map(key).masked_fill(hidden, 0)
    rotated = features if rotary is None else rotate(features, rotary)
    if chunks is None:
        features, value = features.transpose(1, 2), value.transpose(1, 2)
        return features, features if rotary is None else rotated.transpose(1, 2), value

    def split(x: Tensor) -> Tensor:
        return _split(x, chunks).movedim(3, 1).contiguous()

    features = split(features)
    return features, features if rotary is None else split(rotated), split(value)


def _split(x: Tensor, chunks: Chunks) -> Tensor:
    """Tokens in chunks, with nothing of a neighbour in the slots that a packed sequence leaves empty."""
    x = chunks.split(x)
    return x if chunks.packed is None else x.masked_fill(~chunks.filled[..., None, None], 0)


def arrange_queries(
    query: Tensor, mechanism: Mechanism, heads: int, rotary: Rotary | None, chunks: Chunks | None
) -> tuple[Tensor, Tensor]:
    """Features of queries and their rotated twins: (B, heads, G * N, F), or (B, heads, T, G * C, F)."""

    def arrange(x: Tensor) -> Tensor:
        x = x if chunks is None else _split(x, chunks)
        x = x.unflatten(-2, (heads, -1)).movedim((-3, -2), (1, -3))
        # One copy here saves one in every product.
        return x.contiguous().flatten(-3, -2)

    features = mechanism.query_map(query)
    if rotary is None:
        rows = arrange(features)
        return rows, rows
    return arrange(features), arrange(rotate(features, rotary))


def restore_tokens(rows: Tensor, group: int, chunks: Chunks | None) -> Tensor:
    """What `arrange_queries` arranged, back as (B, N, H, E)."""
    x = rows.unflatten(-2, (group, -1)).movedim((1, -3), (-3, -2)).flatten(-3, -2)
    return x if chunks is None else chunks.join(x)

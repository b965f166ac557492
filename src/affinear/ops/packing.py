"""Chunks of tokens: the layout in which causal and packed attention run without a loop over tokens or sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .tracing import is_compiling


def sequence_of_each_token(cu_seqlens: Tensor, length: int) -> Tensor:
    """Index of the sequence that each of the packed tokens belongs to, (N,)."""
    return torch.searchsorted(cu_seqlens[1:], torch.arange(length, device=cu_seqlens.device), right=True)


def visibility(
    query: Tensor,
    key: Tensor,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Tensor:
    """Which keys each query sees, (B or 1, 1, N, M), boolean."""
    visible = torch.ones(1, key.shape[1], dtype=torch.bool, device=key.device) if key_mask is None else key_mask
    visible = visible[:, None, None].expand(-1, -1, query.shape[1], -1)  # nothing is written out without need
    if causal:
        visible = visible.tril()
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        own = sequence_of_each_token(cu_seqlens_q, query.shape[1])
        visible = visible & (own[:, None] == sequence_of_each_token(cu_seqlens_k, key.shape[1]))
    return visible


@dataclass(frozen=True)
class Chunks:
    """How tokens lie in chunks of equal size. A chunk holds tokens of one sequence only; its end may be empty.

    Attributes:
        size: Tokens in a chunk, C.
        number: Chunks, T.
        length: Tokens, N.
        filled: Which slots hold a token, (T, C).
        full: Whether all are known to; never while tracing, where the length is any.
        packed: Where packed sequences lie, None for a plain batch.
    """

    size: int
    number: int
    length: int
    filled: Tensor
    full: bool
    packed: Packed | None

    def split(self, x: Tensor) -> Tensor:
        """(B, N, ...) -> (B, T, C, ...), with arbitrary finite numbers in empty slots."""
        if self.packed is None or self.length == 0:
            if not self.full:
                missing = self.number * self.size - self.length
                x = F.pad(x, [0, 0] * (x.ndim - 2) + [0, missing])
            return _cut(x, self.size)
        return x.index_select(1, self.packed.token.flatten()).unflatten(1, (self.number, self.size))

    def join(self, x: Tensor) -> Tensor:
        """(B, T, C, ...) -> (B, N, ...): what `split` did, undone."""
        x = x.flatten(1, 2)
        if self.packed is not None:
            return x.index_select(1, self.packed.slot)
        if is_compiling():
            return x.index_select(1, torch.arange(self.length, device=x.device))
        return x[:, : self.length]


@dataclass(frozen=True)
class Packed:
    """Where packed sequences lie among the chunks.

    Attributes:
        token: Token in each slot, (T, C); some token of the batch in an empty slot.
        slot: Slot of each token, (N,), counting through all chunks.
        sequence: Sequence of each chunk, (T,).
        first: First chunk of each chunk's sequence, (T,).
        last: Last chunk of each sequence, (S,); meaningless for an empty one.
        empty: Sequences without a token, (S,).
    """

    token: Tensor
    slot: Tensor
    sequence: Tensor
    first: Tensor
    last: Tensor
    empty: Tensor


def plain_chunks(length: int, size: int, device: torch.device) -> Chunks:
    """Chunks of a batch of sequences of one length; there is at least one."""
    # A traced length may be any: one chunk more than it could need keeps their number out of every condition.
    number = length // size + 2 if is_compiling() and length != 1 else max(-(-length // size), 1)
    filled = torch.arange(number * size, device=device) < length
    full = not is_compiling() and number * size == length
    return Chunks(size, number, length, _cut(filled[None], size)[0], full, None)


def _cut(x: Tensor, size: int) -> Tensor:
    """(B, T * C, ...) -> (B, T, C, ...), without asking a traced length to prove that it divides."""
    if is_compiling():
        return x.unfold(1, size, size).movedim(-1, 2)
    return x.unflatten(1, (-1, size))


def packed_chunks(cu_seqlens: Tensor, length: int, size: int) -> Chunks:
    """Chunks of packed sequences; as many as could be needed, so that nothing waits for the device to say how many."""
    device = cu_seqlens.device
    cu_seqlens = cu_seqlens.long()
    start, end = cu_seqlens[:-1], cu_seqlens[1:]
    needed = (end - start + size - 1) // size
    first_of_sequence = needed.cumsum(0) - needed
    number = length // size + start.shape[0]

    chunk = torch.arange(number, device=device)
    sequence = torch.searchsorted(needed.cumsum(0), chunk, right=True).clamp(max=start.shape[0] - 1)
    first = first_of_sequence[sequence]
    token = (start[sequence] + (chunk - first) * size)[:, None] + torch.arange(size, device=device)

    owner = sequence_of_each_token(cu_seqlens, length)
    slot = first_of_sequence[owner] * size + torch.arange(length, device=device) - start[owner]
    packed = Packed(
        token=token.clamp(max=max(length - 1, 0)),
        slot=slot,
        sequence=sequence,
        first=first,
        last=(first_of_sequence + needed - 1).clamp(min=0),
        empty=needed == 0,
    )
    return Chunks(size, number, length, token < end[sequence][:, None], full=False, packed=packed)

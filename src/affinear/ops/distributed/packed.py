"""Packed sequences over ranks: which of them lie here, and which lie on more than one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Side:
    """Queries or keys of packed sequences, told from all ranks' tokens. All on the host.

    Attributes:
        first: Rank of each sequence's first token, (S,).
        last: Rank of its last token, (S,); before `first` for an empty sequence.
        here: Tokens of each sequence on this rank, (S,).
    """

    first: Tensor
    last: Tensor
    here: Tensor


def locate(cu_seqlens: Tensor, lengths: Tensor, rank: int) -> Side:
    """Where sequences lie whose offsets run through the tokens of all ranks, of which each has its length."""
    offsets = cu_seqlens.long().cpu()
    start, end = offsets[:-1], offsets[1:]
    ends = lengths.cumsum(0)
    low, high = int(ends[rank] - lengths[rank]), int(ends[rank])
    first = torch.searchsorted(ends, start, right=True)
    last = torch.where(end > start, torch.searchsorted(ends, end - 1, right=True), first - 1)
    return Side(first, last, end.clamp(low, high) - start.clamp(low, high))


@dataclass(frozen=True)
class Plan:
    """What this rank does with packed sequences.

    Attributes:
        mine: Sequences with a token here, (L,), at least one.
        shared: Sequences on more than one rank, queries and keys taken together, (C,). The same on all ranks.
        number: Sequences in all, S.
        queries: The queries.
        keys: The keys.
    """

    mine: Tensor
    shared: Tensor
    number: int
    queries: Side
    keys: Side

    def offsets(self, side: Side, like: Tensor) -> Tensor:
        """Where the sequences of this rank begin among its tokens, (L + 1,)."""
        lengths = side.here[self.mine].cumsum(0)
        return torch.cat((lengths.new_zeros(1), lengths)).to(like)

    def rows(self, wanted: Tensor, device: torch.device) -> Tensor:
        """Where sequences stand among those of this rank, L for those that are not here."""
        place = torch.full((self.number,), self.mine.shape[0])
        place[self.mine] = torch.arange(self.mine.shape[0])
        return place[wanted].to(device)

    def with_shared(self, device: torch.device) -> Tensor:
        """For each sequence of this rank: its place among `shared`, counted from L on, or else its own."""
        place = torch.full((self.number,), -1)
        place[self.shared] = self.mine.shape[0] + torch.arange(self.shared.shape[0])
        own = torch.arange(self.mine.shape[0])
        return torch.where(place[self.mine] >= 0, place[self.mine], own).to(device)


def plan(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, lengths: Tensor, rank: int) -> Plan:
    """The plan for all ranks' numbers of queries and keys, (ranks, 2)."""
    queries, keys = (locate(cu, lengths[:, i], rank) for i, cu in enumerate((cu_seqlens_q, cu_seqlens_k)))
    far = lengths.shape[0]
    none_q, none_k = queries.last < queries.first, keys.last < keys.first
    first = torch.minimum(queries.first.masked_fill(none_q, far), keys.first.masked_fill(none_k, far))
    last = torch.maximum(queries.last.masked_fill(none_q, -1), keys.last.masked_fill(none_k, -1))
    mine = (queries.here + keys.here).nonzero().flatten()
    return Plan(
        mine=mine if mine.numel() else torch.zeros(1, dtype=torch.long),
        shared=(last > first).nonzero().flatten(),
        number=cu_seqlens_q.shape[0] - 1,
        queries=queries,
        keys=keys,
    )

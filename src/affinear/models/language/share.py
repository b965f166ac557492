"""A rank's share of a text that lies over a mesh: which tokens it has, and what it needs of its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.distributed.collectives import all_sum, shift
from ...ops.distributed.group import all_lengths
from .loss import IGNORED


@dataclass(frozen=True)
class Share:
    """Where the tokens of this rank stand in the text of all.

    Attributes:
        group: The ranks, in the order of their tokens.
        lengths: How many tokens each rank has.
    """

    group: dist.ProcessGroup
    lengths: tuple[int, ...]

    @property
    def start(self) -> int:
        """Tokens before this rank's."""
        return sum(self.lengths[: self.group.rank()])

    @property
    def is_last(self) -> bool:
        """Whether no rank comes after this one."""
        return self.group.rank() == self.group.size() - 1

    def tail_before(self, x: Tensor, size: int) -> Tensor:
        """The last `size` tokens of x (B, N, C) on the rank before, (B, size, C); zeros where there is none."""
        tail = x[:, max(x.shape[1] - size, 0) :]
        missing = size - tail.shape[1]  # on the last rank alone, whose tail nobody reads
        return shift(torch.nn.functional.pad(tail, (0, 0, missing, 0)), 1, self.group)

    def first_after(self, labels: Tensor) -> Tensor:
        """The first label of the next rank, (B, 1); -100 where there is none."""
        first = shift(labels[:, :1].contiguous(), -1, self.group)
        return torch.full_like(first, IGNORED) if self.is_last else first

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, with its gradient."""
        return all_sum(x, self.group)


def share_of(tokens: Tensor, group: dist.ProcessGroup, reach: int) -> Share:
    """This rank's share, after a look at all ranks' numbers of tokens.

    Args:
        tokens: (B, N, ...), of this rank.
        group: The ranks.
        reach: How many tokens before its own a rank's first token looks at, beside attention.

    Raises:
        ValueError: On every rank, if one has too few tokens.
    """
    lengths = tuple(int(x) for x in all_lengths(group, (tokens.shape[1],), tokens.device)[:, 0])
    for rank, length in enumerate(lengths):
        least = max(1, 0 if rank == len(lengths) - 1 else reach)
        if length < least:
            raise ValueError(
                f"input_ids: expected at least {least} tokens on every rank of the mesh, got {length} on rank {rank}; "
                "use fewer ranks for so short a text"
            )
    return Share(group, lengths)

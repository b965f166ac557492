"""DTensors taken as they are: their placements say which ranks share the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

TOKENS = 1  # the dimension that may be cut over ranks that have to talk
LOCAL = (0, 2)  # batch and heads: cut over ranks that have nothing to tell each other


@dataclass(frozen=True)
class Layout:
    """How DTensors (B, N, H, D) lie: `group` holds the ranks that share tokens, or is None where nobody does."""

    query: DTensor
    group: dist.ProcessGroup | None

    def wrap(self, out: Tensor) -> Tensor:
        """Answers of this rank, (B, N, H, E), as a DTensor that lies as the query does."""
        shape = torch.Size((*self.query.shape[:3], out.shape[3]))
        strides = [shape[1:].numel(), shape[2:].numel(), shape[3], 1]
        return DTensor.from_local(
            out.contiguous(), self.query.device_mesh, self.query.placements, shape=shape, stride=tuple(strides)
        )


def layout_of(**tokens: Tensor) -> Layout:
    """The layout that all tokens of a call have; the first of them names it."""
    (first, leader), *others = tokens.items()
    if not isinstance(leader, DTensor):
        raise ValueError(f"{first}: expected a DTensor beside DTensors, got a plain tensor; distribute all or none")
    for name, x in others:
        if not isinstance(x, DTensor):
            raise ValueError(f"{name}: expected a DTensor as {first} is, got a plain tensor; distribute all or none")
        if x.device_mesh != leader.device_mesh or x.placements != leader.placements:
            raise ValueError(
                f"{name}: expected the mesh and placements of {first}, {_told(leader)}, got {_told(x)}; "
                "redistribute one of them"
            )
    cut = [i for i, placement in enumerate(leader.placements) if placement == Shard(TOKENS)]
    fits = [p == Replicate() or (type(p) is Shard and p.dim in (*LOCAL, TOKENS)) for p in leader.placements]
    if len(cut) > 1 or not all(fits):
        raise ValueError(
            f"{first}: expected shards of the batch, the tokens (along one dimension of the mesh) or the heads, got "
            f"{_told(leader)}; redistribute it"
        )
    return Layout(leader, leader.device_mesh.get_group(cut[0]) if cut else None)


def local(x: Any) -> Any:
    """What this rank holds of a DTensor; anything else as it is."""
    return x.to_local() if isinstance(x, DTensor) else x


def _told(x: DTensor) -> str:
    return f"{tuple(map(str, x.placements))} on {tuple(x.device_mesh.shape)} ranks"

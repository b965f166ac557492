"""Summarize a data set that never fits: a folder of shards, any number of processes, one small file at the end.

    python examples/summarize_shards.py FOLDER --output whole.safetensors
    torchrun --nproc-per-node 4 examples/summarize_shards.py FOLDER --output whole.safetensors

Each shard, NAME.pt, holds a dictionary of `key` (B, M, H, D) and `value` (B, M, H, E), as torch.save writes it. Its
state is kept beside it as NAME.MECHANISM.safetensors, so that a run that was stopped goes on where it was. Shards are
read a piece at a time, so that one may be larger than the memory, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import reduce
from operator import add
from pathlib import Path

import torch
import torch.distributed as dist

import affinear as af

PIECE = 65536  # tokens looked at together


def state_of_shard(path: Path, mechanism: str) -> af.State:
    """The state of one shard, from its own file where that is there already."""
    kept = path.with_suffix(f".{mechanism}.safetensors")
    if kept.exists():
        return af.State.load(kept)
    shard = torch.load(path, mmap=True, weights_only=True)
    pieces = zip(shard["key"].split(PIECE, dim=1), shard["value"].split(PIECE, dim=1), strict=True)
    state = merged(af.summarize(key, value, mechanism) for key, value in pieces)
    state.save(kept)
    return state


def merged(states: Iterable[af.State]) -> af.State:
    """One state of many."""
    return reduce(add, states)


def nothing_of(path: Path, mechanism: str) -> af.State:
    """The state of none of a shard's tokens: what a process without a shard brings along."""
    shard = torch.load(path, mmap=True, weights_only=True)
    return af.summarize(shard["key"][:, :0], shard["value"][:, :0], mechanism)


def main() -> None:
    """Share the shards out, summarize, merge, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="folder of shards, *.pt")
    parser.add_argument("--output", type=Path, required=True, help="file for the state of all; it must not exist")
    parser.add_argument("--mechanism", default="mala", help="what makes the features")
    arguments = parser.parse_args()
    shards = sorted(arguments.folder.glob("*.pt"))
    if not shards:
        parser.error(f"{arguments.folder} holds no shard, *.pt")
    if arguments.output.exists():
        parser.error(f"{arguments.output} exists; remove it or choose another name")

    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = shards[rank::size]
    states = [state_of_shard(path, arguments.mechanism) for path in own]
    state = merged(states or [nothing_of(shards[0], arguments.mechanism)])
    if size > 1:
        state = state.all_reduce()
    if rank == 0:
        state.save(arguments.output)
        print(f"{len(shards)} shards, {int(state.count[0, 0])} tokens: {arguments.output}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

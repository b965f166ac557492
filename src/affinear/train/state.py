"""The state of a run's network and optimizer: taken out, and put back."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from .checkpoint import Position, Snapshot
from .devices import is_sharded
from .faults import OtherRun
from .kit import Kit


def snapshot(kit: Kit, position: Position) -> Snapshot:
    """Where a run stands, with all that it needs to go on. All processes have to ask together."""
    if is_sharded(kit.accelerator):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, optimizer = get_state_dict(kit.called, kit.optimizer.optimizer, options=options)
    else:
        weights, optimizer = kit.network.state_dict(), kit.optimizer.optimizer.state_dict()
    scaler = kit.accelerator.scaler
    rest = {"optimizer": optimizer, "scaler": None if scaler is None else scaler.state_dict()}
    average = None if kit.average is None else kit.average.module.state_dict()
    return Snapshot(position, weights, average, rest)


def load_into(kit: Kit, taken: Snapshot) -> Position:
    """Put everything back where it was, and say where the run stands.

    Raises:
        OtherRun: If the checkpoint is of another network.
    """
    try:
        _load(kit, taken)
    except Exception as error:  # what a checkpoint holds, anybody may have written
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise OtherRun(f"The checkpoint is of another network or recipe: {reason}") from None
    kit.schedule.step_update(taken.position.step)
    kit.work.skipped.absorb(taken.position.skipped)
    return taken.position


def _load(kit: Kit, taken: Snapshot) -> None:
    optimizer: dict[str, Any] = taken.rest["optimizer"]
    if is_sharded(kit.accelerator):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        set_state_dict(
            kit.called,
            kit.optimizer.optimizer,
            model_state_dict=dict(taken.weights),
            optim_state_dict=optimizer,
            options=options,
        )
    else:
        kit.network.load_state_dict(taken.weights)
        kit.optimizer.optimizer.load_state_dict(optimizer)
    if kit.accelerator.scaler is not None and taken.rest["scaler"] is not None:
        kit.accelerator.scaler.load_state_dict(taken.rest["scaler"])
    if (kit.average is None) != (taken.average is None):
        raise ValueError("one has averaged weights and the other has not")
    if kit.average is not None and taken.average is not None:
        kit.average.module.load_state_dict(taken.average)


def share_buffers(network: nn.Module) -> None:
    """Give every process the buffers of the first, as the statistics of batch norms, which each took of its batches."""
    for buffer in network.buffers():
        dist.broadcast(buffer.detach(), 0)

"""What a training step takes, one network alone on the machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from affinear.bench.timing import seconds_of


@dataclass(frozen=True)
class Alone:
    """What was measured.

    Attributes:
        seconds: Of a step, the median of the later two thirds.
        gigabytes: The most memory; 0 where nobody counts.
        parameters: Of the network.
    """

    seconds: float
    gigabytes: float
    parameters: int


def step_seconds(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Seconds of one step: the loss, its gradients, and the optimizer."""

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return seconds_of(step, device)


def alone(
    network: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batches: Iterable[Any], device: torch.device
) -> Alone:
    """Train on some batches with AdamW, in bfloat16 on a GPU.

    Args:
        network: In training mode, on the device.
        loss: Of a batch there.
        batches: Tuples of tensors, which are brought there before the clock starts.
        device: Where.
    """
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    for batch in batches:
        moved = type(batch)(*(part.to(device) for part in batch))

        def loss_of(moved: Any = moved) -> Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                return loss(network, moved)

        seconds.append(step_seconds(loss_of, optimizer, device))
    return Alone(
        statistics.median(seconds[len(seconds) // 3 :]),
        torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        sum(weight.numel() for weight in network.parameters()),
    )

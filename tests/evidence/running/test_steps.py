"""A network that is measured alone is trained step by step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Batch(NamedTuple):
    """What a step is taken on."""

    x: Tensor


def test_alone_takes_a_step_on_every_batch_and_counts_the_later_ones(script: Any):
    steps, network, seen = script("running.steps"), nn.Linear(3, 1), list[float]()
    before = network.weight.detach().clone()

    def loss(given: nn.Module, batch: Batch) -> Tensor:
        seen.append(float(batch.x[0, 0]))
        return given(batch.x).square().mean()

    batches = [Batch(torch.full((2, 3), float(number))) for number in range(1, 5)]
    found = steps.alone(network, loss, iter(batches), torch.device("cpu"))
    assert seen == [1, 2, 3, 4]
    assert found.seconds > 0
    assert (found.gigabytes, found.parameters) == (0.0, 4)
    assert not torch.equal(network.weight, before)
    assert network.weight.grad is None  # none is left for the next step

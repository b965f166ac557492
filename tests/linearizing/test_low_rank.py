"""Low-rank updates: they begin as nothing, learn alone, and are merged without a trace."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from affinear.linearizing.low_rank import add_low_rank, merge, parameters


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.GELU(), Conv1D(4, 10), nn.Linear(4, 3, bias=False)).double()


def test_an_update_begins_as_nothing_and_merging_keeps_what_it_learned():
    plain, x = network(), torch.randn(5, 6, dtype=torch.float64)
    updated = copy.deepcopy(plain)
    assert add_low_rank(updated, 2) == ["0", "2", "3"]
    assert torch.equal(updated(x), plain(x))
    for parameter in parameters(updated):
        nn.init.normal_(parameter)
    learned = updated(x)
    assert not torch.allclose(learned, plain(x))
    layer, was = cast(Any, updated[2]), cast(Any, plain[2])
    change = layer.low_rank_up @ layer.low_rank_down
    assert torch.linalg.matrix_rank(change) == 2
    assert merge(updated) == ["0", "2", "3"]
    torch.testing.assert_close(updated(x), learned)
    assert updated.state_dict().keys() == plain.state_dict().keys()
    assert [type(layer) for layer in updated] == [type(layer) for layer in plain]
    torch.testing.assert_close(cast(Any, updated[2]).weight - was.weight, change.mT)  # Conv1D has inputs first


def test_gradients_reach_both_factors_once_the_second_is_not_zero():
    updated = network()
    add_low_rank(updated, 3, ["0"])
    nn.init.normal_(cast(Any, updated[0]).low_rank_up)
    updated(torch.randn(4, 6, dtype=torch.float64)).square().sum().backward()
    assert all(float(parameter.grad.abs().sum()) > 0 for parameter in parameters(updated) if parameter.grad is not None)
    assert len(list(parameters(updated))) == 2


def test_what_cannot_be_is_told():
    with pytest.raises(ValueError, match=r"low_rank_on: expected names of linear layers such as 0, 2, 3, got \*\.q"):
        add_low_rank(network(), 2, ["*.q"])
    with pytest.raises(ValueError, match="rank of at least 1, got 0"):
        add_low_rank(network(), 0)

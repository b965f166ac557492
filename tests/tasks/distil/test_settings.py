"""What may be chosen of a student."""

from __future__ import annotations

import pytest
import torch

import affinear
from affinear.tasks.distil.settings import SwapSettings


def spelled(text: str) -> SwapSettings:
    """Settings with the mechanism as the command line spells it."""
    return SwapSettings(mechanism=SwapSettings.checks["mechanism"].read(text), window=8)


@pytest.mark.usefixtures("own_registry")
def test_a_mechanism_that_was_registered_later_can_be_taught():
    rule = affinear.Mechanism("squared", torch.square, torch.square, torch.ones_like, nonnegative=True, paper="none")
    affinear.register(rule)
    assert spelled("squared").choices().mechanism == "squared"


def test_a_window_alone_is_spelled_none():
    assert spelled("none").choices().mechanism == "none"


@pytest.mark.parametrize("name", ["softmax", "squared", "mela"])
def test_what_is_not_linear_or_not_there_is_refused(name: str):
    with pytest.raises(ValueError, match=r"mechanism: expected one of .*mala.*, or another that is registered"):
        spelled(name)

"""What may be chosen of a student."""

from __future__ import annotations

import pytest
import torch

import affinear
from affinear import tasks
from affinear.tasks.distil.settings import SwapSettings


def spelled(text: str) -> SwapSettings:
    """Settings with the mechanism as the command line spells it."""
    return SwapSettings(mechanism=SwapSettings.checks["mechanism"].read(text), window=8)


@pytest.mark.usefixtures("own_registry")
def test_a_mechanism_that_was_registered_later_can_be_taught():
    rule = affinear.Mechanism("squared", torch.square, torch.square, torch.ones_like, nonnegative=True, paper="none")
    affinear.register(rule)
    assert spelled("squared").choices().mechanism == "squared"


@pytest.mark.parametrize("task", ["distil", "distil_language", "distil_speech"])
def test_all_that_distil_have_two_stages_and_nothing_to_compare(task: str):
    found = tasks.find(task)
    assert [*found.recipes] == ["layers", "whole"]
    assert found.preset("any", None) == found.recipes["whole"]
    with pytest.raises(ValueError, match="layers, whole"):
        found.preset("any", "finetune")
    assert found.variants("any") == {"own": {}}
    assert found.variant("any", "own") == {}
    with pytest.raises(ValueError, match="variant: expected 'own', as the mechanism is a setting here, got 'mala'"):
        found.variant("any", "mala")


def test_a_window_alone_is_spelled_none():
    assert spelled("none").choices().mechanism == "none"


@pytest.mark.parametrize("name", ["softmax", "squared", "mela"])
def test_what_is_not_linear_or_not_there_is_refused(name: str):
    with pytest.raises(ValueError, match=r"mechanism: expected one of .*mala.*, or another that is registered"):
        spelled(name)

"""Where a run took place."""

from __future__ import annotations

import sys

import pytest
import torch

from affinear.bench.machine import describe


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/opt/bin/affinear", "bench", "ops", "--output", "my run.json"], "affinear bench ops --output 'my run.json'"),
        (["evidence/attention.py", "--part", "score"], "python evidence/attention.py --part score"),
    ],
)
def test_the_command_can_be_typed_again(monkeypatch: pytest.MonkeyPatch, arguments: list[str], command: str):
    monkeypatch.setattr(sys, "argv", arguments)
    assert describe(torch.device("cpu"))["command"] == command

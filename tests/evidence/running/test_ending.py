"""SIGTERM ends a process where its host is, after what the GPU was given."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch


@pytest.fixture
def ending(script: Any) -> Any:
    return script("running.ending")


def test_who_is_asked_to_end_leaves_in_order_and_waits_for_the_gpu(ending: Any, monkeypatch: pytest.MonkeyPatch):
    done, before = list[str](), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("the GPU is done"))

    def work() -> None:
        with ending.orderly():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                done.append("not ended")
            finally:
                os.kill(os.getpid(), signal.SIGTERM)  # asked again, it is in no greater hurry
                done.append("saved")

    with pytest.raises(SystemExit) as raised:
        work()
    assert raised.value.code == 128 + signal.SIGTERM
    assert done == ["saved", "the GPU is done"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_gpu_that_was_not_used_or_has_failed_is_not_waited_for(ending: Any, monkeypatch: pytest.MonkeyPatch):
    def fails() -> None:
        raise torch.AcceleratorError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    ending.settle()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    ending.settle()

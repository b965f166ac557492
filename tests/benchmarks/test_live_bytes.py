"""Bytes are counted as an allocator gives them out, with memory and without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from affinear.models.language import AffinearForCausalLM, preset

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def live_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield __import__("live_bytes").LiveBytes
    sys.modules.pop("live_bytes", None)


def most_allocated(work: Any) -> int:
    """The most bytes that torch's allocator had given out at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    events: list[Any] = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_counts_once_and_while_it_is_held(live_bytes: Any, device: str) -> None:
    size = int(torch.randint(1, 1000, ()))
    there = torch.zeros(size, device=device)
    with live_bytes([there]) as live:
        one = there + 1
        view, same = one[1:], there.view(-1, 1)
        assert live.now == 4 * size
        two = one * view[:1]
        assert live.now == 8 * size
        del one
        assert live.now == 8 * size  # held by its view
        del view
        assert live.now == 4 * size
    del two, same
    assert (live.now, live.most) == (0, 8 * size)


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("mechanism", ["mala", "nala"])
def test_a_step_without_memory_takes_what_the_allocator_gives_one(
    live_bytes: Any, mechanism: str, checkpointing: bool
) -> None:
    config = preset("small", mechanism=mechanism, vocab_size=300, hidden_size=64, intermediate_size=176)
    config.num_hidden_layers = 4

    def step(model: Any) -> None:
        tokens = torch.zeros(1, 512, dtype=torch.long, device=model.device)
        model(tokens, labels=tokens).loss.backward()

    models = [AffinearForCausalLM(config).train()]
    with torch.device("meta"):
        models.append(AffinearForCausalLM(config).train())
    for model in models:
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    given = most_allocated(lambda: step(models[0]))
    with live_bytes(models[1].parameters()) as live:
        step(models[1])
    assert live.most == pytest.approx(given, rel=0.01)

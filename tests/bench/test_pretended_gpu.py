"""The way a GPU is measured, walked through on a pretended one: what is called, in which order, and what comes out."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from affinear.bench import machine, measure, ops, timing
from affinear.bench.cases import FORWARD, Case, Shape, draw
from affinear.bench.contenders import Contender, ours
from affinear.bench.measure import Clock, Problem

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end.at - self.at)


class Graph:
    """Replays as a sleep of two milliseconds."""

    made: ClassVar[list[Graph]] = []

    def __init__(self) -> None:
        self.replays = 0
        Graph.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        time.sleep(0.002)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A pretended GPU with a cache of 1000 bytes, whose memory is as full as the test says."""
    memory = {"before": 0, "peak": 0}
    stream = SimpleNamespace(wait_stream=lambda other: None)
    properties = SimpleNamespace(L2_cache_size=1000, name="NVIDIA H200", total_memory=2**37)
    Graph.made.clear()
    pretended: dict[str, Any] = {
        "Event": Event,
        "CUDAGraph": Graph,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda side: contextlib.nullcontext(),
        "graph": lambda graph: contextlib.nullcontext(),
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "get_device_properties": lambda device: properties,
        "reset_peak_memory_stats": lambda device: None,
        "memory_allocated": lambda device: memory["before"],
        "max_memory_allocated": lambda device: memory["peak"],
    }
    for name, stand_in in pretended.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(measure, "draw", lambda case, device, seed: draw(case, CPU, seed))
    return memory


def test_inputs_rotate_until_four_caches_are_full():
    assert [timing.input_sets(size, GPU) for size in (10_000, 4000, 3999, 1000, 1)] == [1, 1, 2, 4, 32]


def test_a_graph_holds_one_call_over_every_set_and_time_is_per_call():
    seen: list[int] = []
    steps = [lambda number=number: seen.append(number) for number in range(4)]
    times = timing.time_graph(steps, GPU, 0.02)
    assert seen == [0, 1, 0, 1, 2, 3]  # two on the side stream, then all into the graph
    assert times.calls == 4
    assert 0.5 <= times.median < 3
    assert Graph.made[0].replays > times.samples


def test_a_step_that_ran_aside_becomes_a_graph_or_why_there_is_none(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    timing.run_aside([lambda: seen.append(1)])
    assert timing.capture_or_why(lambda: seen.append(2)) == (Graph.made[0], "")
    assert seen == [1, 2]  # nothing but the capture itself calls it

    def refused():
        raise RuntimeError("\noperation not permitted when stream is capturing\nand so on")

    assert timing.capture_or_why(refused) == (None, "operation not permitted when stream is capturing")
    with pytest.raises(RuntimeError, match="not permitted"):  # before a capture it is somebody's mistake
        timing.run_aside([refused])


def test_a_stream_that_is_given_is_the_one_that_waits_and_is_waited_for(monkeypatch: pytest.MonkeyPatch):
    waits: list[tuple[str, Any]] = []
    side = SimpleNamespace(wait_stream=lambda other: waits.append(("side", other)))
    current = SimpleNamespace(wait_stream=lambda other: waits.append(("current", other)))
    entered: list[Any] = []

    def entering(stream: Any) -> Any:
        entered.append(stream)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", entering)
    timing.run_aside([lambda: waits.append(("step", None))], side)  # pyright: ignore[reportArgumentType]
    assert waits == [("side", current), ("step", None), ("current", side)]
    assert entered == [side]


def test_peak_leaves_out_what_was_there_and_what_comes_back(gpu: dict[str, int]):
    gpu.update(before=1000, peak=1500)
    assert timing.peak_bytes(lambda: [torch.zeros(25)], GPU) == 400


def test_a_row_has_call_graph_and_peak(gpu: dict[str, int]):
    case = Case(Shape(1, 1, 8, 4), torch.float32)
    gpu.update(peak=8 * 4 * 4 + 96)
    row = Problem(case, Clock(GPU, 0.01)).measure("non-causal", ours(case, CPU, "torch"), FORWARD)
    assert row.status == "ok", row
    assert row.call is not None
    assert row.graph is not None
    assert row.graph.calls == 8  # sets of 512 bytes for four caches of 1000
    assert row.peak_percent == pytest.approx(100 * 96 / (4 * 128))


def test_what_cannot_be_captured_is_still_called(monkeypatch: pytest.MonkeyPatch):
    def refuse(graph: Graph):
        raise RuntimeError("operation not permitted when stream is capturing\nand so on")

    monkeypatch.setattr(torch.cuda, "graph", refuse)
    case = Case(Shape(1, 1, 8, 4), torch.float32)
    row = Problem(case, Clock(GPU, 0.01)).measure("non-causal", ours(case, CPU, "torch"), FORWARD)
    assert (row.status, row.graph) == ("ok", None)
    assert row.call is not None
    assert row.detail == "no graph: operation not permitted when stream is capturing"


def test_a_slow_call_gets_no_graph():
    def slow(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        time.sleep(0.025)
        return value

    case = Case(Shape(1, 1, 8, 4), torch.float32)
    row = Problem(case, Clock(GPU, 0.01)).measure("non-causal", Contender("slow", slow, exact=False), FORWARD)
    assert row.ms is not None
    assert row.ms > 20
    assert row.graph is None
    assert Graph.made == []


def test_the_card_is_described(monkeypatch: pytest.MonkeyPatch):
    described = machine.describe(GPU)
    assert (described["gpu"], described["gpu_memory_gib"]) == ("NVIDIA H200", 128.0)


def test_on_a_gpu_the_default_plan_is_the_one_of_the_bars(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan = ops.prepare()
    assert plan.clock.device == GPU
    assert plan.dtype == torch.bfloat16
    assert plan.full[0] == Shape(64, 1, 16384, 64)
    assert ops.prepare(hurry=True).lengths == (256, 2048, 16384)

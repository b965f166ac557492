"""How time is taken: medians of CUDA events around calls and around replayed graphs; a host clock without a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Step = Callable[[], Any]

MOST, FEWEST = 200, 3  # samples of one row
SLOW_MS = 20.0  # a call this long gains nothing from a graph, and is repeated only a few times
MOST_SETS = 32
HOST_CALLS = 20  # per sample, few enough for the GPU's queue never to make the host wait


@dataclass(frozen=True)
class Times:
    """What repeated measurements of one thing came to, in milliseconds per call.

    Attributes:
        median: The middle one.
        lower: A quarter are below.
        upper: A quarter are above.
        fastest: The smallest.
        slowest: The largest.
        samples: How many there were.
        calls: Calls in each sample.
    """

    median: float
    lower: float
    upper: float
    fastest: float
    slowest: float
    samples: int
    calls: int = 1


def collect(samples: Sequence[float], calls: int = 1) -> Times:
    """Median and spread of samples, each of so many calls.

    Examples:
        >>> collect([4.0, 2.0, 6.0], calls=2)
        Times(median=2.0, lower=1.5, upper=2.5, fastest=1.0, slowest=3.0, samples=3, calls=2)
    """
    each = sorted(sample / calls for sample in samples)
    lower, middle, upper = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
    return Times(middle, lower, upper, each[0], each[-1], len(each), calls)


def input_sets(set_bytes: int, device: torch.device) -> int:
    """Over how many sets of inputs to rotate, so that none is still in the cache when its turn comes."""
    if device.type != "cuda":
        return 1
    wanted = 4 * torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST_SETS, -(-wanted // max(1, set_bytes))))


def time_calls(steps: Sequence[Step], device: torch.device, seconds: float) -> Times:
    """Time plain calls, rotating over the steps.

    Args:
        steps: The same call over different inputs.
        device: Where they run.
        seconds: About how long to go on; a slow call is made three times nevertheless.

    Returns:
        Time per call: of the GPU with the waits for the host between kernels, or of the host without a GPU.
    """
    rough = _warm_up(steps, device, seconds)
    return _sample(steps, device, _repeats(rough, seconds))


def time_graph(steps: Sequence[Step], device: torch.device, seconds: float) -> Times:
    """Time all steps captured as one CUDA graph, per step.

    Args:
        steps: The same call over different inputs, warm already.
        device: A GPU.
        seconds: About how long to go on.

    Returns:
        Time per call, with next to nothing of the host in it.
    """
    graph, kept = _capture(steps)
    replays = [graph.replay]
    times = _sample(replays, device, _repeats(_warm_up(replays, device, seconds), seconds), calls=len(steps))
    del kept  # until here, so that every step wrote to memory of its own
    return times


def time_host(step: Step, device: torch.device, seconds: float) -> Times:
    """Time what one call costs the host: calls in a row, nobody waiting for the GPU inside the clock."""
    rough = _warm_up([step], device, seconds)
    samples: list[float] = []
    for _ in range(_repeats(rough * HOST_CALLS, seconds)):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            step()
        samples.append(1e3 * (time.perf_counter() - start))
    synchronize(device)
    return collect(samples, HOST_CALLS)


def time_once(step: Step, device: torch.device) -> float:
    """Milliseconds of one call until its result is there, with all that a first call brings."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)


def peak_bytes(step: Callable[[], Sequence[torch.Tensor]], device: torch.device) -> int | None:
    """Bytes that a call held at its worst moment beyond what was there before and what it returns; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before - sum(x.nbytes for x in results)


def held_bytes(network: nn.Module, optimizer: torch.optim.Optimizer | None, inputs: Sequence[torch.Tensor]) -> int:
    """Bytes that are held between steps: weights, buffers, the optimizer's state and the inputs."""
    states = optimizer.state.values() if optimizer else ()
    kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(x.nbytes for x in (*network.parameters(), *network.buffers(), *inputs, *kept))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _warm_up(steps: Sequence[Step], device: torch.device, seconds: float) -> float:
    """Run every step, then go on until the clocks are up; returns a rough time of one call in milliseconds."""
    rough = time_once(steps[0], device)
    if rough > SLOW_MS:  # perhaps only because it was the first
        rough = time_once(steps[-1], device)
    if rough <= SLOW_MS:
        for step in steps:
            step()
    until = time.perf_counter() + min(0.02, seconds / 4)
    while rough <= SLOW_MS and time.perf_counter() < until:
        rough = min(rough, time_once(steps[0], device))
    return rough


def _repeats(rough_ms: float, seconds: float) -> int:
    return max(FEWEST, min(MOST, int(1e3 * seconds / max(rough_ms, 1e-6))))


def _sample(steps: Sequence[Step], device: torch.device, repeats: int, calls: int = 1) -> Times:
    turns = [steps[turn % len(steps)] for turn in range(repeats)]
    if device.type != "cuda":
        return collect([time_once(step, device) for step in turns], calls)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in turns]
    synchronize(device)
    for step, (start, end) in zip(turns, marks, strict=True):
        start.record()
        step()
        end.record()
    synchronize(device)
    return collect([start.elapsed_time(end) for start, end in marks], calls)


def _capture(steps: Sequence[Step]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    # Capture wants a warm-up on a side stream: what is set up there on first use may not be set up while capturing.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in steps[:2]:
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [step() for step in steps]
    return graph, kept

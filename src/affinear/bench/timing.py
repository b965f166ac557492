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
    run_aside(steps[:2])
    graph, kept = capture(steps)
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


def seconds_of(step: Step, device: torch.device) -> float:
    """Seconds of one call until its result is there, with all that a first call brings."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def time_once(step: Step, device: torch.device) -> float:
    """Milliseconds of one call, otherwise as `seconds_of`."""
    return 1e3 * seconds_of(step, device)


def in_turns(steps: Sequence[Step], device: torch.device, turns: int, warm: int = 1) -> list[float]:
    """Median seconds of each of several calls until its result is there, each call once in a turn.

    What the machine does meanwhile is done to all of them.

    Args:
        steps: The calls.
        device: Where they run.
        turns: How many count.
        warm: How many come before these.

    Examples:
        >>> one, other = in_turns([lambda: None, lambda: time.sleep(0.01)], torch.device("cpu"), turns=3)
        >>> one < other
        True
    """
    found: list[list[float]] = [[] for _ in steps]
    for turn in range(warm + turns):
        for step, times in zip(steps, found, strict=True):
            seconds = seconds_of(step, device)
            if turn >= warm:
                times.append(seconds)
    return [statistics.median(times) for times in found]


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


def run_aside(steps: Sequence[Step], side: torch.cuda.Stream | None = None) -> None:
    """Call steps on a side stream, as a capture wants it before: what is set up on first use may not be set up in one.

    Args:
        steps: In this order.
        side: The stream; a fresh one if none is given.
    """
    side = torch.cuda.Stream() if side is None else side
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for step in steps:
            step()
    torch.cuda.current_stream().wait_stream(side)


def capture(steps: Sequence[Step]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """Steps that ran aside before, as one CUDA graph, and what they returned: memory that every replay writes to.

    Raises:
        RuntimeError: If something in them cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [step() for step in steps]
    return graph, kept


def capture_or_why(step: Step) -> tuple[torch.cuda.CUDAGraph | None, str]:
    """A step that ran aside before as a CUDA graph; or None, and why there can be none, in a line."""
    try:
        graph, _ = capture([step])
    except RuntimeError as error:
        torch.cuda.synchronize()
        return None, str(error).strip().splitlines()[0]
    return graph, ""


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

"""Clocks give medians per call; on a GPU also graphs and peak memory."""

import pytest
import torch

from affinear.bench import timing

CPU = torch.device("cpu")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Clock:
    """Stands still but for those who sleep by it: what is measured does not depend on what else the machine does."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        """What it shows."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Later at once."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The one that everything is timed by."""
    found = Clock()
    monkeypatch.setattr(timing, "time", found)
    return found


def test_median_and_quartiles_are_per_call():
    times = timing.collect([10.0, 2.0, 4.0, 8.0, 6.0], calls=2)
    assert (times.fastest, times.lower, times.median, times.upper, times.slowest) == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert (times.samples, times.calls) == (5, 2)


def test_one_sample_is_its_own_spread():
    assert timing.collect([3.0]) == timing.Times(3.0, 3.0, 3.0, 3.0, 3.0, 1, 1)


def test_calls_are_timed_and_take_turns(clock: Clock):
    seen: list[int] = []

    def step(number: int):
        seen.append(number)
        clock.sleep(0.002)

    times = timing.time_calls([lambda: step(0), lambda: step(1)], CPU, 0.03)
    assert times.median == pytest.approx(2)
    assert times.samples >= 3
    assert {*seen} == {0, 1}


def test_a_slow_call_is_made_only_a_few_times(clock: Clock):
    seen: list[int] = []

    def step():
        seen.append(0)
        clock.sleep(0.03)

    times = timing.time_calls([step], CPU, 0.01)
    assert times.samples == 3
    assert len(seen) <= 5


def test_host_time_is_that_of_one_call(clock: Clock):
    times = timing.time_host(lambda: clock.sleep(0.0005), CPU, 0.02)
    assert times.calls == timing.HOST_CALLS
    assert times.median == pytest.approx(0.5)


def test_calls_are_measured_in_turns_and_the_first_turns_do_not_count(clock: Clock):
    seen: list[int] = []

    def step(number: int):
        seen.append(number)
        clock.sleep(0.05 if len(seen) <= 4 else 0.002 * number)

    none, some = timing.in_turns([lambda: step(0), lambda: step(1)], CPU, turns=3, warm=2)
    assert seen == [0, 1] * 5
    assert (none, some) == pytest.approx((0.0, 0.002))


def test_a_processor_has_no_graphs_no_peak_and_needs_one_set_of_inputs():
    assert timing.input_sets(10, CPU) == 1
    assert timing.peak_bytes(lambda: [torch.zeros(3)], CPU) is None


@gpu
def test_small_inputs_are_rotated_over_and_large_ones_are_not():
    device = torch.device("cuda")
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    assert timing.input_sets(cache, device) == 4
    assert timing.input_sets(100 * cache, device) == 1
    assert timing.input_sets(1, device) == timing.MOST_SETS


@gpu
def test_a_graph_of_several_calls_takes_as_long_per_call_as_a_call():
    device = torch.device("cuda")
    sets = [torch.randn(2**26, device=device) for _ in range(4)]
    steps = [lambda x=x: (2 * x,) for x in sets]
    call, graph = timing.time_calls(steps, device, 0.1), timing.time_graph(steps, device, 0.1)
    assert graph.calls == 4
    assert graph.median == pytest.approx(call.median, rel=0.3)


@gpu
def test_a_training_step_can_be_captured():
    device = torch.device("cuda")
    x = torch.randn(1000, 1000, device=device, requires_grad=True)
    grad = torch.randn_like(x)
    times = timing.time_graph([lambda: torch.autograd.grad((x @ x).relu(), x, grad)], device, 0.02)
    assert times.median > 0


@gpu
def test_peak_is_what_was_held_beyond_the_results():
    device = torch.device("cuda")
    x = torch.randn(2**20, device=device)

    def step():
        middle = x + 1
        return (middle * 2,)

    assert timing.peak_bytes(step, device) == x.nbytes

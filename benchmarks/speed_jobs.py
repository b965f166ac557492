"""What `speed.py` measures: every job gets ready in a process of its own, which takes minutes, and is then timed."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from typing import Any
from unittest import mock

import timm
import torch
from released_twin import twin
from torch import Tensor, nn
from torch._inductor import cudagraph_trees
from torch.nn import functional as F
from torch.profiler import ProfilerActivity

from affinear.bench import models, timing
from affinear.bench.cases import FORWARD, TRAINING, Case, Shape, draw
from affinear.bench.contenders import Contender, fla, ours, sdpa, step
from affinear.bench.machine import copy_bandwidth
from affinear.ops import add_norm
from affinear.ops.triton import convolving

Row = dict[str, Any]
Measure = Callable[[], Iterator[Row]]
GPU, BFLOAT16 = torch.device("cuda"), torch.bfloat16
SECONDS = 0.1  # of timing, for one row
BATCH, SIDE = 128, 224
STAGES = ((56, 64), (28, 128), (14, 256), (7, 512))  # side and channels of mavit_tiny at 224 pixels
DIRECTIONS = (FORWARD, TRAINING)
LONG, STAGE_3 = ("128,1,3136,64", "4,16,16384,128", "2,16,65536,96"), "128,3,196,64"
CAUSAL = ("8,16,4096,64", "8,16,4096,128", "4,16,16384,128")
COMPILED, GRAPHED, EAGER = "compiled", "graphed", "eager"
# Who, at what, how and on how many images.
NETWORKS = [
    *(
        (name, direction, way, 128)
        for way in (COMPILED, GRAPHED)
        for direction in ("inference", "training")
        for name in ("twin_tiny", "mavit_tiny")
    ),
    *((name, "inference", GRAPHED, 64) for name in ("twin_base", "mavit_base", "nalaformer_base")),
    *((name, "inference", EAGER, 128) for name in ("twin_tiny", "mavit_tiny")),
]


def jobs() -> dict[str, Callable[[], Measure]]:
    """Everything there is to measure, by name."""
    found: dict[str, Callable[[], Measure]] = {"copy": copy, "passes": passes, "sums": sums, "calls": calls}
    found |= {f"widths {shape}": lambda shape=shape: widths(shape) for shape in (STAGE_3, *LONG)}
    found |= {f"causal {shape}": lambda shape=shape: causal(shape) for shape in CAUSAL}
    found |= {" ".join(map(str, who)): lambda who=who: network(*who) for who in NETWORKS}
    found |= {" ".join(("profile", *map(str, who))): lambda who=who: kernels(*who) for who in NETWORKS}
    return found


def copy() -> Measure:
    """Bytes a second of a plain copy, which all shares are of."""

    def measure() -> Iterator[Row]:
        yield {"what": "copy", "gb_per_s": copy_bandwidth(GPU, 0.5, 2**32)[0]}

    return measure


def free() -> None:
    """Give back what memory is not in use: others need it while this waits for its turn."""
    gc.collect()
    torch.cuda.empty_cache()


def graph_ms(steps: Sequence[timing.Step]) -> float:
    """Median milliseconds of a step, replayed as a graph of all of them."""
    return timing.time_graph(steps, GPU, SECONDS).median


def attention_steps(case: Case, contender: Contender, direction: str) -> list[timing.Step]:
    """The same call over as many inputs as no cache holds."""
    sets = timing.input_sets(4 * case.tensor_bytes, GPU)
    return [step(contender, draw(case, GPU, seed), direction) for seed in range(sets)]


def attention_rows(table: str, contenders: Sequence[tuple[str, Case, Contender]]) -> Measure:
    """Rows of some contenders, each called once beforehand, forwards and backwards."""
    for _, case, contender in contenders:
        attention_steps(case, contender, TRAINING)[0]()
    free()

    def measure() -> Iterator[Row]:
        for name, case, contender in contenders:
            for direction in DIRECTIONS:
                row = {"what": table, "who": name, "shape": str(case.shape), "direction": direction}
                steps = attention_steps(case, contender, direction)
                yield {**row, "ms": graph_ms(steps), "gb": case.traffic(direction) / 1e9}
                del steps
                free()

    return measure


def widths(shape: str) -> Measure:
    """Full attention of one shape: plain, with rotary positions, with nala; SDPA where it is quick."""
    size = Shape.parse(shape)
    cases = {
        "mala": Case(size, BFLOAT16),
        "rotary": Case(size, BFLOAT16, rotary=True),
        "nala": Case(size, BFLOAT16, "nala"),
    }
    rivals = [(name, case, ours(case, GPU, "triton")) for name, case in cases.items()]
    if size.tokens <= 4096:
        rivals.append(("sdpa", cases["mala"], sdpa(cases["mala"])))
    return attention_rows("widths", rivals)


def causal(shape: str) -> Measure:
    """Causal attention beside fla's operator, which has no feature map, no means and no normaliser."""
    case = Case(Shape.parse(shape), BFLOAT16, causal=True)
    rivals = [("mala", case, ours(case, GPU, "triton"))]
    try:
        rivals.append(("fla", case, fla()))
    except ImportError:
        print(f"causal {shape}: fla cannot be imported, so it is left out", flush=True)
    return attention_rows("causal", rivals)


def calls() -> Measure:
    """Plain calls: from one to the next, nobody waiting in between, and until the result is there."""
    case = Case(Shape.parse(STAGE_3), BFLOAT16)
    made = [
        (name, direction, step(one, draw(case, GPU, 0), direction))
        for name, one in (("mala", ours(case, GPU, "auto")), ("sdpa", sdpa(case)))
        for direction in DIRECTIONS
    ]
    for _, _, call in made:
        call()

    def measure() -> Iterator[Row]:
        for turn in range(2):
            for name, direction, call in made:
                times = timing.time_host(call, GPU, 0.3)
                waited = timing.collect([timing.time_once(call, GPU) for _ in range(100)])
                row = {"what": "calls", "who": name, "shape": STAGE_3, "direction": direction, "turn": turn}
                yield {**row, "ms": times.median, "waited_ms": waited.median}

    return measure


def pass_steps(side: int, size: int, channels: int, who: str, direction: str) -> list[timing.Step]:
    """X + depthwise(x), by cuDNN and a sum, or in one pass, and its gradients."""
    shape = (BATCH, size, size, channels)
    sets = timing.input_sets(2 * BATCH * size * size * channels * 2, GPU)
    weight = torch.randn(channels, 1, side, side, device=GPU) / side
    bias = torch.randn(channels, device=GPU)
    narrow = weight.to(BFLOAT16).contiguous(memory_format=torch.channels_last), bias.to(BFLOAT16)

    def cudnn(x: Tensor, grad: Tensor) -> Sequence[Tensor]:
        training = direction == TRAINING
        leaves = x, w, b = [t.detach().requires_grad_(training) for t in (x.permute(0, 3, 1, 2), *narrow)]
        out = x + F.conv2d(x, w, b, padding=side // 2, groups=channels)
        return [out] if direction == FORWARD else torch.autograd.grad(out, leaves, grad.permute(0, 3, 1, 2))

    def one_pass(x: Tensor, grad: Tensor) -> Sequence[Tensor]:
        out = convolving.convolve(x, weight, bias, itself=True)
        if direction == FORWARD:
            return [out]
        grad_x = convolving.convolve(grad, weight, None, itself=True, flip=True)
        return [grad_x, *convolving.taps_gradient(grad, x, weight)]

    call = cudnn if who == "cudnn" else one_pass
    pairs = [[torch.randn(shape, device=GPU, dtype=BFLOAT16) for _ in range(2)] for _ in range(sets)]
    return [lambda pair=pair: call(*pair) for pair in pairs]


def passes() -> Measure:
    """Depthwise convolutions with the sum they feed, at the stages of mavit_tiny; its MLPs are 3.5 times as wide."""
    torch.backends.cudnn.benchmark = True
    cases = [
        (side, size, channels * wide // 2)
        for size, channels in STAGES
        for side, wide in ((3, 2), (5, 2), (3, 7))
    ]  # fmt: skip
    for case in cases:
        for who in ("cudnn", "ours"):
            for direction in DIRECTIONS:
                pass_steps(*case, who, direction)[0]()

    def measure() -> Iterator[Row]:
        for side, size, channels in cases:
            for direction in DIRECTIONS:
                for who in ("cudnn", "ours"):
                    steps = pass_steps(side, size, channels, who, direction)
                    shape = f"{BATCH},{size},{size},{channels}"
                    tensors = 2 if direction == FORWARD else 5
                    row = {"what": f"depthwise {side}x{side}", "who": who, "shape": shape, "direction": direction}
                    yield {**row, "ms": graph_ms(steps), "gb": tensors * 2 * BATCH * size * size * channels / 1e9}
                    del steps
                    torch.cuda.empty_cache()

    return measure


def sum_steps(size: int, channels: int, who: str, direction: str) -> list[timing.Step]:
    """A residual sum and its norm under autocast, by torch, by its compiler, or in one pass; and all gradients."""
    shape = (BATCH, size, size, channels)
    sets = timing.input_sets(4 * BATCH * size * size * channels * 2, GPU)
    weight, bias = (torch.randn(channels, device=GPU, requires_grad=True) for _ in range(2))
    call: Any = partial(add_norm, backend="triton" if who == "ours" else "torch")
    if who == "compiled":
        call = torch.compile(call, dynamic=False)

    def run(x: Tensor, other: Tensor, *grads: Tensor) -> Sequence[Tensor]:
        training = direction == TRAINING
        with torch.autocast("cuda", BFLOAT16), torch.set_grad_enabled(training):
            leaves = [t.detach().requires_grad_(training) for t in (x, other)]
            outs = call(*leaves, weight, bias)
        return torch.autograd.grad(outs, [*leaves, weight, bias], grads) if training else outs

    groups = [[torch.randn(shape, device=GPU, dtype=BFLOAT16) for _ in range(4)] for _ in range(sets)]
    return [lambda group=group: run(*group) for group in groups]


def sums() -> Measure:
    """Residual sums and their norms at the stages of mavit_tiny."""
    contenders = ("torch", "compiled", "ours")
    for stage, who, direction in product(STAGES, contenders, DIRECTIONS):
        sum_steps(*stage, who, direction)[0]()

    def measure() -> Iterator[Row]:
        for (size, channels), direction, who in product(STAGES, DIRECTIONS, contenders):
            steps = sum_steps(size, channels, who, direction)
            row = {"what": "sum + norm", "who": who, "shape": f"{BATCH},{size},{size},{channels}"}
            tensors = 4 if direction == FORWARD else 8
            gb = tensors * 2 * BATCH * size * size * channels / 1e9
            yield {**row, "direction": direction, "ms": graph_ms(steps), "gb": gb}
            del steps
            torch.cuda.empty_cache()

    return measure


def build(name: str) -> nn.Module:
    """One of ours, or the twin of a released one."""
    if name.startswith("twin_"):
        return twin(name.removeprefix("twin_"))
    return timm.create_model(name, num_classes=models.CLASSES)


@contextmanager
def unrecorded() -> Generator[None]:
    """Have compiled networks run without CUDA graphs, whose memory would be held until they are measured."""
    with mock.patch.object(cudagraph_trees, "is_cudagraph_capture_sizes", create=True, return_value=False):
        yield


@cache
def step_of(name: str, direction: str, way: str, batch: int) -> tuple[timing.Step, float]:
    """A step of a network, compiled but not recorded yet, and the seconds that the first ones took."""
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    net, images, labels, optimizer = placed(name, direction, batch)
    called = net if way == EAGER else models.compiled(net, graphed=way == GRAPHED)
    if direction == "inference":
        one = models.inference_step(called, images, BFLOAT16)
    else:
        one = models.training_step(called, optimizer, (images, labels), BFLOAT16)
    begun = time.perf_counter()
    with unrecorded():
        for _ in range(2):
            one()
        torch.cuda.synchronize()
    free()
    return one, time.perf_counter() - begun


@cache
def placed(name: str, direction: str, batch: int) -> tuple[nn.Module, Tensor, Tensor, torch.optim.Optimizer]:
    """A network on the GPU, what it learns from, and how; the same for all ways to call it."""
    net = build(name).to(GPU).train(direction == "training")
    net.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    images = torch.randn(batch, 3, SIDE, SIDE, device=GPU).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(models.CLASSES, (batch,), device=GPU)
    return net, images, labels, torch.optim.AdamW(net.parameters(), fused=True)


def network(name: str, direction: str, way: str, batch: int) -> Measure:
    """One network: time of a step, and of the host alone."""
    one, first = step_of(name, direction, way, batch)

    def measure() -> Iterator[Row]:
        for _ in range(2):  # records graphs
            one()
        row: Row = {"what": "network", "who": name, "direction": direction, "way": way, "batch": batch}
        for turn in range(2):
            for _ in range(3):
                one()
            times = timing.collect(models.sample(one, GPU, 25))
            speed = {"ms": times.median, "images_per_s": 1e3 * batch / times.median, "host_ms": host_ms(one)}
            yield {**row, "turn": turn, **speed, "first_s": first}

    return measure


def kernels(name: str, direction: str, way: str, batch: int) -> Measure:
    """One network: which kernels its time on the GPU goes to."""
    one, _ = step_of(name, direction, way, batch)

    def measure() -> Iterator[Row]:
        row: Row = {"what": "network", "who": name, "direction": direction, "way": way, "batch": batch}
        for _ in range(3):
            one()
        yield {**row, "turn": "profile", **profile(one)}

    return measure


def host_ms(one: timing.Step, steps: int = 9) -> float:
    """Median milliseconds that the host needs for a step, when it does not wait for the GPU.

    One at a time: a GPU takes about a thousand launches ahead, and a step of training has more of them than steps of
    inference, so that of several in a row the host would wait for the GPU to finish the first.
    """
    seen: list[float] = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        one()
        seen.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(seen)


def profile(one: Callable[[], object], steps: int = 3) -> Row:
    """What the GPU does in a step and all its kernels, and what the host does longest, in milliseconds."""
    longest = parts(one, steps, ProfilerActivity.CUDA)
    return {
        "gpu_ms": sum(kernel[0] for kernel in longest),
        "launches": sum(kernel[1] for kernel in longest),
        "kernels": longest,
        "host": parts(one, steps, ProfilerActivity.CPU)[:60],
    }


def parts(one: Callable[[], object], steps: int, activity: ProfilerActivity) -> list[tuple[float, float, str]]:
    """Milliseconds of a step, how often, and the name of all that the GPU or the host does, the longest first."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[activity]) as seen:
        for _ in range(steps):
            one()
        torch.cuda.synchronize()
    on_host = activity == ProfilerActivity.CPU
    found: list[tuple[float, float, str]] = [
        (
            (event.self_cpu_time_total if on_host else event.self_device_time_total) / steps / 1e3,
            event.count / steps,
            event.key[:90],
        )
        for event in seen.key_averages()
    ]
    return sorted((part for part in found if part[0] > 0), reverse=True)

"""What a detector's backbone and pyramid take for images of 800 x 1344, beside a twin of the released backbone.

PYTHONPATH=src:benchmarks python benchmarks/speed.py --kind detect_jobs --out detect-speed.json

Beside three others on 16 cores a compiled one was not ready after 54 seconds: leave `--ready` at two minutes or more.

Without a GPU it takes one image of 64 x 96, which only shows that everything runs; rows say of what size they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from released_twin import twin
from torch import Tensor, nn

from affinear.bench import models, timing
from affinear.models.detectors import DetectorSettings
from affinear.models.detectors.neck import Backbone

Row = dict[str, Any]
Measure = Callable[[], Iterator[Row]]
CUDA = torch.cuda.is_available()
GPU = torch.device("cuda" if CUDA else "cpu")
BATCH, HEIGHT, WIDTH = (8, 800, 1344) if CUDA else (1, 64, 96)
SETTINGS = DetectorSettings("mask_rcnn", norm="none")  # as the released detectors are
COMPILED, EAGER = "compiled", "eager"
WHO = ("twin_tiny", "mavit_tiny", "mavit_tiny_linear", "twin_small", "mavit_small", "mavit_small_linear")
OTHERS = ("swin_tiny_patch4_window7_224", "resnet50")


class TwinBackbone(nn.Module):
    """The plain twin of the released network under the same norms and pyramid."""

    def __init__(self, size: str) -> None:
        super().__init__()
        made = Backbone(f"mavit_{size}", SETTINGS)
        self.net, self.norms, self.neck = twin(size), made.features.norms, made.neck

    def forward(self, images: Tensor) -> list[Tensor]:
        """The levels, the finest first."""
        net: Any = self.net
        x: Tensor = net.patch_embed(images)
        maps: list[Tensor] = []
        for layer, norm in zip(net.layers, self.norms, strict=True):
            tables = layer.RoPE(x.shape[2], x.shape[3])
            for block in layer.blocks:
                x = block(x, tables)
            maps.append(norm(x))
            x = layer.downsample(x)
        return self.neck(maps, [None] * 5)


class Levels(nn.Module):
    """A backbone whose levels come as a list."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.backbone = Backbone(name, SETTINGS)

    def forward(self, images: Tensor) -> list[Tensor]:
        """The levels, the finest first."""
        return list(self.backbone(images).values())


def jobs() -> dict[str, Callable[[], Measure]]:
    """Everything there is to measure, by name."""
    plan = [(name, way) for way in (COMPILED, EAGER) for name in (*WHO, *OTHERS) if way == COMPILED or "tiny" in name]
    return {f"pyramid {name} {way}": lambda name=name, way=way: pyramid(name, way) for name, way in plan}


def build(name: str) -> nn.Module:
    """One of ours, one of others, or the twin of a released one."""
    return TwinBackbone(name.removeprefix("twin_")) if name.startswith("twin_") else Levels(name)


def pyramid(name: str, way: str) -> Measure:
    """Inference in bfloat16: milliseconds of a batch, images a second, and the peak of memory."""
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    network = build(name).to(GPU).eval().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    images = torch.randn(BATCH, 3, HEIGHT, WIDTH, device=GPU).contiguous(memory_format=torch.channels_last)
    called: Any = network if way == EAGER else models.compiled(network, graphed=False)

    def one() -> Sequence[Tensor]:
        with torch.inference_mode(), torch.autocast(GPU.type, torch.bfloat16):
            return called(images)

    begun = time.perf_counter()
    for _ in range(4):
        one()
    timing.synchronize(GPU)
    first = time.perf_counter() - begun
    if CUDA:
        torch.cuda.empty_cache()  # others need the memory while this waits for its turn
        torch.cuda.reset_peak_memory_stats()

    def measure() -> Iterator[Row]:
        row: Row = {"what": "pyramid", "who": name, "way": way, "batch": BATCH, "height": HEIGHT, "width": WIDTH}
        for turn in range(2):
            one()
            times = timing.collect(models.sample(one, GPU, 15))
            peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
            speed = 1e3 * BATCH / times.median
            yield {**row, "turn": turn, "ms": times.median, "images_per_s": speed, "peak_gib": peak, "first_s": first}

    return measure

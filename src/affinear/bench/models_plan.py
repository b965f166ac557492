"""Which networks are measured, beside which baseline, on images of which size, and how."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import timm
import torch

import affinear.models  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the networks with timm
from affinear.bench.measure import Clock

INFERENCE, TRAINING = "inference", "training"
DIRECTIONS = (INFERENCE, TRAINING)
EAGER, COMPILED, GRAPHED = "eager", "compiled", "graphed"
WAYS = (EAGER, COMPILED, GRAPHED)
CPU_WAYS = (EAGER, COMPILED)
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SECONDS, QUICK_SECONDS = 2.0, 0.02
TURNS, QUICK_TURNS = 5, 2

_DEIT_TINY, _DEIT_SMALL = "deit_tiny_patch16_224", "deit_small_patch16_224"
_SWIN_TINY, _SWIN_SMALL, _SWIN_BASE = (f"swin_{size}_patch4_window7_224" for size in ("tiny", "small", "base"))

# The softmax network of timm, of about as many parameters, that stands beside ours; linear twins have the same one.
COMPARED_WITH = {
    "mavit_tiny": _DEIT_SMALL,
    "mavit_small": _SWIN_TINY,
    "mavit_base": _SWIN_SMALL,
    "mavit_large": _SWIN_BASE,
    "nalaformer_xtiny": _DEIT_TINY,
    "nalaformer_tiny": _DEIT_SMALL,
    "nalaformer_small": _SWIN_TINY,
    "nalaformer_base": _SWIN_SMALL,
    "nalaformer_large": _SWIN_BASE,
    "inline_deit_tiny": _DEIT_TINY,
    "inline_deit_small": _DEIT_SMALL,
    "inline_deit_base": _DEIT_SMALL,
    "inline_pvt_tiny": "pvt_v2_b1",
    "inline_pvt_small": "pvt_v2_b2",
    "inline_pvt_medium": "pvt_v2_b3",
    "inline_pvt_large": "pvt_v2_b4",
    "inline_swin_tiny": _SWIN_TINY,
    "inline_swin_small": _SWIN_SMALL,
    "inline_swin_base": _SWIN_BASE,
    "inline_cswin_tiny": _SWIN_TINY,
    "inline_cswin_small": _SWIN_TINY,
    "inline_cswin_base": _SWIN_BASE,
    "ravlt_tiny": _DEIT_SMALL,
    "ravlt_small": _SWIN_TINY,
    "ravlt_base": _SWIN_SMALL,
    "ravlt_large": _SWIN_BASE,
    "rmt_tiny": _DEIT_SMALL,
    "rmt_small": _SWIN_TINY,
    "rmt_base": _SWIN_SMALL,
    "rmt_large": _SWIN_BASE,
    "secvit_tiny": _DEIT_SMALL,
    "secvit_small": _SWIN_TINY,
    "secvit_base": _SWIN_SMALL,
    "secvit_large": _SWIN_BASE,
    "mila_tiny": _SWIN_TINY,
    "mila_small": _SWIN_SMALL,
    "mila_base": _SWIN_BASE,
}
GPU_MODELS = (
    "mavit_tiny",
    "mavit_tiny_linear",
    "nalaformer_tiny",
    "inline_deit_tiny",
    "inline_pvt_small",
    "inline_swin_tiny",
    "inline_cswin_tiny",
)
CPU_MODELS = ("mavit_tiny", "mavit_tiny_linear", "inline_deit_tiny")
QUICK_MODELS = ("inline_deit_tiny",)


@dataclass(frozen=True)
class Images:
    """What a network is fed in one step.

    Attributes:
        height: Pixels.
        width: Pixels.
        batch: Images at once.

    Examples:
        >>> str(Images.parse("512x2048", batch=4))
        '4 images of 512x2048'
    """

    height: int
    width: int
    batch: int

    @staticmethod
    def parse(text: str, batch: int) -> Images:
        """Read HxW, or one side for both; anything else is a ValueError that says so."""
        found = re.fullmatch(r"\s*(\d+)\s*(?:[xX,]\s*(\d+)\s*)?", text)
        height, width = (0, 0) if found is None else (int(found[1]), int(found[2] or found[1]))
        if min(height, width) < 1:
            raise ValueError(
                f"size: expected a side such as 224, or HxW, height by width in pixels, such as 512x2048, got {text!r}"
            )
        return Images(height, width, batch)

    @property
    def size(self) -> str:
        """Height by width."""
        return f"{self.height}x{self.width}"

    def __str__(self) -> str:
        return f"{self.batch} images of {self.size}"


GPU_SIZES = (Images(224, 224, 128), Images(512, 2048, 4))
CPU_SIZES = (Images(224, 224, 2), Images(512, 2048, 1))
QUICK_SIZES = (Images(64, 64, 2),)


@dataclass(frozen=True)
class ModelPlan:
    """What is measured, and how.

    Attributes:
        clock: Where, and how long for a row.
        models: Names of networks; baselines come with them.
        sizes: What they are fed.
        directions: Inference, a training step, or both.
        ways: Eager, compiled, or graphed: compiled, and replayed as CUDA graphs, which spares the host its launches.
        dtype: Of autocast; float32 is without it.
        channels_last: Whether weights of convolutions and images have their channels last in memory.
        turns: How often networks that are compared take turns, so that a clock that drifts does so for all.
    """

    clock: Clock
    models: tuple[str, ...]
    sizes: tuple[Images, ...]
    directions: tuple[str, ...]
    ways: tuple[str, ...]
    dtype: torch.dtype
    channels_last: bool
    turns: int = TURNS

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Networks that take turns: those of one baseline, and the baseline after the first of them.

        Examples:
            >>> prepare(["mavit_tiny", "inline_deit_tiny", "mavit_tiny_linear"]).groups[0]
            ('mavit_tiny', 'deit_small_patch16_224', 'mavit_tiny_linear')
        """
        groups: dict[str, list[str]] = {}
        for name in self.models:
            baseline = baseline_of(name)
            if baseline is not None:
                groups.setdefault(baseline, []).append(name)
        alone = [(name,) for name in self.models if baseline_of(name) is None and name not in groups]
        compared = [(names[0], baseline, *names[1:]) for baseline, names in groups.items()]
        return (*compared, *alone)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """What is measured at a time, in order."""
        return tuple(
            Cell(images, direction, way, names)
            for images in self.sizes
            for direction in self.directions
            for way in self.ways
            for names in self.groups
        )


@dataclass(frozen=True)
class Cell:
    """Networks that take turns at the same work.

    Attributes:
        images: What they are fed.
        direction: Inference or training.
        way: Eager, compiled or graphed.
        names: The networks.
    """

    images: Images
    direction: str
    way: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.direction}, {self.way}, {self.images}"


def baseline_of(name: str) -> str | None:
    """The softmax network that stands beside one of ours; None for a network that is not ours.

    Examples:
        >>> baseline_of("mavit_small_linear"), baseline_of("resnet50")
        ('swin_tiny_patch4_window7_224', None)
    """
    return COMPARED_WITH.get(name.removesuffix("_linear"))


def prepare(
    models: Sequence[str] = (),
    sizes: Sequence[str] = (),
    batch: Sequence[int] = (),
    dtype: str | None = None,
    compiled: bool | None = None,
    only: str | None = None,
    quick: bool = False,
    seconds: float | None = None,
    channels_last: bool | None = None,
) -> ModelPlan:
    """Turn what a user asks for into a plan.

    Args:
        models: Names that timm knows, ours among them; none are the default ones.
        sizes: Each HxW; none are the default ones.
        batch: Images at once: none for defaults, one for all sizes, or one for each size.
        dtype: Of autocast. None is bfloat16 on a GPU and float32, which is without autocast, on a CPU.
        compiled: Whether networks are measured compiled too. None does so on a GPU unless in a hurry.
        only: Any of inference, training, eager, compiled, graphed, separated by commas.
        quick: Whether to do as little as still shows that everything works.
        seconds: About how long to measure one row.
        channels_last: The layout of convolutions and images in memory. None does so on a GPU.

    Returns:
        The plan, for a GPU where there is one.

    Raises:
        ValueError: If a name, a size or a number is not one.

    Examples:
        >>> plan = prepare(["mavit_tiny"], ["64x96"], [3], only="training,eager")
        >>> str(plan.sizes[0]), plan.directions, plan.ways
        ('3 images of 64x96', ('training',), ('eager',))
    """
    on_gpu = torch.cuda.is_available()
    plan = _default(on_gpu, quick)
    possible = WAYS if on_gpu else CPU_WAYS
    ways = plan.ways if compiled is None else possible if compiled else (EAGER,)
    directions, ways = _chosen(only, ways, compiled, on_gpu)
    return replace(
        plan,
        clock=Clock(plan.clock.device, plan.clock.seconds if seconds is None else _positive("seconds", seconds)),
        models=tuple(dict.fromkeys(_network(name.strip()) for name in models)) or plan.models,
        sizes=_sizes(plan.sizes, sizes, batch, on_gpu),
        directions=directions,
        ways=ways,
        dtype=plan.dtype if dtype is None else DTYPES[_known("dtype", dtype, tuple(DTYPES))],
        channels_last=plan.channels_last if channels_last is None else channels_last,
    )


def _default(on_gpu: bool, quick: bool) -> ModelPlan:
    device = torch.device("cuda" if on_gpu else "cpu")
    plan = ModelPlan(
        clock=Clock(device, SECONDS),
        models=GPU_MODELS if on_gpu else CPU_MODELS,
        sizes=GPU_SIZES if on_gpu else CPU_SIZES,
        directions=DIRECTIONS,
        ways=WAYS if on_gpu else (EAGER,),  # a processor compiles a network for a minute
        dtype=torch.bfloat16 if on_gpu else torch.float32,
        channels_last=on_gpu,
    )
    if not quick:
        return plan
    clock = Clock(device, QUICK_SECONDS)
    return replace(plan, clock=clock, models=QUICK_MODELS, sizes=QUICK_SIZES, ways=(EAGER,), turns=QUICK_TURNS)


def _chosen(
    only: str | None, ways: tuple[str, ...], compiled: bool | None, on_gpu: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if only is None:
        return DIRECTIONS, ways
    names = {_known("only", name.strip(), (*DIRECTIONS, *WAYS)) for name in only.split(",")}
    if compiled is False and names & {COMPILED, GRAPHED}:
        raise ValueError(
            f"only: expected no {COMPILED!r} or {GRAPHED!r} where compiled is False, got both; leave one of them out"
        )
    if GRAPHED in names and not on_gpu:
        raise ValueError(f"only: expected no {GRAPHED!r} without a GPU, got it; take {COMPILED!r}")
    directions = tuple(name for name in DIRECTIONS if name in names) or DIRECTIONS
    return directions, tuple(name for name in WAYS if name in names) or ways


def _sizes(default: tuple[Images, ...], sizes: Sequence[str], batch: Sequence[int], on_gpu: bool) -> tuple[Images, ...]:
    chosen = tuple(_with_usual_batch(Images.parse(text, 1), on_gpu) for text in sizes) or default
    if not batch:
        return chosen
    if len(batch) not in (1, len(chosen)):
        raise ValueError(
            f"batch: expected one number, or {len(chosen)}, one for each size, got {len(batch)}; "
            "give one, or as many as there are sizes"
        )
    counts = [int(_positive("batch", count)) for count in batch]
    counts = counts * len(chosen) if len(counts) == 1 else counts
    return tuple(replace(images, batch=count) for images, count in zip(chosen, counts, strict=True))


def _with_usual_batch(images: Images, on_gpu: bool) -> Images:
    """A default size has its own batch; another gets one of about as many pixels."""
    usual = GPU_SIZES if on_gpu else CPU_SIZES
    for known in usual:
        if known.size == images.size:
            return known
    most, pixels = usual[0].batch, usual[1].batch * usual[1].height * usual[1].width
    return replace(images, batch=max(1, min(most, pixels // (images.height * images.width))))


def _network(name: str) -> str:
    if timm.is_model(name):
        return name
    near = get_close_matches(name, timm.list_models(), n=3)
    hint = f"try {' or '.join(near)}" if near else "timm.list_models() has all names"
    raise ValueError(f"model: expected a name that timm or affinear.models registers, got {name!r}; {hint}")


def _positive(what: str, number: float) -> float:
    if not 0 < number < float("inf"):
        raise ValueError(f"{what}: expected a positive number, got {number!r}; give one above 0")
    return number


def _known(what: str, name: str, names: Sequence[str]) -> str:
    if name not in names:
        raise ValueError(f"{what}: expected one of {', '.join(names)}, got {name!r}; choose one of these")
    return name

"""What there is: every network with its size, its work, its stages and its published accuracy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..layers import NONE, LocalResidual
from ..listing import Entry
from ._pyramid import mechanisms_of

SIZES = ("xtiny", "tiny", "small", "medium", "base", "large")
FAMILIES = (
    "mavit",
    "nalaformer",
    "inline_deit",
    "inline_pvt",
    "inline_swin",
    "inline_cswin",
    "ravlt",
    "mila",
    "rmt",
    "secvit",
)

# ImageNet-1K top-1 in percent, as the papers and their repositories give it. The `_linear` twins are ours: nobody has
# trained them.
PUBLISHED = {
    "mavit_tiny": 82.9,
    "mavit_small": 84.7,
    "mavit_base": 85.7,
    "mavit_large": 86.0,
    "nalaformer_xtiny": 79.1,
    "nalaformer_tiny": 82.6,
    "nalaformer_small": 84.3,
    "nalaformer_base": 85.2,
    "nalaformer_large": 85.7,
    "inline_deit_tiny": 74.5,
    "inline_deit_small": 80.2,
    "inline_deit_base": 82.3,
    "inline_pvt_tiny": 78.2,
    "inline_pvt_small": 82.0,
    "inline_pvt_medium": 83.2,
    "inline_pvt_large": 83.6,
    "inline_swin_tiny": 82.4,
    "inline_swin_small": 83.6,
    "inline_swin_base": 84.1,
    "inline_cswin_tiny": 83.2,
    "inline_cswin_small": 83.8,
    "inline_cswin_base": 84.5,
    "ravlt_small": 84.4,
    "ravlt_base": 85.5,  # as MALA's paper quotes it; nobody else gives figures of the other two
    "mila_tiny": 83.5,
    "mila_small": 84.4,
    "mila_base": 85.3,
    "rmt_tiny": 82.4,
    "rmt_small": 84.1,
    "rmt_base": 85.0,
    "rmt_large": 85.5,
    "secvit_tiny": 82.6,
    "secvit_small": 84.2,
    "secvit_base": 85.0,
    "secvit_large": 85.6,
}

# What the papers compare with and timm has, as it has it: how it attends, published top-1, paper.
_EFFICIENTVIT = ("relu linear attention in two of four stages", "EfficientViT, arXiv:2205.14756")
_DEIT = ("softmax", "DeiT, arXiv:2012.12877")
_SWIN = ("softmax in windows", "Swin, arXiv:2103.14030")
_PVT = ("softmax over reduced maps", "PVTv2, arXiv:2106.13797")
_CONVNEXT = ("no attention", "ConvNeXt, arXiv:2201.03545")
OTHERS: dict[str, tuple[tuple[str, str], float]] = {
    "efficientvit_b1": (_EFFICIENTVIT, 79.4),
    "efficientvit_b2": (_EFFICIENTVIT, 82.1),
    "efficientvit_b3": (_EFFICIENTVIT, 83.5),
    "deit_tiny_patch16_224": (_DEIT, 72.2),
    "deit_small_patch16_224": (_DEIT, 79.8),
    "deit_base_patch16_224": (_DEIT, 81.8),
    "swin_tiny_patch4_window7_224": (_SWIN, 81.3),
    "swin_small_patch4_window7_224": (_SWIN, 83.0),
    "swin_base_patch4_window7_224": (_SWIN, 83.5),
    "pvt_v2_b0": (_PVT, 70.5),
    "pvt_v2_b1": (_PVT, 78.7),
    "pvt_v2_b2": (_PVT, 82.0),
    "pvt_v2_b3": (_PVT, 83.2),
    "pvt_v2_b4": (_PVT, 83.6),
    "pvt_v2_b5": (_PVT, 83.8),
    "convnext_tiny": (_CONVNEXT, 82.1),
    "convnext_small": (_CONVNEXT, 83.1),
    "convnext_base": (_CONVNEXT, 83.8),
}


def names(pattern: str = "*", others: bool = False) -> list[str]:
    """Registered names of all families that fit a pattern such as "mavit*", family by family, the smallest first.

    Args:
        pattern: As `timm.list_models` takes it.
        others: Whether to name timm's own networks that the papers compare with as well.

    Example:
        >>> from affinear.models.catalogue import names
        >>> names("mavit_tiny*")
        ['mavit_tiny', 'mavit_tiny_linear']
    """
    matching = set(timm.list_models(pattern))

    def place(name: str) -> tuple[str, int]:
        base = name.removesuffix("_linear")
        return name[len(base) :], SIZES.index(base.rpartition("_")[2])

    ours = [name for family in FAMILIES for name in sorted(timm.list_models(f"{family}_*"), key=place)]
    return [name for name in (*ours, *(OTHERS if others else ())) if name in matching]


def entries(pattern: str = "*", others: bool = False) -> Iterator[Entry]:
    """The networks that fit a pattern, and timm's own where they are asked for, counted anew; no weights are made.

    Example:
        >>> from affinear.models.catalogue import entries
        >>> entry, = entries("inline_deit_tiny")
        >>> entry.parameters, entry.stages
        (6477736, '12 linear')
    """
    for name in names(pattern, others):
        model = timm.create_model(name, device="meta").eval()
        config: dict[str, Any] = model.pretrained_cfg  # pyright: ignore[reportAssignmentType]
        (attends, paper), top1 = OTHERS.get(name, (("", ""), PUBLISHED.get(name)))
        yield Entry(
            name=name,
            size=config["input_size"][-1],
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            macs=count_macs(model, config["input_size"]),
            stages=attends or stages_of(model),
            top1=top1,
            paper=paper or f"{config['paper_name']}, {config['paper_ids']}",
            ours=name not in OTHERS,
        )


def count_macs(model: nn.Module, size: tuple[int, int, int]) -> int:
    """Multiply-adds for one image, of a network on the meta device: products, convolutions and local residuals."""
    taps = 0

    def count(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal taps
        taps += 9 * out.numel()

    hooks = [module.register_forward_hook(count) for module in model.modules() if isinstance(module, LocalResidual)]
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, *size, device="meta"))
    finally:
        for hook in hooks:
            hook.remove()
    return counter.get_total_flops() // 2 + taps


def stages_of(model: nn.Module) -> str:
    """Linear and softmax blocks, stage by stage, such as "2 linear, 2 linear, 6 softmax, 2 softmax"."""
    stages = getattr(model, "stages", None)
    return ", ".join(_blocks(stage) for stage in ([model] if stages is None else stages))


def _blocks(stage: nn.Module) -> str:
    found = mechanisms_of(stage)
    linear, none = sum(mechanism.gain is not None for mechanism in found), found.count(NONE)
    counts = {"linear": linear - none, "softmax": len(found) - linear, "without attention": none}
    return " + ".join(f"{count} {kind}" for kind, count in counts.items() if count)

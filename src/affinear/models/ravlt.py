"""RAVLT: the skeleton of MAViT around rank-augmented linear attention.

Paper: Breaking the Low-Rank Dilemma of Linear Attention, arXiv 2411.07635, CVPR 2025.

It differs from MAViT in the linear blocks, whose keys are weighed by how the mean query sees them, and in the width of
the head. The released networks are linear in the first two stages only, rotate features in the numerator but not in the
normaliser, and add 1e-6 to it; `linear_released` is that arithmetic, and the default, because their weights need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.models import generate_default_cfgs, register_model

from ..layers import RALA
from ..ops import Mechanism
from ._config import build, config
from .mavit import SIZES, MAViT


class RAVLT(MAViT):
    """RAVLT; arguments as of `MAViT`. `mechanism` is what takes the weighed keys of the linear blocks.

    Example:
        >>> import timm, torch
        >>> import affinear.models
        >>> model = timm.create_model("ravlt_tiny", num_classes=10, stage_types="llll", mechanism="linear").eval()
        >>> model(torch.randn(1, 3, 64, 96)).shape
        torch.Size([1, 10])
    """

    parts = RALA

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dims: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (1, 2, 4, 8),
        mlp_ratios: Sequence[float] = (3.5, 3.5, 3.5, 3.5),
        projection: int = 1024,
        stage_types: str = "llvv",
        mechanism: str | Mechanism = "linear_released",
        init_values: Sequence[float] = (1.0, 1.0, 1.0, 1.0),
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            embed_dims=embed_dims,
            depths=depths,
            num_heads=num_heads,
            mlp_ratios=mlp_ratios,
            projection=projection,
            stage_types=stage_types,
            mechanism=mechanism,
            init_values=init_values,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            device=device,
            dtype=dtype,
        )


default_cfgs = generate_default_cfgs(
    {
        f"ravlt_{size}{twin}": config(first_conv="stem.conv0", paper_name="RALA", paper_ids="arXiv:2411.07635")
        for size in SIZES
        for twin in ("", "_linear")
    }
)


def _build(variant: str, pretrained: bool, given: dict[str, Any]) -> RAVLT:
    _, size, *twin = variant.split("_")
    # The sizes are those of MAViT, but for the head, which is 1024 wide in all of them.
    own = {**SIZES[size], "projection": 1024, "stage_types": "llll" if twin else "llvv"}
    return build(RAVLT, variant, pretrained, own, given)


@register_model
def ravlt_tiny(pretrained: bool = False, **given: Any) -> RAVLT:
    """RAVLT-T, 15 million parameters."""
    return _build("ravlt_tiny", pretrained, given)


@register_model
def ravlt_small(pretrained: bool = False, **given: Any) -> RAVLT:
    """RAVLT-S, 26 million parameters."""
    return _build("ravlt_small", pretrained, given)


@register_model
def ravlt_base(pretrained: bool = False, **given: Any) -> RAVLT:
    """RAVLT-B, 48 million parameters."""
    return _build("ravlt_base", pretrained, given)


@register_model
def ravlt_large(pretrained: bool = False, **given: Any) -> RAVLT:
    """RAVLT-L, 95 million parameters."""
    return _build("ravlt_large", pretrained, given)


@register_model
def ravlt_tiny_linear(pretrained: bool = False, **given: Any) -> RAVLT:
    """RAVLT-T with every stage linear."""
    return _build("ravlt_tiny_linear", pretrained, given)


@register_model
def ravlt_small_linear(pretrained: bool = False, **given: Any) -> RAVLT:
    """RAVLT-S with every stage linear."""
    return _build("ravlt_small_linear", pretrained, given)


@register_model
def ravlt_base_linear(pretrained: bool = False, **given: Any) -> RAVLT:
    """RAVLT-B with every stage linear."""
    return _build("ravlt_base_linear", pretrained, given)


@register_model
def ravlt_large_linear(pretrained: bool = False, **given: Any) -> RAVLT:
    """RAVLT-L with every stage linear."""
    return _build("ravlt_large_linear", pretrained, given)

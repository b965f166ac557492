"""NaLaFormer: the skeleton of MAViT around norm-aware linear attention.

Paper: NaLaFormer, arXiv 2506.21137, ICML 2026.

It differs from MAViT in the attention (a norm and a SiLU gate), in a second position convolution, before the MLP, and
in the width of the head. The default mechanism is the released code's, `nala_released`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from timm.models import generate_default_cfgs, register_model
from torch import nn

from ..layers import NALA
from ..ops import Mechanism
from ._config import build, config
from .mavit import MAViT


class NaLaFormer(MAViT):
    """NaLaFormer; arguments as of `MAViT`, but one `mlp_ratio` for all stages.

    Example:
        >>> import timm, torch
        >>> import affinear.models
        >>> model = timm.create_model("nalaformer_xtiny", mechanism="nala", stage_types="llll").eval()
        >>> model(torch.randn(1, 3, 64, 96)).shape
        torch.Size([1, 1000])
    """

    parts = NALA
    second_position = True
    drawn = (nn.Conv2d,)  # as released: linear layers keep torch's own start

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        embed_dims: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (1, 2, 4, 8),
        mlp_ratio: float = 4.0,
        projection: int = 1024,
        stage_types: str = "llvv",
        mechanism: str | Mechanism = "nala_released",
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
            mlp_ratios=(mlp_ratio,) * len(depths),
            projection=projection,
            stage_types=stage_types,
            mechanism=mechanism,
            init_values=init_values,
            drop_rate=drop_rate,
            drop_path_rate=drop_path_rate,
            device=device,
            dtype=dtype,
        )


SIZES: dict[str, dict[str, Any]] = {
    "xtiny": {
        "embed_dims": (32, 64, 128, 384),
        "depths": (2, 2, 2, 2),
        "num_heads": (1, 2, 4, 12),
        "mlp_ratio": 3.5,
    },
    "tiny": {"embed_dims": (64, 128, 256, 512), "depths": (2, 2, 6, 2), "num_heads": (1, 2, 4, 8)},
    "small": {
        "embed_dims": (64, 128, 320, 512),
        "depths": (3, 5, 9, 3),
        "num_heads": (1, 2, 5, 8),
        "mlp_ratio": 3.5,
    },
    "base": {
        "embed_dims": (96, 192, 384, 512),
        "depths": (4, 6, 12, 6),
        "num_heads": (1, 2, 6, 8),
        "init_values": (1.0, 1.0, 1e-6, 1e-6),
    },
    "large": {
        "embed_dims": (96, 192, 448, 640),
        "depths": (4, 7, 19, 8),
        "num_heads": (1, 2, 7, 10),
        "mlp_ratio": 3.5,
        "init_values": (1e-6, 1e-6, 1e-6, 1e-6),
    },
}

default_cfgs = generate_default_cfgs(
    {
        f"nalaformer_{size}{twin}": config(
            first_conv="stem.conv0", paper_name="NaLaFormer", paper_ids="arXiv:2506.21137"
        )
        for size in SIZES
        for twin in ("", "_linear")
    }
)


def _build(variant: str, pretrained: bool, given: dict[str, Any]) -> NaLaFormer:
    _, size, *twin = variant.split("_")
    own = {**SIZES[size], "stage_types": "llll" if twin else "llvv"}
    return build(NaLaFormer, variant, pretrained, own, given)


@register_model
def nalaformer_xtiny(pretrained: bool = False, **given: Any) -> NaLaFormer:
    """NaLaFormer-XT, 6 million parameters."""
    return _build("nalaformer_xtiny", pretrained, given)


@register_model
def nalaformer_tiny(pretrained: bool = False, **given: Any) -> NaLaFormer:
    """NaLaFormer-T, 16 million parameters."""
    return _build("nalaformer_tiny", pretrained, given)


@register_model
def nalaformer_small(pretrained: bool = False, **given: Any) -> NaLaFormer:
    """NaLaFormer-S, 26 million parameters."""
    return _build("nalaformer_small", pretrained, given)


@register_model
def nalaformer_base(pretrained: bool = False, **given: Any) -> NaLaFormer:
    """NaLaFormer-B, 52 million parameters."""
    return _build("nalaformer_base", pretrained, given)


@register_model
def nalaformer_large(pretrained: bool = False, **given: Any) -> NaLaFormer:
    """NaLaFormer-L, 95 million parameters."""
    return _build("nalaformer_large", pretrained, given)


@register_model
def nalaformer_xtiny_linear(pretrained: bool = False, **given: Any) -> NaLaFormer:
    """NaLaFormer-XT with every stage linear."""
    return _build("nalaformer_xtiny_linear", pretrained, given)


@register_model
def nalaformer_tiny_linear(pretrained: bool = False, **given: Any) -> NaLaFormer:
    """NaLaFormer-T with every stage linear."""
    return _build("nalaformer_tiny_linear", pretrained, given)


@register_model
def nalaformer_small_linear(pretrained: bool = False, **given: Any) -> NaLaFormer:
    """NaLaFormer-S with every stage linear."""
    return _build("nalaformer_small_linear", pretrained, given)


@register_model
def nalaformer_base_linear(pretrained: bool = False, **given: Any) -> NaLaFormer:
    """NaLaFormer-B with every stage linear."""
    return _build("nalaformer_base_linear", pretrained, given)


@register_model
def nalaformer_large_linear(pretrained: bool = False, **given: Any) -> NaLaFormer:
    """NaLaFormer-L with every stage linear."""
    return _build("nalaformer_large_linear", pretrained, given)

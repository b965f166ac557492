"""What is compared: score rules alone, the papers' complete layers, and MALA taken to pieces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...layers import INLINE, MALA, NALA, Attention, Parts
from ...ops import Mechanism, find, mechanisms
from ...ops.mechanisms import near_miss, one, one_plus_reciprocal
from ...ops.precision import widen

ROTARY = "+rotary"
OURS = "an ablation, in no paper in this form"


@dataclass(frozen=True)
class Variant:
    """One attention layer to put into the trunk.

    Attributes:
        name: What `--mechanisms` calls it; "+rotary" at its end turns queries and keys with their place.
        about: What it is, in a few words.
        parts: What stands around the operator, and its mechanism.
        layer: The class of the layer; one of ours where the operator alone cannot say it.
    """

    name: str
    about: str
    parts: Parts
    layer: type[Attention] = Attention

    def turned(self) -> Variant:
        """The same with rotary positions.

        Raises:
            ValueError: If it has them.
        """
        if self.parts.rotary:
            raise ValueError(f"variant: {self.name!r} has rotary positions already; leave {ROTARY!r} out")
        parts = replace(self.parts, rotary=True)
        return replace(self, name=self.name + ROTARY, about=f"{self.about}, rotary positions", parts=parts)


class NormedQueries(Attention):
    """Attention whose queries all have the same length: √D · q / |q|, for heads of width D.

    MALA's control experiment: what softmax loses when it cannot hear how loud a query is. √D is the length of a query
    whose channels have size one, and cancels the operator's scale D^-½: a score is |k| times a cosine. What is taken
    away is thus how queries differ in length, not their usual sharpness.
    """

    def project(
        self, x: Tensor, grid: tuple[int, int] | None = None, key_mask: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Queries of one length, keys, values and, where there is one, the gate, each (B, N, H, D)."""
        query, *others = super().project(x, grid, key_mask)
        return F.normalize(widen(query), dim=-1).mul(query.shape[-1] ** 0.5).to(query.dtype), *others


class Constants(nn.Module):
    """Two learned numbers for each head, in place of MALA's beta and gamma: weights are (beta · a - gamma) / n.

    They start as MALA's are for features that are all one: beta = 1 + D^-½, gamma = D^½.

    Args:
        num_heads: Heads H.
        head_dim: Their width D.
        device: Where the numbers live.
        dtype: Their dtype.
    """

    def __init__(
        self, num_heads: int, head_dim: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.full((num_heads,), 1 + head_dim**-0.5, device=device, dtype=dtype))
        self.gamma = nn.Parameter(torch.full((num_heads,), head_dim**0.5, device=device, dtype=dtype))

    def gain(self, z: Tensor) -> Tensor:
        """Beta, whatever z (B, H, N, 1) is."""
        return self.beta.to(z.dtype)[:, None, None].expand_as(z)

    def mean_weight(self, z: Tensor, added: Tensor) -> Tensor:
        """Weight of the mean value, so that gamma and nothing else is subtracted."""
        return self.gain(z) * (z + added) - self.gamma.to(z.dtype)[:, None, None]


class LearnedConstants(Attention):
    """MALA with learned numbers in place of beta and gamma; rows sum to what they sum to."""

    def __init__(self, dim: int, num_heads: int, parts: Parts, **given: Any) -> None:
        super().__init__(dim, num_heads, parts, **given)
        self.constants = Constants(num_heads, dim // num_heads, **_place(self.proj))
        own = self.constants
        self.mechanism = replace(self.mechanism, gain=own.gain, mean_weight=own.mean_weight)


class Gain(nn.Module):
    """One learned number for each head, in place of the gain; rows go on summing to one.

    It starts as MALA's gain is for features that are all one: 1 + D^-½.
    """

    def __init__(
        self, num_heads: int, head_dim: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((num_heads,), 1 + head_dim**-0.5, device=device, dtype=dtype))

    def forward(self, z: Tensor) -> Tensor:
        """The number, whatever z (B, H, N, 1) is."""
        return self.factor.to(z.dtype)[:, None, None].expand_as(z)


class LearnedGain(Attention):
    """MALA with a learned number in place of its gain."""

    def __init__(self, dim: int, num_heads: int, parts: Parts, **given: Any) -> None:
        super().__init__(dim, num_heads, parts, **given)
        self.gain = Gain(num_heads, dim // num_heads, **_place(self.proj))
        self.mechanism = replace(self.mechanism, gain=self.gain)


def _place(layer: nn.Linear) -> dict[str, Any]:
    return {"device": layer.weight.device, "dtype": layer.weight.dtype}


def zero(z: Tensor, added: Tensor) -> Tensor:
    """Weight of the mean value without MALA's beta: beta is one, and what it adds and gamma takes away cancel."""
    return torch.zeros_like(z)


def unsubtracted(z: Tensor, added: Tensor) -> Tensor:
    """Weight of the mean value without MALA's gamma: all that beta gives."""
    return one_plus_reciprocal(z) * (z + added)


def _of_mala(name: str, **changes: Any) -> Mechanism:
    return replace(find("mala"), name=name, paper=OURS, **changes)


_MADE = (
    Variant("softmax_normed", "softmax, all queries of one length", Parts("softmax"), NormedQueries),
    Variant("mala_layer", "MALA's layer: rotary, LePE, linear gate", MALA),
    Variant("nala_layer", "NaLaFormer's layer: rotary, LePE, norm, SiLU gate", NALA),
    Variant("inline_layer", "InLine's layer: local residual", INLINE),
    Variant("mala_layer_softmax", "MALA's layer around softmax", MALA.over("softmax")),
    Variant("mala_layer_linear", "MALA's layer around linear attention", MALA.over("linear")),
    Variant("inline_layer_softmax", "InLine's layer around softmax", INLINE.over("softmax")),
    Variant("gain_one", "elu + 1, gain 1", Parts(_of_mala("gain_one", gain=one))),
    Variant("no_beta", "MALA, beta = 1: rows sum to 0", Parts(_of_mala("no_beta", gain=one, mean_weight=zero))),
    Variant("no_gamma", "MALA, gamma = 0: rows sum to 1 + z", Parts(_of_mala("no_gamma", mean_weight=unsubtracted))),
    Variant("learned_constants", "learned numbers for beta and gamma", Parts(_of_mala("learned")), LearnedConstants),
    Variant("learned_gain", "a learned number for the gain", Parts(_of_mala("learned_gain")), LearnedGain),
    Variant("mala_relu", "MALA over relu", Parts(_of_mala("mala_relu", query_map=F.relu, key_map=F.relu))),
    Variant("mala_exp", "MALA over exp", Parts(_of_mala("mala_exp", query_map=torch.exp, key_map=torch.exp))),
)
MADE: Mapping[str, Variant] = MappingProxyType({variant.name: variant for variant in _MADE})

RULES = ("softmax", "softmax_normed", "linear", "inline", "nala", "mala")
# What `affinear compare` trains unless told otherwise.
DEFAULT = tuple(name + end for name in RULES for end in ("", ROTARY))
# The three experiments of the evidence.
SCORE = (*RULES, "softmax+rotary", "linear+rotary", "mala_released+rotary", "mala+rotary")
LAYERS = (
    "mala_layer",
    "nala_layer",
    "inline_layer",
    "mala_layer_softmax",
    "mala_layer_linear",
    "inline_layer_softmax",
)
ABLATION = (
    "mala",
    "linear",
    "gain_one",
    "no_beta",
    "no_gamma",
    "learned_constants",
    "learned_gain",
    "mala_relu",
    "mala_exp",
)

_ABOUT = {
    "softmax": "softmax",
    "linear": "elu + 1, gain 1/z",
    "relu": "relu, gain 1/z",
    "focused": "focused power map, gain 1/z",
    "inline": "no feature map, gain 1",
    "mala": "elu + 1, gain 1 + 1/z",
    "nala": "norm-aware power, gain 1/z",
}


def variant(name: str) -> Variant:
    """The variant of this name: one of those made here, or a registered mechanism alone; "+rotary" turns it.

    Args:
        name: Such as "mala", "softmax_normed+rotary" or "mala_layer".

    Raises:
        ValueError: If there is none, or it has rotary positions already.

    Example:
        >>> from affinear.layers import Parts
        >>> from affinear.tasks.classify.variants import variant
        >>> variant("mala+rotary").parts == Parts("mala", rotary=True)
        True
        >>> variant("mala_layer").about
        "MALA's layer: rotary, LePE, linear gate"
    """
    if name.endswith(ROTARY):
        return variant(name.removesuffix(ROTARY)).turned()
    if name in MADE:
        return MADE[name]
    if name not in mechanisms():
        raise ValueError(
            f"mechanism: expected one of {', '.join((*mechanisms(), *MADE))}, with {ROTARY} or without, got {name!r}; "
            f"{near_miss(name, (*mechanisms(), *MADE))}affinear.register adds one of your own, and --plugin does "
            "on the command line"
        )
    return Variant(name, _ABOUT.get(name, find(name).paper), Parts(name))

"""Modules around the operator: one attention layer, and the parts that papers put around it."""

from .adding import AddNorm
from .attention import INLINE, MALA, MILA, NALA, NONE, PLAIN, RALA, Attention, Parts
from .branch import Branch
from .convolution import DepthwiseConv
from .padding import blank, mask_of, masked_mean, masked_norm
from .position import LearnedPosition
from .residual import LocalResidual
from .rotary import AxialRotary, ChannelRotary
from .weighing import weigh_keys
from .windows import Windows

__all__ = [
    "INLINE",
    "MALA",
    "MILA",
    "NALA",
    "NONE",
    "PLAIN",
    "RALA",
    "AddNorm",
    "Attention",
    "AxialRotary",
    "Branch",
    "ChannelRotary",
    "DepthwiseConv",
    "LearnedPosition",
    "LocalResidual",
    "Parts",
    "Windows",
    "blank",
    "mask_of",
    "masked_mean",
    "masked_norm",
    "weigh_keys",
]

"""Modules around the operator: one attention layer, and the parts that papers put around it."""

from .attention import INLINE, MALA, NALA, NONE, PLAIN, Attention, Parts
from .convolution import DepthwiseConv
from .padding import blank, mask_of, masked_mean, masked_norm
from .position import LearnedPosition
from .residual import LocalResidual
from .rotary import AxialRotary
from .windows import Windows

__all__ = [
    "INLINE",
    "MALA",
    "NALA",
    "NONE",
    "PLAIN",
    "Attention",
    "AxialRotary",
    "DepthwiseConv",
    "LearnedPosition",
    "LocalResidual",
    "Parts",
    "Windows",
    "blank",
    "mask_of",
    "masked_mean",
    "masked_norm",
]

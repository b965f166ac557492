"""The operator: tensors in, tensors out, nothing but torch."""

from .attention import attend, attention, summarize, weights
from .depthwise import depthwise
from .mechanisms import Mechanism, find, mechanisms, register
from .rotary import rotary_1d, rotary_2d
from .state import State

__all__ = [
    "Mechanism",
    "State",
    "attend",
    "attention",
    "depthwise",
    "find",
    "mechanisms",
    "register",
    "rotary_1d",
    "rotary_2d",
    "summarize",
    "weights",
]

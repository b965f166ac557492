"""The operator: tensors in, tensors out, nothing but torch."""

from .add_norm import add_norm
from .attention import attend, attention, summarize, weights
from .depthwise import depthwise
from .mechanisms import Mechanism, find, mechanisms, reciprocal, register
from .rotary import rotary_1d, rotary_2d
from .state import State
from .validation import LayoutWarning
from .warming import WarmUp, warm_up

__all__ = [
    "LayoutWarning",
    "Mechanism",
    "State",
    "WarmUp",
    "add_norm",
    "attend",
    "attention",
    "depthwise",
    "find",
    "mechanisms",
    "reciprocal",
    "register",
    "rotary_1d",
    "rotary_2d",
    "summarize",
    "warm_up",
    "weights",
]

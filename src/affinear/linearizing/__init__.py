"""From a softmax network to a linear one: find its attention, swap it, keep it, distil it.

Importing this package makes `attn_implementation="affinear_mala"`, and so on for each mechanism, known to transformers
where that is installed.
"""

from importlib.util import find_spec

from .choices import Choices
from .core import LinearCore, Shape
from .keeping import load, save
from .report import Layer, Report
from .swap import find, linearize, report_of
from .window import Memory

__all__ = [
    "Choices",
    "Layer",
    "LinearCore",
    "Memory",
    "Report",
    "Shape",
    "find",
    "linearize",
    "load",
    "report_of",
    "save",
]

if find_spec("transformers") is not None:
    from . import in_transformers, recorded

    in_transformers.register_names()
    recorded.register()

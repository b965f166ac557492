"""The papers' experiment: one network, one recipe, only the attention changed, over several seeds."""

from .cells import Cell, Outcome
from .experiment import (
    CIFAR,
    MICRO,
    QUICK_EPOCHS,
    REPORT,
    RESULTS,
    Comparison,
    Results,
    conclusions,
    outline,
    parse_seeds,
    prepare,
    run,
)

__all__ = [
    "CIFAR",
    "MICRO",
    "QUICK_EPOCHS",
    "REPORT",
    "RESULTS",
    "Cell",
    "Comparison",
    "Outcome",
    "Results",
    "conclusions",
    "outline",
    "parse_seeds",
    "prepare",
    "run",
]

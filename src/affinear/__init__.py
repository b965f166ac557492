"""Affinear: linear attention that keeps the query's magnitude."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .linearizing import linearize
    from .ops import Mechanism, State, attend, attention, mechanisms, register, summarize, warm_up, weights

__version__ = "0.1.0"
__all__ = [
    "Mechanism",
    "State",
    "attend",
    "attention",
    "linearize",
    "mechanisms",
    "register",
    "summarize",
    "warm_up",
    "weights",
]


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is first asked for: torch takes seconds, and `affinear --help` needs none."""
    if name == "ops":
        return import_module(".ops", __name__)
    if name not in __all__:
        raise AttributeError(f"module 'affinear' has no attribute {name!r}")
    home = ".linearizing" if name == "linearize" else ".ops"  # the former needs more than torch
    found = globals()[name] = getattr(import_module(home, __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "ops"})

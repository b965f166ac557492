"""Affinear: linear attention that keeps the query's magnitude."""

from typing import TYPE_CHECKING, Any

from .ops import Mechanism, State, attend, attention, mechanisms, register, summarize, weights

if TYPE_CHECKING:
    from .linearizing import linearize

__version__ = "0.1.0"
__all__ = ["Mechanism", "State", "attend", "attention", "linearize", "mechanisms", "register", "summarize", "weights"]


def __getattr__(name: str) -> Any:
    """Load `linearize` when it is first asked for: it needs more than torch."""
    if name == "linearize":
        from .linearizing import linearize

        return linearize
    raise AttributeError(f"module 'affinear' has no attribute {name!r}")

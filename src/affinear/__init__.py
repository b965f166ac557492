"""Affinear: linear attention that keeps the query's magnitude."""

from .ops import Mechanism, State, attend, attention, mechanisms, register, summarize, weights

__version__ = "0.1.0"
__all__ = ["Mechanism", "State", "attend", "attention", "mechanisms", "register", "summarize", "weights"]

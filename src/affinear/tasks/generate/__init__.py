"""Generation: pictures of a class, out of noise."""

from .task import TASK, Generate

__all__ = ["TASK", "Generate"]

"""Speech: what is said in a recording, whole or as it comes."""

from .task import TASK, Speech

__all__ = ["TASK", "Speech"]

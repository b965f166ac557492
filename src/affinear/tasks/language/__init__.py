"""`--task language`: the next token of a text. `docs/language-training.md` tells about it."""

from .task import TASK

__all__ = ["TASK"]

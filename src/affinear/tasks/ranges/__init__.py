"""`--task ranges`: the Long Range Arena, one class for a long sequence of tokens. `docs/ranges.md` tells about it."""

from .task import TASK

__all__ = ["TASK"]

"""`--task distil_speech`: a Whisper learns to hear with a linear encoder. `docs/linearizing.md` tells about it."""

from .task import TASK

__all__ = ["TASK"]

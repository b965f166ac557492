"""Super-resolution: photos made larger."""

from .task import TASK, Upscale

__all__ = ["TASK", "Upscale"]

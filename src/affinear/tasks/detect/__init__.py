"""Detection: objects found in images, as boxes and masks."""

from .task import TASK, Detect

__all__ = ["TASK", "Detect"]

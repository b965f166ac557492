"""Detection: objects found in images, as boxes and masks."""

from .task import Detect

TASK = Detect()

__all__ = ["TASK", "Detect"]

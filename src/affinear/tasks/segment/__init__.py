"""Segmentation: a class for every pixel."""

from .task import TASK, Segment

__all__ = ["TASK", "Segment"]

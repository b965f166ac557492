"""Distilling: a linearized classifier learns to answer as the softmax network that it was made of."""

from .settings import DistilSettings
from .task import TASK, Distil

__all__ = ["TASK", "Distil", "DistilSettings"]

"""Distilling: a linearized network learns to answer as the softmax network that it was made of, one file each kind."""

from .classify import TASK, Distil, DistilSettings

__all__ = ["TASK", "Distil", "DistilSettings"]

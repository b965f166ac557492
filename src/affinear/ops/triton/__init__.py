"""Fused kernels for GPUs, written in Triton, which is imported at the first call that needs it."""

from .backend import decode

__all__ = ["decode"]

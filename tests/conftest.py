"""Without a GPU, Triton interprets the kernels: it has to know before anybody imports it."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

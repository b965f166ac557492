"""The machine that an experiment runs on."""

from __future__ import annotations

import os
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """What it is."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "cores": os.cpu_count(),
    }

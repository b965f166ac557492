"""Where a run took place: names, versions, and the copy bandwidth that speeds are compared with."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import affinear
from affinear.bench.timing import Times, time_calls


def describe(device: torch.device) -> dict[str, Any]:
    """Machine, versions, commit, date and command line; None for what cannot be found out.

    Examples:
        >>> describe(torch.device("cpu"))["gpu"] is None
        True
    """
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
        "gpu": None if gpu is None else gpu.name,
        "gpu_memory_gib": None if gpu is None else round(gpu.total_memory / 2**30, 1),
        "gpu_cache_mib": None if gpu is None else round(gpu.L2_cache_size / 2**20, 1),
        "driver": None if gpu is None else _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "cuda": None if gpu is None else torch.version.cuda,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "affinear": affinear.__version__,
        "commit": _said("git", "--no-optional-locks", "describe", "--always", "--dirty"),
    }


def copy_bandwidth(device: torch.device, seconds: float, size: int) -> tuple[float, Times]:
    """How fast the device copies, in GB/s of bytes read and bytes written.

    Args:
        device: Where.
        seconds: About how long to measure.
        size: Bytes to copy, well beyond any cache.

    Returns:
        The bandwidth of the median copy, and all times.

    Examples:
        >>> speed, times = copy_bandwidth(torch.device("cpu"), 0.01, 2**20)
        >>> speed == bandwidth(2**20, times)
        True
    """
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    times = time_calls([lambda: target.copy_(source)], device, seconds)
    return bandwidth(source.nbytes, times), times


def bandwidth(size: int, times: Times) -> float:
    """GB/s of a copy: every byte is read once and written once."""
    return 2 * size / times.median / 1e6


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _command() -> str:
    program, *given = sys.argv
    return shlex.join(["python", program, *given] if program.endswith(".py") else [Path(program).name, *given])


def _said(*command: str) -> str | None:
    # From this file's folder, so that the commit is that of the code, wherever the user stands.
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=Path(__file__).parent)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip().partition("\n")[0] or None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.processor())

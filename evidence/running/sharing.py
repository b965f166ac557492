"""A GPU that processes use at the same time and not in turns."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def sharing(folder: Path | None) -> Generator[None, None, None]:
    """NVIDIA's MPS, where it is installed, for all processes that are started meanwhile.

    Args:
        folder: For its pipes and logs; None for a GPU that is used as it is, as when somebody has started MPS before.
    """
    control = None if folder is None else shutil.which("nvidia-cuda-mps-control")
    if folder is None or control is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        os.environ[name] = str(folder.resolve())
    subprocess.run([control, "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run([control], input=b"quit\n", check=False)

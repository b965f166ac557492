"""A few test samples that a run keeps, so that whoever takes its weights further can try them on what they are for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save
from torch import Tensor

from affinear.lens.files import place

NAME = "examples.safetensors"
COUNT = 4
MOST = 2**26  # numbers in the file of a stranger


def keep(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write what a task gave as examples into the folder of a run; nothing if it gave none.

    Raises:
        OSError: If it could not be written.
    """
    if tensors:
        place(save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}), folder / NAME, force=True)


def images_of(source: Path, channels: int) -> Tensor | None:
    """The example images (B, C, H, W) of a run, as its network wants them; None if there are none that can be used.

    Args:
        source: The folder of the run; of a file of weights there are none.
        channels: That the images must have.
    """
    path = source / NAME
    if not path.is_file() or path.stat().st_size > 4 * MOST:
        return None
    try:
        found = load_file(path).get("images")
    except Exception:  # damaged files make their reader raise nearly anything, and nothing depends on these
        return None
    if found is None or found.ndim != 4 or found.shape[1] != channels or not found.is_floating_point():
        return None
    images = found.float()
    return images if len(images) and bool(images.isfinite().all()) else None

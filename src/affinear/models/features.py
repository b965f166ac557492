"""Any timm network as a backbone: maps of images of any size, in batches of several sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import timm
from timm.layers import LayerNorm2d
from timm.models import group_parameters
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers import blank, mask_of
from ._pyramid import Pyramid
from .inline_deit import InLineDeiT
from .making import check

STRIDES = (4, 8, 16, 32)
# What timm's networks are told so that they take any size; of these a network knows one at most.
ANY_SIZE: tuple[dict[str, Any], ...] = ({"strict_img_size": False}, {"dynamic_img_size": True}, {})


class Features(nn.Module):
    """Maps of a timm network at several strides, (B, C, H / stride, W / stride), sides rounded as the network does.

    Images of a batch may have several sizes: each lies in the upper left corner of its place, and `sizes` says how far
    it goes. Our own networks then keep the rest out of every sum and convolution, so that an image's maps are those it
    has alone, with zeros beyond. Networks of others do not know of padding: `masks` is False for them, and what lies
    beyond an image reaches into it as far as their convolutions and windows do.

    Networks built on layer norms get one at the end of each map, as the published dense networks of MALA, Swin and
    ConvNeXt have it; networks built on batch norms get none.

    Args:
        name: A name timm knows, ours or another.
        strides: Which maps to give.
        masked: Whether padding is kept out. False is what published detectors and segmenters do: they were trained on
            padded batches, and their weights expect it.
        norms: Whether maps end in a norm; None for what was said above.
        pretrained: timm's own weights, where it has some and can fetch them.
        model_args: Arguments of the network, such as `drop_path_rate` or `mechanism`.

    Raises:
        ValueError: If timm has no such network, it has no maps at these strides, or it does not know an argument.

    Example:
        >>> import torch
        >>> from affinear.models.features import Features
        >>> backbone = Features("mavit_tiny").eval()
        >>> maps = backbone(torch.randn(2, 3, 64, 96), sizes=[(64, 70), (50, 96)])
        >>> maps[0].shape, maps[-1].shape
        (torch.Size([2, 64, 16, 24]), torch.Size([2, 512, 2, 3]))
    """

    def __init__(
        self,
        name: str,
        strides: Sequence[int] = STRIDES,
        *,
        masked: bool = True,
        norms: bool | None = None,
        pretrained: bool = False,
        model_args: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.name, self.strides, self.masked = name, tuple(strides), masked
        self.body = _create(name, pretrained, model_args or {})
        info: Any = self.body.feature_info
        self.places = _places(name, self.strides, info.reduction())
        self.channels: list[int] = [info.channels()[place] for place in self.places]
        own = getattr(self.body, "model", None)
        ours = isinstance(own, Pyramid | InLineDeiT)
        self.masks = ours and not (isinstance(own, Pyramid) and not own.knows_padding)
        # Most of our networks take any size; the others' sides are made multiples of what the last stage divides by.
        self.divisor = max(info.reduction()) if not ours else own.divisor if isinstance(own, Pyramid) else 1
        if isinstance(own, Pyramid):
            own.head = nn.Identity()  # its projection would be weights without a gradient
        if norms is None:
            norms = any(isinstance(module, nn.LayerNorm) for module in self.body.modules())
        self.norms = nn.ModuleList(LayerNorm2d(dim, eps=1e-6) if norms else nn.Identity() for dim in self.channels)

    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]] | Tensor | None = None) -> list[Tensor]:
        """The maps, finest first.

        Args:
            images: (B, 3, H, W).
            sizes: Rows and columns of each image in its place of the batch, as pairs or as a tensor (B, 2) beside the
                images, which nobody waits for; None if there is no padding.
        """
        height, width = images.shape[2:]
        if sizes is not None and self.masks and self.masked and _pads(sizes, (height, width)):
            return self._masked_maps(images, mask_of(sizes, (height, width), images.device))
        maps = self._maps(images)
        maps = [norm(maps[place]) for place, norm in zip(self.places, self.norms, strict=True)]
        if self.divisor == 1:
            return maps
        return [
            out[:, :, : -(-height // stride), : -(-width // stride)]
            for out, stride in zip(maps, self.strides, strict=True)
        ]

    def _masked_maps(self, images: Tensor, mask: Tensor) -> list[Tensor]:
        """Maps of a network of ours that are zeros beyond each image."""
        getter: Any = self.body
        model = cast("Pyramid | InLineDeiT", getter.model)
        maps: list[Tensor] = model.forward_intermediates(
            images, getter.out_indices, norm=getter.norm, intermediates_only=True, mask=mask
        )
        masks = model.masks_of(mask)
        return [
            blank(norm(maps[place]).permute(0, 2, 3, 1), masks[getter.out_indices[place]]).permute(0, 3, 1, 2)
            for place, norm in zip(self.places, self.norms, strict=True)
        ]

    def _maps(self, images: Tensor) -> list[Tensor]:
        """What the network gives, channels first."""
        below, right = (-side % self.divisor for side in images.shape[2:])
        if below or right:
            images = F.pad(images, (0, right, 0, below))
        maps: list[Tensor] = self.body(images)
        if getattr(self.body, "output_fmt", "NCHW") == "NHWC":
            maps = [out.permute(0, 3, 1, 2) for out in maps]
        return maps

    def matcher(self, prefix: str, coarse: bool = False) -> Callable[[str], int]:
        """The layer of each parameter of a network around this one, by its name, for layer-wise learning rates.

        Args:
            prefix: What the names of these parameters begin with there.
            coarse: Whether a stage is one layer.

        Returns:
            A function as timm's `group_matcher` may give: layers of the backbone count from the input on; norms of the
            maps, and all that is not of the backbone, are the layer after the last.
        """
        own: Any = getattr(self.body, "model", None)
        if hasattr(own, "group_matcher"):
            found: Any = group_parameters(own, own.group_matcher(coarse=coarse), reverse=True)
            layers: dict[str, int] = {f"{prefix}body.model.{name}": layer for name, layer in found.items()}
        else:  # timm took the network apart, and with it what it says about layers
            names = [name for name, _ in self.body.named_parameters()]
            order = {stem: i for i, stem in enumerate(dict.fromkeys(map(_stem, names)))}
            layers = {f"{prefix}body.{name}": order[_stem(name)] for name in names}
        after = max(layers.values(), default=-1) + 1
        return lambda name: layers.get(name, after)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether training recomputes activations instead of keeping them; the maps stay the same."""
        holder: Any = self.body if hasattr(self.body, "set_grad_checkpointing") else getattr(self.body, "model", None)
        if not hasattr(holder, "set_grad_checkpointing"):
            raise ValueError(f"grad_checkpointing: expected False, as {self.name} has no such thing, got True")
        holder.set_grad_checkpointing(enable)
        for module in self.body.modules() if enable else ():
            if "inplace" in vars(module):
                vars(module)["inplace"] = False  # or what is computed again would find its input changed

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{self.name}, strides={self.strides}, masked={self.masks and self.masked}"


def _pads(sizes: Sequence[tuple[int, int]] | Tensor, size: tuple[int, int]) -> bool:
    """Whether an image may be smaller than its place. A tensor is not looked at: that would keep a GPU waiting."""
    return isinstance(sizes, Tensor) or any(tuple(own) != size for own in sizes)


def _stem(name: str) -> str:
    """The block that a parameter belongs to: its name up to the second number, or to the first if there is no other."""
    found = re.match(r"\D*\d+(?:[a-z_.]*\.\d+(?=\.))?", name)
    return found[0] if found else name.partition(".")[0]


def _create(name: str, pretrained: bool, model_args: dict[str, Any]) -> nn.Module:
    """Timm's network of maps, told to take any size where it wants to be told."""
    check(name, model_args)
    for told in ANY_SIZE:
        try:
            return timm.create_model(name, pretrained=pretrained, features_only=True, **{**told, **model_args})
        except TypeError as error:
            refused = [word for word in (*told, *model_args) if f"'{word}'" in str(error)]
            if not refused or refused[0] in model_args:
                said = str(error).rpartition("__init__() ")[2]
                raise ValueError(f"model_args: {name} {said}") from None
        except (RuntimeError, NotImplementedError, AttributeError, AssertionError) as error:
            raise ValueError(f"model: {name} has no maps to give ({error}); take one with stages") from None
    raise AssertionError("the last of ANY_SIZE tells nothing")


def _places(name: str, strides: Sequence[int], reductions: Sequence[int]) -> list[int]:
    """Where the network's maps of these strides are; of several the last, which is the deepest."""
    missing = [stride for stride in strides if stride not in reductions]
    if missing:
        raise ValueError(
            f"model: expected a network with maps at strides {', '.join(map(str, strides))}, got {name}, which has "
            f"them at {', '.join(map(str, reductions))}"
        )
    return [len(reductions) - 1 - list(reversed(reductions)).index(stride) for stride in strides]

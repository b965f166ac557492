"""A backbone and a head: a network that gives every pixel a class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from ...layers import mask_of
from ...ops.tracing import is_eager
from ..features import Features
from .semantic_fpn import SemanticFPN
from .upernet import FCN, UperNet

HELPED = 2  # which map the helper of UperNet sees: that of stride 16
HEADS = MappingProxyType({"semantic_fpn": SemanticFPN, "upernet": UperNet})


class Segmenter(nn.Module):
    """A class for every pixel: a timm network, and the head of this name on its maps.

    In evaluation, images of several sizes in one batch are answered size by size, so that each has the logits it has
    alone. In training our backbones keep padding out of their sums; heads see zeros there, in their batch norms too.

    Args:
        model: The backbone's name, ours or another of timm's.
        head: "semantic_fpn", or "upernet", which brings its helper.
        num_classes: Classes.
        masked: Whether padding is kept out, of the backbone in training and of everything in evaluation; see
            `Features`.
        norms: Whether the backbone's maps end in a norm; None for what suits it.
        pretrained: timm's own weights for the backbone.
        model_args: Arguments of the backbone.

    Raises:
        ValueError: If there is no such head, or the backbone cannot be made.

    Example:
        >>> import torch
        >>> from affinear.models.heads import Segmenter
        >>> network = Segmenter("mavit_tiny", "semantic_fpn", num_classes=11).eval()
        >>> [logits] = network(torch.randn(1, 3, 64, 96))
        >>> logits.shape
        torch.Size([1, 11, 16, 24])
    """

    def __init__(
        self,
        model: str,
        head: str = "semantic_fpn",
        num_classes: int = 150,
        *,
        masked: bool = True,
        norms: bool | None = None,
        pretrained: bool = False,
        model_args: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if head not in HEADS:
            raise ValueError(f"head: expected one of {', '.join(HEADS)}, got {head!r}")
        self.num_classes = num_classes
        self.backbone = Features(model, masked=masked, norms=norms, pretrained=pretrained, model_args=model_args)
        self.head = HEADS[head](self.backbone.channels, num_classes)
        self.helper = FCN(self.backbone.channels[HELPED], num_classes) if head == "upernet" else None

    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]] | Tensor | None = None) -> list[Tensor]:
        """Logits (B, num_classes, H / 4, W / 4); in training the helper's as well, where there is one.

        Args:
            images: (B, 3, H, W).
            sizes: Rows and columns of each image in its place of the batch; None if there is no padding.
        """
        if sizes is not None and self.backbone.masked and not self.training and is_eager():
            return [self._size_by_size(images, sizes)]
        maps = self.backbone(images, sizes)
        logits: list[Tensor] = [self.head(maps)]
        if self.helper is not None and self.training:
            logits.append(self.helper(maps[HELPED]))
        return logits

    def _size_by_size(self, images: Tensor, sizes: Sequence[tuple[int, int]] | Tensor) -> Tensor:
        """Logits of each image as it has them alone, zeros beyond: heads enlarge maps, and reach over every edge."""
        place = (images.shape[2], images.shape[3])
        mask_of(sizes, place)  # which says what is wrong with them
        own: list[tuple[int, int]] = [(int(rows), int(columns)) for rows, columns in sizes]
        if set(own) == {place}:
            return self.head(self.backbone(images))
        rows, columns = (-(-side // self.backbone.strides[0]) for side in place)
        logits = images.new_zeros(len(images), self.num_classes, rows, columns)
        for size in set(own):
            which = [i for i, other in enumerate(own) if other == size]
            found: Tensor = self.head(self.backbone(images[which, :, : size[0], : size[1]]))
            logits[which, :, : found.shape[2], : found.shape[3]] = found.to(logits.dtype)
        return logits

    def group_matcher(self, coarse: bool = False) -> Callable[[str], int]:
        """How parameters group into layers, for layer-wise learning rates: the backbone's own, then all that is new."""
        return self.backbone.matcher("backbone.", coarse)

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimizers leave out of weight decay, beside biases and norms."""
        held: Any = getattr(self.backbone.body, "model", None)
        own: set[str] = held.no_weight_decay() if hasattr(held, "no_weight_decay") else set()
        return {f"backbone.body.model.{name}" for name in own}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether training recomputes the backbone's activations instead of keeping them."""
        self.backbone.set_grad_checkpointing(enable)

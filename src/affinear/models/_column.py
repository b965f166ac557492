"""What every network of blocks of one width owes timm, written once; `_pyramid` has that of shrinking stages."""

from __future__ import annotations

from typing import Any

from timm.layers import get_device_dtype
from torch import Tensor, nn


class Column(nn.Module):
    """Blocks of one width under one head, with the methods timm's users and tools call.

    A family's class makes the modules, and has `check_pool`, `forward_features` and `forward_head`.
    """

    embed_dim: int
    num_classes: int
    global_pool: str
    grad_checkpointing: bool
    head: nn.Module

    @staticmethod
    def check_pool(global_pool: str) -> str:
        """The pooling, if the network has it; else a ValueError that says which it has."""
        raise NotImplementedError

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether training recomputes the blocks' activations instead of keeping them."""
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """The last linear layer."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Start the classifier anew with other classes, or none (0), and another pooling, or none ('')."""
        self.num_classes = num_classes
        if global_pool is not None:
            self.global_pool = self.check_pool(global_pool)
        dd: dict[str, Any] = get_device_dtype(self)
        self.head = nn.Linear(self.embed_dim, num_classes, **dd) if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C) of images (B, channels, H, W)."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits (B, num_classes) of tokens, or what the classifier would see."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, num_classes) of images (B, channels, H, W)."""
        return self.forward_head(self.forward_features(x))

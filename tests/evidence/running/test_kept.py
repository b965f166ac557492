"""What is left for backward is counted without memory, as it would be with it."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

import affinear.models  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the names


@pytest.fixture
def kept(script: Any) -> Any:
    return script("running.kept")


class Square(nn.Module):
    """Keeps its input twice over, as views of one tensor, and a map of pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = (images * self.weight).flatten(2).transpose(1, 2)
        return (tokens @ tokens.transpose(1, 2)).softmax(-1).sum()


def test_every_tensor_counts_once_and_maps_of_pairs_by_themselves(kept: Any) -> None:
    left = kept.left_behind(Square, (2, 3, 4, 4), frozenset({16}))
    assert left.weights == 2 * 16 * 16 * 4
    assert left.activations == 2 * (2 * 3 * 16 * 4)  # the images, and their tokens once


def test_images_four_times_as_large_leave_four_times_as_much_around_linear_attention(kept: Any) -> None:
    def made() -> nn.Module:
        return timm.create_model("mavit_tiny_linear", features_only=True, mechanism="linear").train()

    small, large = (
        kept.left_behind(made, (1, 3, side, side), frozenset((side // stride) ** 2 for stride in (4, 8, 16, 32)))
        for side in (256, 512)
    )
    # Few tokens are attended to pair by pair, as that is cheaper there.
    assert large.activations + large.weights == pytest.approx(4 * (small.activations + small.weights), rel=0.05)

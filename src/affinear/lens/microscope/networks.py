"""Networks: queries and keys of every attention layer of ours, caught as an image runs through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from affinear.layers import Attention
from affinear.lens.microscope.pictures import Picture
from affinear.lens.microscope.tokens import Layer


def tokens_of(model: nn.Module, image: Tensor) -> list[Layer]:
    """Queries and keys of every `affinear.layers.Attention` in a network, in the order in which they run.

    Args:
        model: The network; it runs as it is, so put it into eval mode first.
        image: (3, H, W) or (1, 3, H, W), normalised as the network expects it.

    Raises:
        ValueError: If more than one image came.
    """
    images = image[None] if image.ndim == 3 else image
    if images.ndim != 4 or images.shape[0] != 1:
        raise ValueError(f"image: expected one, (3, H, W) or (1, 3, H, W), got the shape {tuple(image.shape)}")
    found: list[Layer] = []

    def catch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            assert isinstance(module, Attention)
            found.append(_layer(name, module, *args, **given))

        return hook

    # Weighed keys are no keys that another mechanism could take, and tables of each head no one table.
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, Attention) and not (module.parts.weighed and module.linear) and module.branch is None
    ]
    hooks = [module.register_forward_pre_hook(catch(name), with_kwargs=True) for name, module in layers]
    try:
        with torch.no_grad():
            model(images)
    finally:
        for handle in hooks:
            handle.remove()
    return found


def layers(model: nn.Module, picture: Picture) -> list[Layer]:
    """Queries and keys of every attention layer for a picture, resized and normalised as the network expects it."""
    config: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    channels, rows, columns = config.get("input_size", (3, 224, 224))
    mean, std = (torch.tensor(config.get(name, 3 * (0.5,))).reshape(-1, 1, 1) for name in ("mean", "std"))
    image = ((picture.at(rows, columns) - mean) / std).float()
    return tokens_of(model, image if channels == 3 else image.mean(0, keepdim=True).expand(channels, -1, -1))


def _layer(
    name: str,
    module: Attention,
    x: Tensor,
    grid: tuple[int, int],
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    key_mask: Tensor | None = None,
    mean: Tensor | None = None,
) -> Layer:
    """What the layer's own forward makes of its input, up to queries and keys; `mean` belongs to the values."""
    query, key, *_ = module.project(x, grid, key_mask)
    tables = None if rotary is None else (rotary[0].double(), rotary[1].double())
    return Layer(
        name,
        query.double().contiguous(),
        key.double().contiguous(),
        (int(grid[0]), int(grid[1])),
        module.prefix_tokens,
        tables,
        key_mask,
        module.mechanism.name,
    )

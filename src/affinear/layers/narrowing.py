"""The weights of a compiled network in autocast's dtype, brought there all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module  # pyright: ignore[reportPrivateUsage]

from ..ops.tracing import is_compiling, is_exporting
from .convolution import DepthwiseConv


def with_narrow_weights(network: nn.Module, run: Callable[[], Tensor], x: Tensor) -> Tensor:
    """Run a network on `x`, its weights cast beforehand where autocast would cast each one by itself.

    A compiler makes a launch of every such cast, a hundred in a small network, and as many again for the gradients.
    Together they are a few. Outside compiled networks, and of weights that are narrow already, nothing changes.

    Args:
        network: Whose linear layers and convolutions are meant; depthwise ones read their weights as they are.
        run: What the network does.
        x: What it does it to, on the device whose autocast counts.

    Returns:
        What `run` returns.

    Example:
        >>> import torch
        >>> from affinear.layers.narrowing import with_narrow_weights
        >>> layer, x = torch.nn.Linear(4, 2), torch.randn(3, 4)
        >>> torch.equal(with_narrow_weights(layer, lambda: layer(x), x), layer(x))
        True
    """
    kind = x.device.type
    if not is_compiling() or is_exporting() or not torch.is_autocast_enabled(kind):
        return run()
    dtype = torch.get_autocast_dtype(kind)
    wide = {name: weight for name, weight in _weights(network).items() if weight.dtype == torch.float32}
    if not wide or dtype == torch.float32:
        return run()
    narrow = _Narrow.apply(dtype, *wide.values())
    with _reparametrize_module(network, dict(zip(wide, narrow, strict=True))):  # pyright: ignore[reportArgumentType]
        return run()


def _weights(network: nn.Module) -> dict[str, Tensor]:
    """What autocast casts, by name."""
    found: dict[str, Tensor] = {}
    for prefix, layer in network.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and not isinstance(layer, DepthwiseConv):
            for name, weight in layer.named_parameters(recurse=False):
                found[f"{prefix}.{name}" if prefix else name] = weight
    return found


class _Narrow(torch.autograd.Function):
    """Copies in another dtype, and gradients in the weights' own."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        return _copies(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_copies(grads, torch.float32)


def _copies(tensors: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(_cast(list(tensors), dtype))


# Torch's own `_foreach_copy` inside a graph the compiler takes apart again, into a launch for every tensor: so it sees
# one operation that it does not know, and that makes a launch for some dozens of them.
@torch.library.custom_op("affinear::cast", mutates_args=())
def _cast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies in another dtype, laid out as the tensors are."""
    rooms = [torch.empty_like(x, dtype=dtype) for x in tensors]
    torch._foreach_copy_(rooms, tensors)  # pyright: ignore[reportPrivateUsage]
    return rooms


@_cast.register_fake
def _cast_shapes(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(x, dtype=dtype) for x in tensors]

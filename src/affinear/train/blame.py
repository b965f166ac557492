"""Where a number first turned infinite or not-a-number: in which parameter, layer or gradient."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from ..ops import Mechanism


def weights_at_fault(network: nn.Module) -> str | None:
    """The first parameter or buffer that is not finite, or None.

    Examples:
        >>> layer = nn.Linear(2, 2)
        >>> _ = layer.weight.data.fill_(torch.inf)
        >>> weights_at_fault(nn.Sequential(layer))
        'parameter 0.weight'
    """
    for kind, tensors in (("parameter", network.named_parameters()), ("buffer", network.named_buffers())):
        for name, tensor in tensors:
            if not finite(tensor):
                return f"{kind} {name}"
    return None


def gradient_at_fault(network: nn.Module) -> str | None:
    """The parameter nearest to the output whose gradient is not finite, or None; there backward met it first."""
    for name, parameter in reversed(list(network.named_parameters())):
        if parameter.grad is not None and not finite(parameter.grad):
            return f"gradient of {name}"
    return None


def layer_at_fault(network: nn.Module, batch: Any, run: Callable[[], Any]) -> str:
    """The first layer whose output is not finite while `run` calls the network.

    Args:
        network: As it was made, not compiled.
        batch: What it is shown: any nest of tensors.
        run: Does the step's forward pass again, with the same randomness.
    """
    for name, tensor in named_tensors(batch).items():
        if not finite(tensor):
            return name
    with _listening(network) as heard, torch.no_grad():
        run()
    return f"layer {heard[0]}{_by(network, heard[0])}" if heard else "loss"


def _by(network: nn.Module, name: str) -> str:
    """The mechanism of the attention that a layer is, or is a part of, in words; nothing if it is none."""
    parts = name.partition(" (")[0].split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = network.get_submodule(".".join(parts[:length]))
        except AttributeError:
            return ""
        mechanism = getattr(module, "mechanism", None)
        if isinstance(mechanism, Mechanism):
            return f", whose attention is {mechanism.name!r}"
    return ""


def finite(tensor: Tensor) -> bool:
    """Whether all of a tensor is finite."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


@contextmanager
def _listening(network: nn.Module) -> Generator[list[str]]:
    """Names of layers whose outputs are not finite, in the order in which they finish: the innermost first."""
    heard: list[str] = []

    def listen(name: str, layer: nn.Module, given: Any, output: Any) -> None:
        if not heard and not all(finite(tensor) for tensor in _tensors(output)):
            heard.append(f"{name or 'network'} ({type(layer).__name__})")

    handles = [layer.register_forward_hook(partial(listen, name)) for name, layer in network.named_modules()]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def named_tensors(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch, each by the names or numbers that lead to it.

    Examples:
        >>> list(named_tensors({"images": torch.zeros(1), "targets": [torch.zeros(1), {"boxes": torch.zeros(1)}]}))
        ['images', 'targets.0', 'targets.1.boxes']
        >>> list(named_tensors(torch.zeros(1)))
        ['batch']
    """
    found = {".".join(_step(key) for key in path): leaf for path, leaf in tree_flatten_with_path(batch)[0]}
    return {name or "batch": leaf for name, leaf in found.items() if isinstance(leaf, Tensor)}


def _step(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))


def _tensors(output: Any) -> Iterator[Tensor]:
    yield from (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))

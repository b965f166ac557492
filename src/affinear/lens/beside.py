"""Two networks with the same layers side by side: where do their maps differ?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .asking import Seen, overheard, rows_of
from .reading import Around, Reader, Readers, read

Maps = dict[str, Seen]


@dataclass(frozen=True)
class Difference:
    """How far the maps of one layer are apart.

    Attributes:
        name: Of the layer.
        distance: Mean over queries and heads of half the sum of |one weight - the other|: 0 for the same map, 1 for
            maps that look at other keys; more where weights are negative.
        heads: The same for each head.
    """

    name: str
    distance: float
    heads: tuple[float, ...]


def differences(
    teacher: nn.Module, student: nn.Module, call: Callable[[nn.Module], Any], *, rows: int = 64
) -> tuple[Difference, ...]:
    """Compare the attention maps of two networks, layer by layer, each on its own inputs.

    Args:
        teacher: A network whose layers the lens can read, in evaluation mode: timm's, ours, and those of
            transformers that go through its attention interface.
        student: Another with layers of the same names, such as what `affinear.linearize` makes of it.
        call: Calls a network on a batch, such as `lambda network: network(images)`.
        rows: Queries to look at, at most, evenly among all.

    Returns:
        One for each layer that both have and the lens can read, in order.

    Raises:
        ValueError: If there is none.

    Example:
        >>> import affinear, timm, torch
        >>> from affinear.lens.beside import differences
        >>> teacher = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64).eval()
        >>> student, _ = affinear.linearize(teacher, layers=[1])
        >>> images = torch.randn(1, 3, 64, 64)
        >>> found = differences(teacher, student, lambda network: network(images))
        >>> found[0].distance < 1e-6 < found[1].distance
        True
    """
    ours, theirs = _maps(student, call, rows), _maps(teacher, call, rows)
    shared = [name for name in theirs if name in ours and ours[name].weights.shape == theirs[name].weights.shape]
    if not shared:
        raise ValueError("student: expected layers that the teacher has as well and the lens can read, got none")
    found: list[Difference] = []
    for name in shared:
        apart = (ours[name].weights - theirs[name].weights).abs().sum(-1) / 2  # (B, H, R)
        real = (ours[name].real & theirs[name].real)[:, None].to(apart.dtype)
        apart = (apart * real).sum(dim=(0, 2)) / real.sum().clamp(min=1)
        found.append(Difference(name, apart.mean().item(), tuple(apart.tolist())))
    return tuple(found)


@torch.no_grad()
def _maps(model: nn.Module, call: Callable[[nn.Module], Any], rows: int) -> Maps:
    """Some rows of the map of each layer that can be read, of its last call."""
    readers, found = Readers(), Maps()

    def keep(name: str, reader: Reader) -> Callable[..., None]:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
            (look, *_others) = read(reader, layer, args, kwargs, Around())
            chosen = rows_of(look.scene.query.shape[1], rows, look.scene.query.device)
            weights = look.weights(chosen).float()
            found[name] = Seen(weights, weights.new_ones(weights.shape[0], weights.shape[2], dtype=torch.bool))

        return hook

    with ExitStack() as hooks:
        for name, layer in model.named_modules():
            reader = readers.find(layer)
            if reader is not None:
                handle = layer.register_forward_hook(keep(name, reader), with_kwargs=True)
                hooks.callback(handle.remove)
        asked = hooks.enter_context(overheard(model, rows))
        call(model)
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
    found |= asked
    return dict(sorted(found.items(), key=lambda item: order[item[0]]))

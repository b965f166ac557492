"""From the names and shapes in a released checkpoint to ours."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..layers.position import resize_table

# A pattern, and what stands in its place; None for what our networks compute and need not store.
Rule: TypeAlias = tuple[str, str | Callable[[re.Match[str]], str] | None]

# Of the local residual and the classifier, which the InLine families call alike.
INLINE_NAMES: tuple[Rule, ...] = (
    (r"\.residual\.0\.", ".residual.reduce."),
    (r"\.residual\.2\.", ".residual.expand."),
)
HEAD_NAMES: tuple[Rule, ...] = ((r"^head\.(weight|bias)$", r"head.fc.\1"),)


def translate(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A released state dict, or one of ours, in the names and shapes of our network.

    Names that no rule knows stay as they are, for the caller to complain about.
    """
    own = model.state_dict()
    rules: Sequence[Rule] = () if state.keys() <= own.keys() else getattr(model, "released_names", ())
    renamed = {name: tensor for old, tensor in state.items() if (name := rename(old, rules)) is not None}
    renamed = join_query_and_key_value(renamed, own)
    renamed = part_class_position(renamed, own)
    return {name: reshape(tensor, own[name], name) if name in own else tensor for name, tensor in renamed.items()}


def rename(name: str, rules: Sequence[Rule]) -> str | None:
    """The name after all rules; None if one says that it is not needed."""
    for pattern, replacement in rules:
        if replacement is not None:
            name = re.sub(pattern, replacement, name)
        elif re.search(pattern, name):
            return None
    return name


def join_query_and_key_value(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Layers that project queries apart from keys and values, put together where ours do all at once."""
    out = dict(state)
    for name in state:
        before, found, after = name.rpartition(".q.")
        joined = f"{before}.qkv.{after}"
        for streams in (("q", "kv"), ("q", "k", "v")):
            names = [f"{before}.{stream}.{after}" for stream in streams]
            if found and joined in own and all(part in state for part in names):
                out[joined] = torch.cat([out.pop(part) for part in names])
    return out


def part_class_position(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A table that holds the class token's position before the grid's, in two, where ours has two."""
    if "cls_position" not in own or "pos_embed" not in state:
        return state
    out = {name: tensor for name, tensor in state.items() if name != "pos_embed"}
    table = state["pos_embed"]
    return {**out, "cls_position": table[:, :1], "position.table": table[:, 1:]}


def reshape(tensor: Tensor, own: Tensor, name: str) -> Tensor:
    """The tensor in our shape: 1 x 1 convolutions are linear layers here, and position tables fit any size."""
    if tensor.shape == own.shape:
        return tensor
    if [n for n in tensor.shape if n != 1] == [n for n in own.shape if n != 1]:
        return tensor.reshape(own.shape)
    if name.endswith("position.table") and tensor.shape[-1] == own.shape[-1]:
        if tensor.ndim == 3:
            tensor = tensor.unflatten(1, (math.isqrt(tensor.shape[1]), -1))
        return resize_table(tensor, (own.shape[1], own.shape[2]))
    if name.endswith("relative_position_bias_table") and tensor.shape[1] == own.shape[1]:
        before, after = math.isqrt(tensor.shape[0]), math.isqrt(own.shape[0])
        bias = tensor.T.reshape(1, -1, before, before).float()
        bias = F.interpolate(bias, size=(after, after), mode="bicubic", align_corners=False)
        return bias.flatten(2)[0].T.to(tensor.dtype)
    return tensor


def misfits(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """What keeps weights from being those of a network, a few words for every tensor; nothing if they fit.

    Args:
        own: The network's own weights.
        given: What shall take their place, under the same names.

    Example:
        >>> import torch
        >>> misfits({"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(3)})
        ['missing b', 'a is (3,), expected (2,)']
    """
    both = {name: (given[name], tensor) for name, tensor in own.items() if name in given}
    wrong = [f"missing {name}" for name in own if name not in given]
    wrong += [f"unexpected {name}" for name in given if name not in own]
    wrong += [
        f"{name} is {tuple(new.shape)}, expected {tuple(old.shape)}"
        for name, (new, old) in both.items()
        if new.shape != old.shape
    ]
    return wrong + [
        f"{name} is of {new.dtype}, expected {old.dtype}"
        for name, (new, old) in both.items()
        if new.is_floating_point() != old.is_floating_point()
    ]

"""Which few layers are worth leaving softmax: those with which a network says again what it said.

In a trained network a handful of layers look far back, and the others hardly miss it. They are found by trying: each
layer by itself at first, with all others swapped, and then the best of them together, one more each time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .choices import Choices
from .distil import first_tensor
from .swap import apply, find

M = TypeVar("M", bound=nn.Module)
AMONG = 10  # layers that are tried again once each has been tried by itself
Told = Callable[[int, int], None]


@dataclass(frozen=True)
class Left:
    """A layer that stays softmax.

    Attributes:
        name: Where it is.
        cost: What the network costs with this layer and those before it in the list left alone.
    """

    name: str
    cost: float


def layers_to_leave(
    teacher: nn.Module,
    call: Callable[[nn.Module], Any],
    count: int,
    choices: Choices,
    *,
    among: int = AMONG,
    told: Told | None = None,
) -> tuple[Left, ...]:
    """The layers of a softmax network that are worth leaving as they are, the most worth first.

    Nothing is learned on the way: every trial is a network swapped with these choices, judged by the divergence of what
    it says from what the teacher says. The networks share their weights, so that trials take no memory of their own.

    Args:
        teacher: A network of timm, transformers or diffusers, in evaluation mode.
        call: Calls a network on some inputs and gives its logits, (..., classes): inputs as those it will work on, as
            long as those and not judged by later.
        count: How many.
        choices: How the others will compute.
        among: After each layer was tried by itself, only so many of the best are tried together.
        told: Is called after each trial with how many are done, and how many there are.

    Returns:
        As many layers as asked for. Hand their names to `affinear.linearize(..., leave=[...])`.

    Raises:
        ValueError: If the network has no more layers than that, or nothing can be swapped.

    Example:
        >>> import timm, torch
        >>> from affinear.linearizing import Choices
        >>> from affinear.linearizing.leaving import layers_to_leave
        >>> teacher = timm.create_model("vit_tiny_patch16_224", depth=3, img_size=64).eval()
        >>> images = torch.randn(2, 3, 64, 64)
        >>> [left] = layers_to_leave(teacher, lambda network: network(images), 1, Choices("mala"))
        >>> left.name in ("blocks.0.attn", "blocks.1.attn", "blocks.2.attn")
        True
    """
    names = [site.name for site in find(teacher) if not site.optional and not site.why_not(choices)]

    @torch.no_grad()
    def said(network: nn.Module) -> Tensor:
        return first_tensor(call(network)).float().flatten(0, -2).log_softmax(-1)

    target = said(teacher)

    def cost(left: Sequence[str]) -> float:
        student = apply(twin(teacher), choices, leave=left)[0].eval()
        return float(F.kl_div(said(student), target, reduction="batchmean", log_target=True))

    return choose(names, count, cost, among=among, told=told)


def choose(
    names: Sequence[str],
    count: int,
    cost: Callable[[Sequence[str]], float],
    *,
    among: int = AMONG,
    told: Told | None = None,
) -> tuple[Left, ...]:
    """So many of some names, one after the other: each time the one with which the cost is least.

    Args:
        names: To choose from.
        count: How many, fewer than there are.
        cost: Of leaving some of them.
        among: How many of the best of the first round take part in the others.
        told: Is called after each trial with how many are done, and how many there are.

    Raises:
        ValueError: If there are not as many, or the cost is not finite.

    Example:
        >>> from affinear.linearizing.leaving import choose
        >>> worth = {"a": 1, "b": 3, "c": 2}
        >>> found = choose(list(worth), 2, lambda left: 6 - sum(map(worth.get, left)))
        >>> ", ".join(left.name for left in found)
        'b, c'
    """
    if not 0 < count < len(names):
        raise ValueError(f"count: expected 1 or more, and fewer than the {len(names)} layers, got {count}")
    if among < count:
        raise ValueError(f"among: expected as many layers as are to be left, {count}, or more, got {among}")
    trials = len(names) + sum(min(among, len(names)) - done for done in range(1, count))
    chosen: list[Left] = []
    left, done = list(names), 0
    for turn in range(count):
        costs: dict[str, float] = {}
        for name in left:
            found = cost([*(one.name for one in chosen), name])
            costs[name] = math.inf if math.isnan(found) else found
            done += 1
            if told is not None:
                told(done, trials)
        ranked = sorted(costs, key=costs.__getitem__)
        if costs[ranked[0]] == math.inf:
            raise ValueError("call: expected finite logits of a network with some layers swapped, got none")
        chosen.append(Left(ranked[0], costs[ranked[0]]))
        left = ranked[1:among] if turn == 0 else [name for name in left if name != ranked[0]]
    return tuple(chosen)


def twin(model: M) -> M:
    """A copy that shares its weights: what is put into it does not change the model, what it learns would."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)

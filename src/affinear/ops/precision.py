"""The type in which sums are kept: wide enough that a hundred thousand half-precision keys do not overflow it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .tracing import has_tangents, is_eager

Result = TypeVar("Result")


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """Tokens in the type in which sums are kept; the tensor itself where it has that type already."""
    return x.to(statistics_dtype(x.dtype))


def exact(x: Tensor) -> AbstractContextManager[object]:
    """A region without autocast, which would round the statistics to half precision, in the backward pass too."""
    # Where autocast is off, nothing is done, which is quicker; the meta device knows no autocast.
    on = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if on else nullcontext()


def exactly(call: Callable[..., Result], like: Tensor, *arguments: Any, anew: bool) -> Result:
    """`call(*arguments)` without autocast on the device of a tensor, forwards and, if done `anew`, backwards.

    A backward pass inside the region has autocast for every operation of the plain graph. So the graph is made anew in
    the backward pass, where it can be kept out: for calls that have no parameters but their arguments.
    """
    if like.is_meta or not torch.is_autocast_enabled(like.device.type):
        return call(*arguments)
    if anew and is_eager() and torch.is_grad_enabled() and not has_tangents():
        leaves, layout = pytree.tree_flatten(arguments)
        if any(isinstance(x, Tensor) and x.requires_grad for x in leaves):
            found: list[pytree.TreeSpec] = []
            outputs = _Exactly.apply(call, layout, found, *leaves)
            return pytree.tree_unflatten(outputs, found[0])  # pyright: ignore[reportArgumentType]
    with exact(like):
        return call(*arguments)


class _Exactly(torch.autograd.Function):
    """A call, and the same call once more in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Callable[..., Any],
        layout: pytree.TreeSpec,
        found: list[pytree.TreeSpec],
        *leaves: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.call, ctx.layout = call, layout
        ctx.save_for_backward(*leaves)
        outputs, spec = _call(call, layout, leaves)
        found.append(spec)
        ctx.mark_non_differentiable(*(x for x in outputs if x is not None and not x.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        with exact(ctx.saved_tensors[0]):
            with torch.enable_grad():
                # By other names: a gradient taken to them goes no further, even where one came of another.
                leaves = [None if x is None else x.view_as(x) for x in ctx.saved_tensors]
                outputs, _ = _call(ctx.call, ctx.layout, leaves)
            pairs = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if x is not None and x.requires_grad]
            wanted = [x for x in leaves if x is not None and x.requires_grad]
            given = torch.autograd.grad(
                [x for x, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                create_graph=create_graph,
                allow_unused=True,
                materialize_grads=True,
            )
        rest = iter(given)
        return None, None, None, *(next(rest) if x is not None and x.requires_grad else None for x in leaves)


def _call(
    call: Callable[..., Any], layout: pytree.TreeSpec, leaves: Any
) -> tuple[list[Tensor | None], pytree.TreeSpec]:
    """Results of a call as a list, and how they belong together."""
    leaf = next(x for x in leaves if x is not None)
    with exact(leaf):
        return pytree.tree_flatten(call(*pytree.tree_unflatten(leaves, layout)))

"""Whether numbers and lengths are there to look at, or somebody else is looking at the operations."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def is_compiling() -> bool:
    """Under `torch.compile` and `torch.export`, where a length may stand for any length."""
    return torch.compiler.is_compiling()


def is_exporting() -> bool:
    """Under `torch.export`, whose graphs are kept."""
    return torch.compiler.is_exporting()


# Asked as it is and not traced: compilers before torch 2.13 take it for true in every graph they trace.
is_exporting._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def is_transformed() -> bool:
    """Inside `torch.func`, where a tensor may stand for many tensors."""
    return torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage]


def has_tangents() -> bool:
    """Inside `torch.autograd.forward_ad`, where numbers may come with directions."""
    return forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]


def stands_for_many(x: torch.Tensor) -> bool:
    """Whether a tensor is a batch in disguise, as gradients are under `is_grads_batched`."""
    return torch._C._functorch.is_batchedtensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)  # pyright: ignore


def is_eager() -> bool:
    """Neither of the two."""
    return not (is_compiling() or is_transformed())

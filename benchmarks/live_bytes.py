"""The most bytes that tensors take at once, counted as they come and go; on the meta device as well, where none do."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within, memory counts from the operator that asks for it until nobody holds it; views are no memory of their own.

    What an operator takes for itself while it runs is not seen.

    Args:
        there: Tensors that were there before, which do not count.

    Attributes:
        now: Bytes that are held.
        most: The most there were.

    Example:
        >>> with LiveBytes() as live:
        ...     x = torch.zeros(100, device="meta")
        ...     total = (x + 1).sum()
        >>> live.now, live.most
        (404, 804)
    """

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.most = 0
        self._held = {_place(tensor.untyped_storage()) for tensor in there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and look at what it made."""
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        self.most = max(self.most, self.now)
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        place, size = _place(storage), storage.nbytes()
        if place not in self._held:
            self._held.add(place)
            self.now += size
            weakref.finalize(storage, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self._held.remove(place)
        self.now -= size


def _place(storage: torch.UntypedStorage) -> int:
    return storage._cdata  # pyright: ignore[reportPrivateUsage]

"""Launch a call the long way and prepared, with Triton's own kernels and a launcher that notes what it is called with.

For a process of its own, in which nothing is interpreted: a stand-in for the driver names a chip that is not there.
"""

from __future__ import annotations

import tempfile
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver

build_kernels: Any = import_module("build_kernels")  # a script; before the library, which it tells where it is

import affinear as af  # noqa: E402
from affinear.ops.triton import plans  # noqa: E402

seen: list[tuple[Any, ...]] = []


class Launcher:
    """Notes what Triton's launcher would be called with, but for what is meant for those who watch."""

    def __init__(self, src: Any, metadata: Any):
        self.name = src.name

    def __call__(
        self, x: int, y: int, z: int, stream: int, function: Any, metadata: Any, _told: Any, _enter: Any, _leave: Any,
        *arguments: Any,
    ) -> None:  # fmt: skip
        """Note it."""
        places = [one.data_ptr() if isinstance(one, Tensor) else one for one in arguments]
        seen.append((self.name, (x, y, z), stream, function, metadata, places))


def main() -> None:
    """Compare the launches of a first call and of a third one, forwards and backwards."""
    chip = build_kernels.CHIPS["sm_90"]
    build_kernels.stop_after("llir", chip)
    elsewhere: Any = build_kernels.Elsewhere(chip.target)
    elsewhere.launcher_cls = Launcher
    elsewhere.utils = SimpleNamespace(
        load_binary=lambda *_: (1, 2, 0, 0, 1024), get_device_properties=lambda _: {"max_shared_mem": chip.shared}
    )
    driver.set_active(elsewhere)
    ran, run = list[plans.Plan](), plans.run
    plans.current_stream = lambda device: 0
    plans.run = lambda plan, *rest: ran.append(plan) or run(plan, *rest)
    tokens: Any = [torch.zeros(2, 40, 2, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    grad = torch.zeros_like(tokens[0])
    turns = list[list[Any]]()
    with tempfile.TemporaryDirectory() as knobs.cache.dir:
        for _ in range(3):
            seen.clear()
            torch.autograd.grad(af.attention(*tokens, backend="triton"), tokens, grad)
            turns.append([told({x.data_ptr() for x in (*tokens, grad)}, *launch) for launch in seen])
    assert len(ran) == 3
    assert turns[0] == turns[2], (turns[0], turns[2])
    print([launch[0] for launch in turns[0]])  # noqa: T201


def told(inputs: set[int], *launch: Any) -> tuple[Any, ...]:
    """A launch without the addresses of what was made for it."""
    *rest, places = launch
    return *rest, ["made" if isinstance(x, int) and x > 2**32 and x not in inputs else x for x in places]


if __name__ == "__main__":
    main()

"""Processes that share images: groups of them, each process of a group with a strip of every image of its part.

A batch is cut up among the groups, not among the processes. In a group all see the same images and draw the same random
numbers, and their losses are the same, so that gradients averaged over all processes are those of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Context:
    """Which group this process belongs to.

    Attributes:
        index: Which part of every batch is this group's.
        parts: How many groups share a batch.
        mesh: The processes of the group, from the top of the image to its bottom; None for a group of one.
    """

    index: int
    parts: int
    mesh: DeviceMesh | None = None

    @property
    def size(self) -> int:
        """Processes of a group."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def sharers(self) -> str:
        """What a batch is cut up among, for people."""
        return "processes" if self.mesh is None else "groups of processes"

    def spread(self, network: nn.Module) -> nn.Module:
        """A network that takes whole images and looks at this process's strip of them, in place."""
        if self.mesh is None:
            return network
        from ..models.parallel import cut, parallelize

        mesh = self.mesh

        def strip(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return cut(given[0], module, mesh), *given[1:]

        parallelize(network, mesh)
        network.register_forward_pre_hook(strip)
        return network

    def loader(self, accelerator: Accelerator, batches: DataLoader[Any]) -> Any:
        """A loader of which each group has its part."""
        if self.mesh is None:
            return accelerator.prepare(batches)
        return prepare_data_loader(
            batches,
            accelerator.device,
            num_processes=self.parts,
            process_index=self.index,
            split_batches=True,
            put_on_device=True,
            rng_types=[],
            dispatch_batches=False,
            non_blocking=True,
        )

    def counting(self, accelerator: Accelerator) -> Accelerator:
        """An accelerator that counts every image once, though all processes of a group have seen it."""
        return accelerator if self.mesh is None else cast("Accelerator", _Counting(accelerator, self))


def context_of(accelerator: Accelerator, size: int) -> Context:
    """The group of this process, of so many.

    Raises:
        ValueError: If the processes do not make whole groups.
    """
    processes, rank = accelerator.num_processes, accelerator.process_index
    if size == 1:
        return Context(rank, processes)
    if processes % size:
        raise ValueError(
            f"context_parallel: expected a divisor of the {processes} processes, got {size}; start them with torchrun "
            f"--nproc-per-node {size}, or a multiple of it"
        )
    mesh = init_device_mesh(accelerator.device.type, (processes // size, size), mesh_dim_names=("data", "context"))
    return Context(rank // size, processes // size, mesh["context"])


class _Counting:
    """An accelerator whose sums are those of one process of each group."""

    def __init__(self, accelerator: Accelerator, context: Context) -> None:
        self._accelerator, self._size = accelerator, context.size
        self.process_index = context.index  # so that a group draws the same random numbers

    def reduce(self, tensors: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """As accelerate's, of a tensor or a collection of them; every process of a group has added the same."""
        total: Any = self._accelerator.reduce(tensors, reduction, scale)
        return recursively_apply(self._once, total) if reduction == "sum" else total

    def _once(self, total: Tensor) -> Tensor:
        return total / self._size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

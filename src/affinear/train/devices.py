"""The accelerator of a run, which knows devices and processes, and leaves nothing behind."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    GradientAccumulationPlugin,
    TorchDynamoPlugin,
    parse_flag_from_env,
)

from .recipe import Recipe


def device() -> torch.device:
    """Where this process computes."""
    found = PartialState(cpu=_on_cpu()).device
    assert found is not None
    return found


@contextmanager
def accelerated(recipe: Recipe | None = None) -> Generator[Accelerator]:
    """An accelerator for a recipe that has nothing left open; without one, a plain one to evaluate with.

    Accelerate keeps its settings for the whole process; they are forgotten afterwards, so that another run can have
    others. Processes stay connected.
    """
    _forget()
    try:
        # Backwards in this very thread: with one device, a second one only passes Python from core to core.
        with _fast_float32(), torch.autograd.set_multithreading_enabled(False):
            yield _accelerator(Recipe(precision="no", compile=False) if recipe is None else recipe)
    finally:
        _forget()


def part() -> None:
    """End the connection between processes, once nothing is left to do; torch complains if nobody does."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether each process holds only a part of the weights."""
    return accelerator.distributed_type == DistributedType.FSDP


def peak_memory(on: torch.device) -> int:
    """Bytes at the highest point: of the GPU since the run began, or else of the whole process; 0 if nobody knows."""
    if on.type == "cuda":
        return torch.cuda.max_memory_allocated(on)
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


def _accelerator(recipe: Recipe) -> Accelerator:
    # Every step counts its own parts, whether or not an epoch ends in the middle of one.
    parts = GradientAccumulationPlugin(num_steps=recipe.accumulate, adjust_scheduler=False, sync_with_dataloader=False)
    loading = DataLoaderConfiguration(split_batches=True, dispatch_batches=False, non_blocking=True)
    # Block by block: what all blocks share is compiled once, which takes a fraction of the time for a whole network.
    compiling = TorchDynamoPlugin(
        backend="inductor" if recipe.compile else "no",  # pyright: ignore[reportArgumentType]
        dynamic=False,
        use_regional_compilation=bool(recipe.compile),
    )
    return Accelerator(
        cpu=_on_cpu(),
        mixed_precision=recipe.precision,
        gradient_accumulation_plugin=parts,
        dataloader_config=loading,
        dynamo_plugin=compiling,
        step_scheduler_with_optimizer=False,
        rng_types=[],
    )


def _on_cpu() -> bool:
    # Told so, or processes that torchrun starts where there is no GPU would each take itself for the only one.
    return parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()


def _forget() -> None:
    AcceleratorState._reset_state()  # pyright: ignore[reportPrivateUsage]  # there is no public way
    GradientState._reset_state()  # pyright: ignore[reportPrivateUsage]


@contextmanager
def _fast_float32() -> Generator[None]:
    """Let a GPU multiply float32 in TF32, and cuDNN try its kernels, as long as a run goes."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.benchmark = before[1]

"""The group of ranks behind `mesh=`, and what they must agree on before they exchange anything."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .collectives import gather

Mesh = DeviceMesh | dist.ProcessGroup
NOTE = 256  # bytes of a rank's description of its call


def group_of(mesh: Mesh) -> dist.ProcessGroup:
    """The process group of a mesh of one dimension, or the group itself."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or ("no names",)
            raise ValueError(
                f"mesh: expected one dimension, the one that tokens lie along, got {mesh.ndim} ({', '.join(names)}); "
                f"pass one of them, such as mesh[{names[-1]!r}]"
            )
        return mesh.get_group()
    if isinstance(mesh, dist.ProcessGroup):  # pyright: ignore[reportUnnecessaryIsInstance]
        return mesh
    raise ValueError(
        f"mesh: expected a DeviceMesh of one dimension or a process group, got {type(mesh).__name__}; "
        "torch.distributed.init_device_mesh makes one"
    )


def default_group() -> dist.ProcessGroup:
    """The group of all ranks; a ValueError where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("group: expected torch.distributed to be initialised; call init_process_group first")
    group = dist.group.WORLD
    assert group is not None
    return group


def agree(group: dist.ProcessGroup, note: str, device: torch.device) -> None:
    """Compare what the ranks are about to do; a ValueError on every rank where they differ.

    On a CPU this happens in every call. On a GPU looking at the answer would make the host wait, so that each kind of
    call is compared once.
    """
    if device.type == "cpu":
        _compare(group, note, device)
    else:
        _compare_once(group, note, device)


def _compare(group: dist.ProcessGroup, note: str, device: torch.device) -> None:
    notes = _notes(group, note, device)
    if len(set(notes)) > 1:
        told = "; ".join(f"rank {rank}: {other}" for rank, other in enumerate(notes))
        raise ValueError(f"mesh: expected the same call on every rank but for the number of tokens, got {told}")


_compare_once = lru_cache(maxsize=1024)(_compare)


def _notes(group: dist.ProcessGroup, note: str, device: torch.device) -> list[str]:
    """What every rank wrote."""
    written = note.encode()[:NOTE].ljust(NOTE)
    own = torch.frombuffer(bytearray(written), dtype=torch.uint8).to(device)
    try:
        raw = bytes(gather(own, group).flatten().tolist())
    except RuntimeError as error:
        raise RuntimeError(
            f"mesh: one of the {group.size()} ranks did not answer rank {group.rank()} ({error}); "
            "what it printed last says why"
        ) from error
    return [raw[i : i + NOTE].decode(errors="replace").rstrip() for i in range(0, len(raw), NOTE)]


def all_lengths(group: dist.ProcessGroup, own: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers of every rank, (ranks, numbers), on the host."""
    return gather(torch.tensor(own, device=device), group).cpu()

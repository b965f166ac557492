"""The launches of a whole call, taken down once: a call like it is then some room and these launches, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import launch
from .starting import current_stream, is_watched, remembered
from .statistics import Statistics

APART = (
    256  # bytes from one tensor in a room to the next, or a multiple: what Triton takes for aligned, and a cache line
)


class NotBuiltError(Exception):
    """A launch was never made before, so there is nothing to make again."""


class Launch(NamedTuple):
    """One launch: what Triton calls to make it, for which grid and kernel; which addresses; numbers and constants."""

    run: Callable[..., None]
    grid: tuple[int, int, int]
    kernel: tuple[Any, Any]
    pick: Callable[[list[int]], tuple[int, ...]]
    rest: tuple[Any, ...]


@dataclass(frozen=True)
class Plan:
    """The launches of a call.

    Attributes:
        makes: Shape, strides and dtype of every tensor that a call needs beside its arguments, those it returns first.
        returns: How many of them it returns.
        offsets: Where tensors begin in the room, which is the last of those that are made.
        launches: In order. They pick from the addresses of arguments, of what is made, and of what lies in the room.
    """

    makes: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    returns: int
    offsets: tuple[int, ...]
    launches: tuple[Launch, ...]

    def run(self, device: torch.device, stream: int, places: list[int]) -> list[Tensor]:
        """Make the launches for arguments at these addresses, all aligned."""
        # Which takes a third less time than `torch.empty`.
        made = [torch.empty_strided(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in self.makes]
        places += [x.data_ptr() for x in made]
        if self.offsets:
            room = places[-1]
            places += [room + offset for offset in self.offsets]
        for run, (x, y, z), (function, metadata), pick, rest in self.launches:
            # As `built[grid]` does, less the words for those who watch: 7 µs on the machine of an H200.
            run(x, y, z, stream, function, metadata, None, None, None, *pick(places), *rest)
        return made[: self.returns]


class Tape:
    """Takes launches down instead of making them."""

    def __init__(self, arguments: Sequence[Tensor]):
        """Arguments are told apart as objects, even those that share memory."""
        self.arguments = {id(x): i for i, x in enumerate(arguments)}
        self.made: dict[int, Tensor] = {}  # by their addresses; kept, so that none is given out twice
        self.noted: list[tuple[Any, tuple[int, int, int], tuple[Tensor, ...], tuple[Any, ...]]] = []

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[float, ...],
        **constants: Any,
    ) -> None:
        """Note a launch, as `starting.start` would make it."""
        found = remembered(kernel, tensors, numbers, constants)
        if found is None:
            raise NotBuiltError
        for x in tensors:
            if id(x) not in self.arguments:
                # A view is what it is a view of, if both begin at the same address.
                assert x.data_ptr() == _storage(x)
                self.made.setdefault(_storage(x), x)
        self.noted.append((found.built, grid, tensors, (*numbers, *found.constants)))

    def plan(self, results: Sequence[Tensor]) -> Plan:
        """The plan of what was noted: results are tensors of their own, all else lies in one room."""
        first, makes = len(self.arguments), [(tuple(x.shape), x.stride(), x.dtype) for x in results]
        where = {_storage(x): first + i for i, x in enumerate(results)}
        others = {storage: x for storage, x in self.made.items() if storage not in where}
        offsets, size = lay_out([x.untyped_storage().nbytes() for x in others.values()])
        if others:
            makes.append(((size,), (1,), torch.uint8))
            where |= {storage: first + len(makes) + i for i, storage in enumerate(others)}

        def place(x: Tensor) -> int:
            return self.arguments[id(x)] if id(x) in self.arguments else where[_storage(x)]

        launches = [
            Launch(built.run, grid, (built.function, built.packed_metadata), itemgetter(*map(place, tensors)), rest)
            for built, grid, tensors, rest in self.noted
        ]
        return Plan(tuple(makes), len(results), tuple(offsets), tuple(launches))


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of these sizes begin in a room that holds them all, and how large it is, in bytes.

    Examples:
        >>> lay_out([8, 300, 4])
        ([0, 256, 768], 1024)
    """
    offsets, end = list[int](), 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // APART) * APART
    return offsets, end


def plan_forward(query: Tensor, key: Tensor, value: Tensor, call: launch.Call, keep: bool) -> Plan:
    """The plan of plain attention: answers and, to `keep`, states, in the order of the operator."""
    tokens = [x.detach() for x in (query, key, value)]
    tape = Tape(tokens)
    out, state = launch.attention(*tokens, call._replace(start=tape), keep)
    return tape.plan([out] if state is None else [out, *_listed(state)])


def plan_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, state: Sequence[Tensor], call: launch.Call
) -> Plan:
    """The plan of its gradients, from states in the order of the operator."""
    tokens, state = [x.detach() for x in (grad, query, key, value)], [x.detach() for x in state]
    tape = Tape([*tokens, *state])
    key_mean, value_mean, covariance, count = state
    statistics = Statistics(count, key_mean, value_mean, covariance, None)
    return tape.plan(launch.attention_backward(*tokens, statistics, call._replace(start=tape)))


def _listed(state: Statistics) -> list[Tensor]:
    return [state.key_mean, state.value_mean, state.covariance, state.count]


def run(plan: Plan, device: torch.device, places: list[int]) -> list[Tensor] | None:
    """The results of a plan; None where launches are watched, or another GPU is the current one."""
    stream = None if is_watched() else current_stream(device)
    return None if stream is None else plan.run(device, stream, places)

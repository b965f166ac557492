"""Four collectives with exact gradients: sum, gather, shift along the ranks, and exchange of pieces.

Each is one message, eager or compiled: torch's functional collectives, whose results are awaited where they are needed.
A rank's gradient is that of the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..tracing import is_compiling

_functional: Any = torch.ops._c10d_functional  # pyright: ignore[reportPrivateUsage]


def start_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send x off to be summed over ranks. Only `finish_sum` may touch the result; work in between hides the journey."""
    return _StartSum.apply(_at_hand(x, group), group.group_name)  # pyright: ignore[reportReturnType]


def finish_sum(pending: Tensor, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """The sum that `start_sum` began, on the device of what it was given."""
    return _FinishSum.apply(pending, group.group_name).to(device)  # pyright: ignore


def all_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of x over ranks."""
    return finish_sum(start_sum(x, group), group, x.device)


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The x of every rank, (ranks, ...), in order; all have one shape."""
    return _Gather.apply(_at_hand(x, group), group.group_name, group.size()).to(x.device)  # pyright: ignore


def shift(x: Tensor, step: int, group: dist.ProcessGroup) -> Tensor:
    """The x of the rank `step` before, zeros where there is none."""
    place = group.group_name, group.rank(), group.size()
    return _Shift.apply(_at_hand(x, group), step, *place).to(x.device)  # pyright: ignore


def exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of x (N, ...) in pieces, `sent[r]` of them to rank r; `received[r]` rows of rank r come back, in order."""
    return _Exchange.apply(_at_hand(x, group), list(sent), list(received), group.group_name).to(x.device)  # pyright: ignore


def _at_hand(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What the group can send: gloo takes the host's memory alone for most of its messages."""
    return x.cpu() if x.is_cuda and not is_compiling() and dist.get_backend(group) == "gloo" else x


def _launch_sum(x: Tensor, name: str) -> Tensor:
    return _functional.all_reduce(x.contiguous(), "sum", name)


def _wait(x: Tensor) -> Tensor:
    return _functional.wait_tensor(x)


class _StartSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return _launch_sum(x, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # The other half sent it off: what lies between the two is differentiated while it travels.
        return _FinishSum.apply(grads[0], ctx.name), None  # pyright: ignore[reportReturnType]


class _FinishSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Tensor, name: str) -> Tensor:
        ctx.name = name
        return _wait(pending.view_as(pending))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _StartSum.apply(grads[0], ctx.name), None  # pyright: ignore[reportReturnType]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, size: int) -> Tensor:
        ctx.args = name, size
        return _wait(_functional.all_gather_into_tensor(x.contiguous()[None], size, name))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _ReduceScatter.apply(grads[0], *ctx.args), None, None  # pyright: ignore[reportReturnType]


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, size: int) -> Tensor:
        ctx.args = name, size
        return _wait(_functional.reduce_scatter_tensor(x.contiguous(), "sum", size, name))[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(grads[0], *ctx.args), None, None  # pyright: ignore[reportReturnType]


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: int, name: str, rank: int, size: int) -> Tensor:
        ctx.args = -step, name, rank, size
        sent, received = [0] * size, [0] * size
        if 0 <= rank + step < size:
            sent[rank + step] = x.numel()
        if 0 <= rank - step < size:
            received[rank - step] = x.numel()
        came = _wait(_functional.all_to_all_single(x.flatten()[: sum(sent)], received, sent, name))
        return came.view_as(x) if sum(received) == x.numel() else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Shift.apply(grads[0], *ctx.args), None, None, None, None  # pyright: ignore[reportReturnType]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], name: str) -> Tensor:
        ctx.args = received, sent, name
        return _wait(_functional.all_to_all_single(x.contiguous(), received, sent, name))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(grads[0], *ctx.args), None, None, None  # pyright: ignore[reportReturnType]

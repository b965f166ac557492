"""Passes over maps as operators of torch. Nothing here needs Triton until one of them runs.

Maps are (B, H, W, C), or (1, B, H, W, C) where a compiler is told of them; see `ops.depthwise`. A compiler is shown the
launches inside, and makes them itself: no Python of ours is left in a compiled network.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tracing import is_exporting
from . import library
from .library import INTERPRETED, LIBRARY, ONCE_ONLY, Function

_TAPS = "Tensor x, Tensor weight, Tensor? bias"
SCHEMAS = {
    "depthwise": f"({_TAPS}, bool itself, Tensor? added, Tensor? gate, bool flip) -> Tensor",
    "depthwise_gate_backward": f"(Tensor grad, {_TAPS}, Tensor? added, Tensor gate) -> (Tensor, Tensor)",
    "depthwise_taps_backward": "(Tensor grad, Tensor x, Tensor weight) -> (Tensor, Tensor)",
}
for _name, _schema in SCHEMAS.items():
    LIBRARY.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    library.OPERATORS[_name] = getattr(torch.ops.affinear, _name).default


def _convolving() -> Any:
    from . import convolving

    return convolving


def _dense(x: Tensor | None) -> Tensor | None:
    """The map with its channels side by side, and the columns of a row within what kernels count with 32 bits."""
    if x is None or (x.stride(-1) == 1 and x.shape[-2] * x.stride(-2) < library.FARTHEST):
        return x
    return x.contiguous()


def _depthwise(
    x: Tensor, weight: Tensor, bias: Tensor | None, itself: bool, added: Tensor | None, gate: Tensor | None, flip: bool
) -> Tensor:
    return _convolving().convolve(
        _dense(x), weight.contiguous(), bias, itself=itself, added=_dense(added), gate=_dense(gate), flip=flip
    )


def _gate_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None, gate: Tensor
) -> tuple[Tensor, Tensor]:
    return _convolving().gate_gradients(
        _dense(grad), _dense(x), weight.contiguous(), bias, _dense(added), _dense(gate)
    )  # fmt: skip


def _taps_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return _convolving().taps_gradient(_dense(grad), _dense(x), weight)


def _map_like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _implement(name: str, function: Function, shapes: Function) -> None:
    """Register what runs an operator, what knows the shapes of its results, and what a compiler is shown of it."""
    from torch._subclasses.functional_tensor import FunctionalTensorMode

    def run(first: Tensor, *rest: Any) -> Any:
        if first.numel() == 0:
            return shapes(first, *rest)
        return library.on_device(function, first, *rest)

    def show(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # Whoever keeps the graph wants operators and not launches.
        if is_exporting() or args[0].device.type != "cuda":
            return mode.__torch_dispatch__(op, types, args, kwargs)
        with mode:
            return function(*args)

    full = f"affinear::{name}"
    torch.library.register_fake(full, shapes, lib=LIBRARY)
    torch.library.register_torch_dispatch(full, FunctionalTensorMode, show, lib=LIBRARY)
    for device in ("CUDA", "CPU") if INTERPRETED else ("CUDA",):
        LIBRARY.impl(name, run, device)
    library.RUNS[name] = run


def _depthwise_shapes(x: Tensor, *_rest: Any) -> Tensor:
    return _map_like(x)


def _gate_shapes(grad: Tensor, x: Tensor, *_rest: Any) -> tuple[Tensor, Tensor]:
    return _map_like(x), _map_like(x)


def _taps_shapes(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return weight.new_empty(weight.shape), weight.new_empty(weight.shape[:1])


_implement("depthwise", _depthwise, _depthwise_shapes)
_implement("depthwise_gate_backward", _gate_backward, _gate_shapes)
_implement("depthwise_taps_backward", _taps_backward, _taps_shapes)


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        library.keep(ctx, args, ())
        return library.run_plainly("depthwise", *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, weight, bias, itself, added, gate, flip), _ = library.kept_by(ctx)
        grad, grad_gate = grads[0], None
        if flip:
            raise RuntimeError(ONCE_ONLY)
        if gate is not None:
            grad_gate, grad = _gate_backward_once(grad, x, weight, bias, added, gate)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = depthwise(grad, weight, None, itself, None, None, True)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            grad_weight, grad_bias = _taps_backward_once(grad, x, weight)
        return library.for_all(
            ctx,
            grad_x,
            grad_weight,
            None if bias is None else grad_bias,
            None,
            None if added is None else grad,
            grad_gate,
        )


_gate_backward_once = library.once("depthwise_gate_backward")
_taps_backward_once = library.once("depthwise_taps_backward")
depthwise = library.differentiate("depthwise", _Depthwise.apply)

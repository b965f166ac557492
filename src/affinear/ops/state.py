"""The state of a linear attention: all that a query needs to know about any number of keys and values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from .mechanisms import Mechanism, find, mechanisms
from .tracing import is_eager


@dataclass(frozen=True, eq=False)
class State:
    """Count, means and covariance of keys and values. States of disjoint tokens merge exactly with `+` or `sum`.

    Statistics are float32, or float64 where the tokens were float64. B is the batch (packed sequences: their number),
    H the number of key/value heads, F the width of the features, E the width of the values.

    Attributes:
        count: Number of keys, (B, H), int64.
        key_mean: Mean feature of the keys, (B, H, F), before any rotation.
        value_mean: Mean value, (B, H, E).
        covariance: Mean of (phi(k) - its mean) (v - v_mean)^T, (B, H, F, E), of the rotated features if there are any.
        mechanism: What made the features.
        rotated_key_mean: Mean of the rotated features, (B, H, F), or None without rotary positions.
        rest: What merging has rounded off the means and the covariance, in the order in which they stand here, None
            where nobody kept it. Later merges take it in, so that a million of them are as good as one call. It may be
            dropped at any time: pytrees do not carry it; the kernel that decodes does.

    Example:
        >>> import torch, affinear as af
        >>> k, v = torch.randn(2, 1, 100, 4, 8).unbind()
        >>> state = af.summarize(k[:, :30], v[:, :30]) + af.summarize(k[:, 30:], v[:, 30:])
        >>> torch.allclose(state.covariance, af.summarize(k, v).covariance, atol=1e-5)
        True
        >>> state.count.tolist()
        [[100, 100, 100, 100]]
    """

    count: Tensor
    key_mean: Tensor
    value_mean: Tensor
    covariance: Tensor
    mechanism: Mechanism
    rotated_key_mean: Tensor | None = None
    rest: tuple[Tensor | None, ...] | None = None

    @property
    def centre(self) -> Tensor:
        """The mean that the covariance was taken about on the key side."""
        return self.key_mean if self.rotated_key_mean is None else self.rotated_key_mean

    @property
    def dtype(self) -> torch.dtype:
        """Type of the statistics."""
        return self.covariance.dtype

    @property
    def device(self) -> torch.device:
        """Where the state lives."""
        return self.covariance.device

    def __add__(self, other: State) -> State:
        if not isinstance(other, State):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        _check_mergeable(self, other)
        return merge(self, other)

    def __radd__(self, other: object) -> State:
        # sum(...) starts from the integer zero.
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        # By the name of a registered mechanism, so that `torch.load` reads a state as safely as it reads a tensor.
        children, (mechanism, rotary) = _flatten(self)
        known = mechanisms().get(mechanism.name) == mechanism
        return _load, (mechanism.name if known else mechanism, rotary, *children, *(self.rest or ()))

    def __repr__(self) -> str:
        # Shapes, not numbers: a covariance fills the screen.
        names = ("count", "key_mean", "value_mean", "covariance", "rotated_key_mean")
        tensors = ((name, getattr(self, name)) for name in names)
        shapes = ", ".join(f"{name}={tuple(x.shape)}" for name, x in tensors if x is not None)
        return f"State({self.mechanism.name!r}, {shapes}, dtype={self.dtype}, device={str(self.device)!r})"

    def to(self, *args: Any, **kwargs: Any) -> State:
        """Move or cast as `Tensor.to` does; the count moves but stays int64."""
        moved = self.map(lambda x: x.to(*args, **kwargs) if x.is_floating_point() else x)
        return replace(moved, count=moved.count.to(moved.device))

    def detach(self) -> State:
        """The same numbers, cut off from the graph: what a training loop over long streams carries on."""
        return self.map(Tensor.detach)

    def map(self, function: Callable[[Tensor], Tensor]) -> State:
        """The state with the function applied to each of its tensors."""
        children, context = _flatten(self)
        mapped = _unflatten([function(child) for child in children], context)
        if self.rest is None:
            return mapped
        return replace(mapped, rest=tuple(None if x is None else function(x) for x in self.rest))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the state to a safetensors file, which holds numbers and the mechanism's name, and no code.

        Args:
            path: A file that does not exist yet. It appears under its name when it is whole.

        Returns:
            The path.

        Raises:
            ValueError: If the file exists, or the mechanism is not registered.
            FileNotFoundError: If its folder does not exist.

        Example:
            >>> import tempfile, torch, affinear as af
            >>> parts = torch.randn(3, 2, 1, 1000, 4, 8)  # a data set in three shards of keys and values
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     files = [af.summarize(*part).save(f"{folder}/{i}.safetensors") for i, part in enumerate(parts)]
            ...     whole = sum(map(af.State.load, files))
            >>> whole.count[0, 0].item()
            3000
        """
        from . import files

        return files.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> State:
        """The state that `save` wrote, on the CPU.

        Raises:
            ValueError: If the file is not such a state, or its mechanism is not registered.
            FileNotFoundError: If there is no such file.
        """
        from . import files

        tensors, mechanism = files.load(path)
        return State(mechanism=mechanism, **tensors)  # pyright: ignore[reportArgumentType]

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> State:
        """Merge the states of all ranks of a group; every rank gets the whole.

        What travels is the state, F * E + F + E + 1 numbers per head (F more with rotary positions), whatever the
        number of tokens. The result is differentiable: a rank's gradient is that of the sum of all ranks' losses. As
        with every collective, all ranks take part or none does, in the backward pass too.

        Args:
            group: A `torch.distributed` process group; None is the default one.

        Returns:
            The state of all ranks' tokens.

        Example:
            >>> import torch, affinear as af
            >>> def attention_over_all_ranks(query, key, value):  # each rank holds its own tokens
            ...     return af.attend(query, af.summarize(key, value).all_reduce())
        """
        from .distributed.group import default_group
        from .distributed.merging import all_reduce

        return all_reduce(self, default_group() if group is None else group)


def fraction(part: Tensor, whole: Tensor, dtype: torch.dtype) -> Tensor:
    """Part / whole of two counts, zero where there is nothing."""
    return part.to(dtype) / whole.clamp(min=1).to(dtype)


def merge(a: State, b: State) -> State:
    """The state of two disjoint sets of tokens; leading dimensions broadcast.

    It is the first state moved towards the second, a little if that is small: what rounding takes off the sum is kept.
    """
    count = a.count + b.count
    share_a, share_b = (fraction(x.count, count, a.dtype)[..., None] for x in (a, b))
    rests = [(None,) * 4 if x.rest is None else x.rest for x in (a, b)]
    away = [_away(*pair) for pair in zip(_floats(a), _floats(b), *rests, strict=False)]
    away[2] = away[2] + outer(share_a * away[0 if a.rotated_key_mean is None else 3], away[1])
    keep = is_eager() or a.rest is not None or b.rest is not None  # a traced loop gives what it takes
    found: list[Tensor] = []
    left: list[Tensor] = []
    for i, (old, distance, rest) in enumerate(zip(_floats(a), away, rests[0], strict=False)):
        step = (share_b[..., None] if i == 2 else share_b) * distance
        step = step if rest is None else step + rest
        found.append(old + step)
        if keep:
            left.append(_rounded_off(old, step, found[-1]))
    key_mean, value_mean, covariance, *rotated = found
    return State(
        count, key_mean, value_mean, covariance, a.mechanism, next(iter(rotated), None), tuple(left) if keep else None
    )


def _floats(state: State) -> list[Tensor]:
    """Means and covariance, in the order of `State.rest`."""
    found = [state.key_mean, state.value_mean, state.covariance]
    return found if state.rotated_key_mean is None else [*found, state.rotated_key_mean]


def _away(a: Tensor, b: Tensor, rest_a: Tensor | None, rest_b: Tensor | None) -> Tensor:
    """How far b is from a, with what was rounded off either."""
    away = b - a
    away = away if rest_b is None else away + rest_b
    return away if rest_a is None else away - rest_a


def _rounded_off(x: Tensor, y: Tensor, total: Tensor) -> Tensor:
    """What x + y has and its rounded sum lacks, exactly, whichever is larger; nothing where that is not finite."""
    x, y, total = x.detach(), y.detach(), total.detach()
    second = total - x
    return ((x - (total - second)) + (y - second)).nan_to_num(0.0, 0.0, 0.0)


def outer(x: Tensor, y: Tensor) -> Tensor:
    """Every product of an entry of x (..., F) and one of y (..., E)."""
    return x[..., :, None] * y[..., None, :]


def check_fits_together(state: State, name: str = "state") -> None:
    """Shapes, types and devices of a state that somebody may have made by hand."""
    shape = tuple(state.covariance.shape)
    # Inside vmap there are fewer dimensions than (B, H, F, E).
    lead, (features, values) = shape[:-2], shape[-2:] if len(shape) >= 2 else (0, 0)
    expected = {"count": lead, "key_mean": (*lead, features), "value_mean": (*lead, values)}
    if state.rotated_key_mean is not None:
        expected["rotated_key_mean"] = (*lead, features)
    for part, wanted in expected.items():
        x: Tensor = getattr(state, part)
        if tuple(x.shape) != wanted or len(shape) < 2:
            raise ValueError(
                f"{name}: expected {part} of shape {wanted} beside a covariance (B, H, F, E) of shape {shape}, got "
                f"{tuple(x.shape)}; let summarize make states"
            )
        dtype = torch.int64 if part == "count" else state.dtype
        if x.dtype != dtype or x.device != state.device:
            raise ValueError(
                f"{name}: expected {part} in {dtype} on {state.device}, got {x.dtype} on {x.device}; "
                "move the whole state with .to()"
            )


def _check_mergeable(a: State, b: State) -> None:
    check_fits_together(a)
    check_fits_together(b)
    if a.mechanism is not b.mechanism and a.mechanism != b.mechanism:
        raise ValueError(
            f"state: expected two states of one mechanism, got {a.mechanism.name!r} and {b.mechanism.name!r}; "
            "summarize both with the same one"
        )
    if (a.rotated_key_mean is None) != (b.rotated_key_mean is None):
        raise ValueError(
            "state: expected both states with rotary or both without, got one of each; pass rotary= to both"
        )
    if a.covariance.shape != b.covariance.shape:
        raise ValueError(
            f"state: expected covariances of one shape (B, H, F, E), got {tuple(a.covariance.shape)} and "
            f"{tuple(b.covariance.shape)}; merge states of the same batch, heads and widths"
        )
    if a.dtype != b.dtype or a.device != b.device:
        raise ValueError(
            f"state: expected one dtype and device, got {a.dtype} on {a.device} and {b.dtype} on {b.device}; "
            "move one with .to()"
        )


_Context = tuple[Mechanism, bool]


def _flatten(state: State) -> tuple[list[Tensor], _Context]:
    children = [state.count, state.key_mean, state.value_mean, state.covariance]
    if state.rotated_key_mean is not None:
        children.append(state.rotated_key_mean)
    return children, (state.mechanism, state.rotated_key_mean is not None)


def _flatten_with_keys(state: State) -> tuple[list[tuple[Any, Tensor]], _Context]:
    children, context = _flatten(state)
    names = ("count", "key_mean", "value_mean", "covariance", "rotated_key_mean")
    return [(pytree.GetAttrKey(name), child) for name, child in zip(names, children, strict=False)], context


def _unflatten(children: Iterable[Tensor], context: _Context) -> State:
    count, key_mean, value_mean, covariance, *rotated = children
    return State(count, key_mean, value_mean, covariance, context[0], rotated[0] if context[1] else None)


pytree.register_pytree_node(
    State,
    _flatten,
    _unflatten,
    serialized_type_name="affinear.State",
    to_dumpable_context=lambda context: (context[0].name, context[1]),
    from_dumpable_context=lambda dumped: (find(dumped[0]), dumped[1]),
    flatten_with_keys_fn=_flatten_with_keys,
)


def _load(mechanism: str | Mechanism, rotary: bool, *children: Any) -> State:
    number = 5 if rotary else 4
    state = _unflatten(children[:number], (find(mechanism), rotary))
    return replace(state, rest=children[number:]) if len(children) > number else state


torch.serialization.add_safe_globals([_load])

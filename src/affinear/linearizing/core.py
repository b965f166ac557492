"""What stands in softmax's place: linear attention of a teacher's queries, keys and values, and what it learns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..ops import Mechanism, State
from ..ops.mechanisms import identity
from ..ops.precision import exact, widen
from ..ops.tracing import is_eager
from .choices import Choices
from .sums import running_sum
from .window import Memory, near_and_around, near_and_far

EPSILON = 1e-6


@dataclass(frozen=True)
class Shape:
    """Heads of a layer.

    Attributes:
        heads: Of queries.
        key_heads: Of keys and values, a divisor of `heads`.
        width: Channels of a query or key.
        value_width: Channels of a value.
    """

    heads: int
    key_heads: int
    width: int
    value_width: int


class LinearCore(nn.Module):
    """Linear attention of queries, keys and values that were projected for softmax.

    Queries are taken at the size that softmax's usual scale, D ** -0.5, goes with: where the teacher has another scale,
    or has scaled them already, they are brought back to it. A mechanism that reads their magnitude then reads the same
    in every network.

    Args:
        choices: The mechanism, and what is learned.
        shape: Of the heads. None where nothing is learned.
        prefix_tokens: Of tokens that lie on a square grid, how many stand before it; None for tokens in a line.
        device: Where what is learned lives.
        dtype: Its dtype.

    Example:
        >>> import torch
        >>> from affinear.linearizing import Choices, LinearCore
        >>> q, k, v = torch.randn(3, 2, 50, 4, 16).unbind()
        >>> LinearCore(Choices("nala"))(q, k, v).shape
        torch.Size([2, 50, 4, 16])
    """

    def __init__(
        self,
        choices: Choices,
        shape: Shape | None = None,
        *,
        prefix_tokens: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.choices, self.shape, self.prefix_tokens = choices, shape, prefix_tokens
        self.rule = None if choices.mechanism == "none" else _rule(choices)
        self.query_map = self.key_map = self.gain = self.norm = self.mass = self.kernel = None
        linear = self.rule is not None  # of a window alone nothing is learned that only a linear part has
        maps, gain, mass = linear and choices.feature_map != "own", linear and choices.gain, linear and choices.window
        if not (maps or gain or mass or choices.norm or choices.convolution):
            return
        if shape is None:
            raise ValueError("shape: expected the heads of the layer, as something per head is learned, got None")

        def per_head(heads: int, value: float) -> nn.Parameter:
            return nn.Parameter(torch.full((heads,), value, device=device, dtype=dtype))

        if maps:
            eye = torch.eye(shape.width, device=device, dtype=dtype)
            self.query_map = nn.Parameter(eye.repeat(shape.heads, 1, 1))
            self.key_map = nn.Parameter(eye.repeat(shape.key_heads, 1, 1))
        if gain:
            self.gain = per_head(shape.heads, 1.0)
        if choices.norm:
            self.norm = per_head(shape.heads, 0.0)
        if mass:
            self.mass = per_head(shape.heads, 0.0)
        if choices.convolution:
            sides = (choices.convolution,) * (1 if prefix_tokens is None else 2)
            channels = shape.key_heads * shape.value_width
            self.kernel = nn.Parameter(torch.zeros(channels, 1, *sides, device=device, dtype=dtype))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        causal: bool = False,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """Answers (B, N, H, E).

        Args:
            query: (B, N, H, D).
            key: (B, M, G, D), G a divisor of H.
            value: (B, M, G, E).
            scale: What the teacher multiplies its scores with; None is D ** -0.5.
            causal: Whether query i sees keys 0 to i only. Needs N = M.
            key_mask: (B, M), boolean. False takes a key out.
        """
        return self._step(_usual(query, scale), key, value, None, causal, key_mask)[0]

    def step(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        memory: Memory | None,
        *,
        scale: float | None = None,
        causal: bool = True,
        key_mask: Tensor | None = None,
    ) -> tuple[Tensor, Memory]:
        """Answers, and what the tokens to come need to know of these; `memory` is of the tokens before."""
        out, memory = self._step(_usual(query, scale), key, value, memory, causal, key_mask)
        return out, memory.owned() if is_eager() else memory

    def _step(
        self, query: Tensor, key: Tensor, value: Tensor, memory: Memory | None, causal: bool, key_mask: Tensor | None
    ) -> tuple[Tensor, Memory]:
        """The same of queries at their usual size; the memory may be cut from what it was made of."""
        key, value = key.to(query.dtype), value.to(query.dtype)
        if not causal:
            assert memory is None or memory.state is None
            return self._full(query, key, value, key_mask), Memory()
        memory = Memory() if memory is None else memory
        tail = memory.tail
        if self.choices.window:
            out, memory = near_and_far(query, key, value, memory, key_mask, self.choices, self._far, self.mass)
        else:
            out, state = self._linear(query, key, value, True, key_mask, memory.state, keep=True)
            memory = Memory(state=state, seen=memory.seen + key.shape[1])
        out = self._normed(out)
        if self.kernel is not None:
            local, tail = self._before(value, out.shape, key_mask, tail)
            out, memory = out + local.to(out.dtype), replace(memory, tail=tail)
        return out, memory

    def operands(self, query: Tensor, key: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor, Mechanism]:
        """Queries and keys as the operator gets them, and its mechanism: what the lens makes a map of.

        Gain, norm, convolution and window come after it, and are not in that map.
        """
        if self.rule is None:
            raise ValueError('mechanism: expected one that has a map, got "none", a window alone')
        query = _usual(query, scale)
        return self._features(query, self.query_map), self._features(key, self.key_map), self.rule

    def _full(self, query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> Tensor:
        """Answers of tokens that see both ways."""
        if not self.choices.window:
            out = self._linear(query, key, value, False, key_mask, None, keep=False)[0]
        elif query.shape[1] == key.shape[1]:
            out = near_and_around(query, key, value, key_mask, self.choices, self._far, self.mass)
        else:
            raise ValueError(
                f"window: expected as many keys as queries, which are {query.shape[1]}, got {key.shape[1]}; "
                "set it to 0 for networks that attend from one sequence to another"
            )
        out = self._normed(out)
        return out if self.kernel is None else out + self._around(value, out.shape, key_mask).to(out.dtype)

    def _far(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, state: State | None
    ) -> tuple[Tensor, State | None]:
        """The linear part beside a window; nothing where there is none."""
        if self.rule is None:
            return value.new_zeros(*query.shape[:-1], value.shape[-1]), None
        return self._linear(query, key, value, True, mask, state, keep=True)

    def _linear(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        key_mask: Tensor | None,
        state: State | None,
        *,
        keep: bool,
    ) -> tuple[Tensor, State | None]:
        assert self.rule is not None
        mean = None if self.gain is None else _mean_so_far(value, causal, key_mask, state)
        query, key = self._features(query, self.query_map), self._features(key, self.key_map)
        if keep:
            out, state = ops.attention(
                query, key, value, self.rule,
                causal=causal, key_mask=key_mask, initial_state=state, return_state=True,
            )  # fmt: skip
        else:
            out = ops.attention(query, key, value, self.rule, causal=causal, key_mask=key_mask)
        if self.gain is not None and mean is not None:
            mean = mean.repeat_interleave(out.shape[2] // mean.shape[2], dim=2)
            out = (mean + self.gain[:, None] * (out - mean)).to(out.dtype)
        return out, state

    def _features(self, x: Tensor, matrix: Tensor | None) -> Tensor:
        if matrix is None:
            return x
        mapped = torch.einsum("bnhd,hde->bnhe", x, matrix.to(x.dtype))
        if self.choices.feature_map == "learned":
            return mapped.to(x.dtype)
        with exact(mapped):
            wide = widen(mapped)
            return torch.cat((wide.softmax(-1), (-wide).softmax(-1)), dim=-1).to(x.dtype)

    def _normed(self, out: Tensor) -> Tensor:
        if self.norm is None:
            return out
        length = widen(out).square().mean(-1, keepdim=True).add(EPSILON).rsqrt()
        return out + (self.norm[:, None] * (widen(out) * length - out)).to(out.dtype)

    def _before(
        self, value: Tensor, shape: torch.Size, key_mask: Tensor | None, tail: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The convolution of each value and those before it, (B, N, H, E), and the values that the next ones need."""
        assert self.kernel is not None
        back = self.choices.convolution - 1
        if key_mask is not None:
            value = value.masked_fill(~key_mask[..., None, None], 0)
        if tail is None:
            tail = value.new_zeros(value.shape[0], back, *value.shape[2:])
        joined = torch.cat((tail.to(value.dtype), value), dim=1)
        lines = joined.flatten(2).transpose(1, 2)  # (B, C, K - 1 + N)
        out = F.conv1d(lines, self.kernel.to(lines.dtype), groups=lines.shape[1])
        out = out.transpose(1, 2).reshape(*value.shape)
        return out.repeat_interleave(shape[2] // value.shape[2], dim=2), joined[:, joined.shape[1] - back :]

    def _around(self, value: Tensor, shape: torch.Size, key_mask: Tensor | None) -> Tensor:
        """The convolution of each value and its neighbours, (B, N, H, E)."""
        assert self.kernel is not None
        batch, tokens, heads, width = shape
        if value.shape[1] != tokens:
            raise ValueError(
                f"convolution: expected as many keys as queries, which are {tokens}, got {value.shape[1]}; "
                "set it to 0 for networks that attend from one sequence to another"
            )
        if key_mask is not None:
            value = value.masked_fill(~key_mask[..., None, None], 0)
        lines = value.flatten(2).transpose(1, 2)  # (B, C, N)
        kernel, pad = self.kernel.to(lines.dtype), self.choices.convolution // 2
        if self.prefix_tokens is None:
            out = F.conv1d(lines, kernel, padding=pad, groups=lines.shape[1])
        else:
            grid = square(tokens - self.prefix_tokens)
            images = lines[..., self.prefix_tokens :].unflatten(-1, (grid, grid))
            out = F.conv2d(images, kernel, padding=pad, groups=lines.shape[1]).flatten(2)
            out = F.pad(out, (self.prefix_tokens, 0))
        out = out.transpose(1, 2).reshape(batch, tokens, -1, width)
        return out.repeat_interleave(heads // out.shape[2], dim=2)

    def extra_repr(self) -> str:
        """What `print` shows."""
        given = self.choices.as_dict()
        usual = Choices().as_dict()
        told = [f"{name}={value!r}" for name, value in given.items() if name != "mechanism" and value != usual[name]]
        return ", ".join([self.choices.mechanism, *told])


def square(tokens: int) -> int:
    """Side of a square of so many tokens."""
    side = math.isqrt(tokens)
    if side * side != tokens:
        raise ValueError(f"convolution: expected tokens on a square grid, got {tokens}, which is no square")
    return side


def _rule(choices: Choices) -> Mechanism:
    rule = ops.find(choices.mechanism)
    if choices.feature_map == "hedgehog":
        return replace(rule, name=f"{rule.name}_hedgehog", query_map=identity, key_map=identity, scale=1.0)
    return rule


def _usual(query: Tensor, scale: float | None) -> Tensor:
    """Queries at the size that a scale of D ** -0.5 goes with."""
    if scale is None:
        return query
    factor = scale * math.sqrt(query.shape[-1])
    return query if abs(factor - 1) < 1e-6 else query * factor


def _mean_so_far(value: Tensor, causal: bool, key_mask: Tensor | None, state: State | None) -> Tensor:
    """Mean of the values that each query sees, (B, N, G, E), or (B, 1, G, E) where all see the same."""
    wide = widen(value)
    ones = wide.new_ones(wide.shape[:2]) if key_mask is None else key_mask.to(wide.dtype)
    if key_mask is not None:
        wide = wide.masked_fill(~key_mask[..., None, None], 0)
    sums = running_sum(wide) if causal else wide.sum(1, keepdim=True)
    count = (ones.cumsum(1) if causal else ones.sum(1, keepdim=True))[..., None, None]
    if state is not None:
        before = state.count[:, None, :, None].to(wide.dtype)
        sums, count = sums + before * state.value_mean[:, None], count + before
    return sums / count.clamp(min=1)

"""One attention layer; what a paper puts around the operator is a choice of parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..ops import Mechanism
from ..ops.mechanisms import identity
from .branch import Branch
from .convolution import DepthwiseConv
from .padding import masked_mean
from .residual import LocalResidual
from .weighing import weigh_keys


@dataclass(frozen=True)
class Parts:
    """What stands around the operator in one paper's attention layer.

    Attributes:
        mechanism: A registered name, a `Mechanism`, or "none" or None: no attention, only what else stands around it.
        rotary: Whether queries and keys turn with their place on the grid.
        position_kernel: Side of the depthwise convolution of the values that is added (LePE); 0 for none.
        local_residual: Whether InLine's convolution, with kernels made from the mean token, is added.
        norm: Whether the sum is normalised before the gate.
        gate: What multiplies the result: nothing, a linear function of the input, or the SiLU of one.
        weighed: Whether the features of keys are weighed by how the mean query sees them (RALA). Softmax has none.
        branch_kernel: Side of the depthwise convolution of a branch (MILA) from which queries and keys are projected
            and which is itself the values; 0 for none: all are projected from the input.
    """

    mechanism: str | Mechanism | None
    rotary: bool = False
    position_kernel: int = 0
    local_residual: bool = False
    norm: bool = False
    gate: Literal["none", "linear", "silu"] = "none"
    weighed: bool = False
    branch_kernel: int = 0

    def over(self, mechanism: str | Mechanism) -> Parts:
        """The same parts around another mechanism."""
        return replace(self, mechanism=mechanism)


# Stands in where there is no attention; it is in no registry, as it has no weights to look at.
NONE = Mechanism("none", identity, identity, torch.zeros_like, nonnegative=False, paper="the control without attention")
MALA = Parts("mala", rotary=True, position_kernel=5, gate="linear")
NALA = Parts("nala", rotary=True, position_kernel=5, norm=True, gate="silu")
INLINE = Parts("inline", local_residual=True)
RALA = Parts("linear", rotary=True, position_kernel=5, gate="linear", weighed=True)
MILA = Parts("linear", rotary=True, position_kernel=3, gate="silu", branch_kernel=3)
PLAIN = Parts("softmax")


class Attention(nn.Module):
    """Self-attention of tokens that lie on a grid, read row by row, after any number of class tokens.

        out = proj(norm(attention(q, k, v) + conv(v) + residual(v)) * gate)

    Args:
        dim: Channels C.
        num_heads: Heads H, a divisor of C.
        parts: `MALA`, `NALA`, `INLINE`, `RALA` and `MILA` are the papers' layers; any other combination works as well.
        prefix_tokens: Number of class tokens in front, which take part in the attention but not in convolutions.
        qkv_bias: Whether queries, keys, values and gate have a bias.
        proj_drop: Dropout of the output.
        device: Where the weights live.
        dtype: Their dtype.

    Example:
        >>> import torch
        >>> from affinear.layers import INLINE, MALA, Attention, AxialRotary
        >>> tokens = torch.randn(2, 6 * 9, 64)
        >>> rotary = AxialRotary(32)(tokens.unflatten(1, (6, 9)))
        >>> Attention(64, 2, MALA)(tokens, (6, 9), rotary=rotary).shape
        torch.Size([2, 54, 64])
        >>> Attention(64, 2, INLINE.over("softmax"))(tokens, (6, 9)).shape
        torch.Size([2, 54, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        parts: Parts = MALA,
        *,
        prefix_tokens: int = 0,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"num_heads: expected a divisor of dim = {dim}, got {num_heads}")
        self.num_heads, self.parts, self.prefix_tokens = num_heads, parts, prefix_tokens
        self.mechanism = NONE if parts.mechanism in (None, "none", NONE) else ops.find(parts.mechanism)
        self.attends = self.mechanism is not NONE  # kept, since a deep copy of the network has another NONE
        if not self.attends and not parts.position_kernel and not parts.local_residual:
            raise ValueError(
                'mechanism: expected attention, as these parts have no convolution that could stand alone, got "none"; '
                "give them a position_kernel"
            )
        # Without attention there is nothing to ask with or to be found by: values alone, and their gate. A branch has
        # its values already, and the gate is made of what comes before it.
        asking, gated = self.attends, parts.gate != "none"
        streams = 2 * asking + (not parts.branch_kernel) * (1 + gated)
        self.qkv = nn.Identity()
        if streams:
            self.qkv = nn.Linear(dim, streams * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.position = self.residual = self.norm = self.branch = self.gate = None
        if parts.branch_kernel:
            self.branch = Branch(dim, parts.branch_kernel, prefix_tokens, device=device, dtype=dtype)
            if parts.gate != "none":
                self.gate = nn.Linear(dim, dim, bias=qkv_bias, device=device, dtype=dtype)
        if parts.position_kernel:
            self.position = DepthwiseConv(dim, parts.position_kernel, device=device, dtype=dtype)
        if parts.local_residual:
            self.residual = LocalResidual(dim, num_heads, device=device, dtype=dtype)
        if parts.norm:
            self.norm = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    @property
    def linear(self) -> bool:
        """Whether time and memory are linear in the number of tokens."""
        return self.mechanism.gain is not None

    def project(
        self, x: Tensor, grid: tuple[int, int] | None = None, key_mask: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Queries, keys, values and, where there is one, the gate of tokens (B, N, C), each (B, N, H, D).

        Without attention there are neither queries nor keys. Where tokens lie, on which grid and with which mask,
        matters to a branch alone.
        """
        if self.branch is None:
            return self._heads(self.qkv(x))
        if grid is None:
            raise ValueError("grid: expected rows and columns, which the convolution of the branch needs, got None")
        branch = self.branch(x, grid, key_mask)
        asked = self._heads(self.qkv(branch)) if self.attends else ()
        gate = () if self.gate is None else self._heads(self.gate(x))
        return *asked, *self._heads(branch), *gate

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """(B, N, streams * C) as so many streams (B, N, H, D)."""
        return x.unflatten(-1, (-1, self.num_heads, self.proj.in_features // self.num_heads)).unbind(2)

    def operands(
        self, query: Tensor, key: Tensor, rotary: tuple[Tensor, Tensor] | None, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Mechanism, tuple[Tensor, Tensor] | None]:
        """Queries, keys, mechanism and tables as the operator gets them: with weighed keys, features in their place."""
        if not (self.parts.weighed and self.linear):
            return query, key, self.mechanism, rotary
        query, key, mechanism = weigh_keys(query, key, self.mechanism, key_mask)
        if rotary is not None:
            blocks = key.shape[-1] // rotary[0].shape[-1]  # feature maps may double the width
            rotary = torch.cat([rotary[0]] * blocks, dim=-1), torch.cat([rotary[1]] * blocks, dim=-1)
        return query, key, mechanism, rotary

    def forward(
        self,
        x: Tensor,
        grid: tuple[int, int],
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        key_mask: Tensor | None = None,
        mean: Tensor | None = None,
    ) -> Tensor:
        """Tokens (B, N, C) that have looked at each other.

        Args:
            x: Tokens (B, N, C), N = prefix_tokens + rows * columns.
            grid: Rows and columns.
            rotary: Tables (N, D), or (N, H, D), where the parts have positions that turn.
            key_mask: (B, N), False where there is no token; convolutions see zeros there.
            mean: (B, C), what the local residual makes its kernels from; the mean of the tokens if None.
        """
        self._check(x, grid, rotary)
        if not self.attends:
            value, *gates = self.project(x, grid, key_mask)
            out, gate = self._local(x, value.flatten(2), grid, key_mask, mean), _gate(gates)
        else:
            query, key, value, *gates = self.project(x, grid, key_mask)
            answer, value, gate = self._start(query, key, value, rotary, key_mask), value.flatten(2), _gate(gates)
            if self._is_one_pass(key_mask):
                out, gate = self._in_one_pass(answer().flatten(2).to(value.dtype), value, gate, grid)
            else:
                local = None
                if self.position is not None or self.residual is not None:
                    local = self._local(x, value, grid, key_mask, mean)
                out = answer().flatten(2).to(value.dtype)
                out = out if local is None else out + local
        if self.norm is not None:
            out = self.norm(out)
        if gate is not None:
            out = out * (F.silu(gate) if self.parts.gate == "silu" else gate)
        return self.proj_drop(self.proj(out))

    def _start(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        key_mask: Tensor | None,
    ) -> Callable[[], Tensor]:
        """The answers, to be asked for once the convolutions are done: over many devices, states travel meanwhile."""
        query, key, mechanism, rotary = self.operands(query, key, rotary, key_mask)
        value = value.to(query.dtype)
        return partial(ops.attention, query, key, value, mechanism=mechanism, rotary=rotary, key_mask=key_mask)

    def _is_one_pass(self, key_mask: Tensor | None) -> bool:
        """Whether what is added to the answers is one convolution over all tokens, and nothing waits for it."""
        if self.position is None or self.residual is not None:
            return False
        return self.position.one_pass and key_mask is None and not self.prefix_tokens

    def _in_one_pass(
        self, out: Tensor, value: Tensor, gate: Tensor | None, grid: tuple[int, int]
    ) -> tuple[Tensor, Tensor | None]:
        """What `_local` adds, and the gate with it where nothing stands between; else the gate is left to do."""
        assert self.position is not None
        at_once = None
        if gate is not None and self.norm is None and self.parts.gate == "linear":
            at_once, gate = gate.unflatten(1, grid), None
        out = self.position(value.unflatten(1, grid), added=out.unflatten(1, grid), gate=at_once)
        return out.flatten(1, 2), gate

    def _local(
        self, x: Tensor, value: Tensor, grid: tuple[int, int], key_mask: Tensor | None, mean: Tensor | None
    ) -> Tensor:
        """What the convolutions add; nothing to class tokens."""
        if key_mask is not None:
            value = value * key_mask[..., None]
        value = value[:, self.prefix_tokens :].unflatten(1, grid)
        added = [] if self.position is None else [self.position(value)]
        if self.residual is not None:
            added.append(self.residual(masked_mean(x, key_mask) if mean is None else mean, value))
        out = (added[0] if len(added) == 1 else added[0] + added[1]).flatten(1, 2)
        return F.pad(out, (0, 0, self.prefix_tokens, 0)) if self.prefix_tokens else out  # without need it would copy

    def _check(self, x: Tensor, grid: tuple[int, int], rotary: tuple[Tensor, Tensor] | None) -> None:
        if x.shape[1] != self.prefix_tokens + grid[0] * grid[1]:
            raise ValueError(
                f"grid: expected rows x columns = {x.shape[1] - self.prefix_tokens}, the number of tokens"
                f"{' but class tokens' if self.prefix_tokens else ''}, got {grid[0]} x {grid[1]}"
            )
        if (rotary is None) == self.parts.rotary:
            expected, do = ("tables", "pass what AxialRotary gives") if self.parts.rotary else ("None", "leave it out")
            raise ValueError(f"rotary: expected {expected}, as parts.rotary is {self.parts.rotary}; {do}")

    def extra_repr(self) -> str:
        """What `print` shows."""
        if not self.attends:
            return f"no attention, num_heads={self.num_heads}"
        kind = "linear" if self.linear else "softmax, quadratic in tokens"
        kind += ", keys weighed" if self.parts.weighed and self.linear else ""
        return f"{self.mechanism.name} ({kind}), num_heads={self.num_heads}"


def _gate(gates: Sequence[Tensor]) -> Tensor | None:
    """The gate as tokens (B, N, C), where there is one."""
    return gates[0].flatten(2) if gates else None

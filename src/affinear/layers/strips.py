"""Layers over images that lie in strips, each rank holding some rows of every image.

Each class is what a layer of that kind does differently: `adopt` puts it in front of the layer's own class, so that
weights, names and everything else stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..ops.distributed.attention import Call, start_attention
from ..ops.distributed.collectives import all_sum, exchange, gather
from ..ops.distributed.group import all_lengths
from ..ops.precision import widen
from ..ops.rotary import rotate
from .attention import Attention
from .padding import masked_mean
from .position import LearnedPosition, resize_table
from .residual import LocalResidual
from .rotary import AxialRotary


@dataclass(frozen=True)
class Shrinking:
    """How a layer makes fewer rows of many.

    Attributes:
        kernel: Rows that one row is made of.
        stride: Rows from one to the next.
        padding: Rows of zeros above and below; None for as many below as make whole strides.
    """

    kernel: int
    stride: int
    padding: int | None

    def rows(self, height: int) -> int:
        """How many are left of so many."""
        if self.padding is None:
            return -(-height // self.stride)
        return (height + 2 * self.padding - self.kernel) // self.stride + 1


@dataclass
class Strips:
    """Which rows of the images, and of the maps made of them, lie on which rank.

    Attributes:
        group: The ranks, from the top of the image to its bottom.
        shrinkings: What makes the maps of each level out of those of the level before; images are level 0.
        image: Rows of the images on each rank, as they came last.
    """

    group: dist.ProcessGroup
    shrinkings: list[Shrinking] = field(default_factory=list[Shrinking])
    image: tuple[int, ...] = ()

    @property
    def unit(self) -> int:
        """Rows of which every strip but the last has a multiple."""
        return math.prod(step.stride for step in self.shrinkings)

    def __deepcopy__(self, memo: object) -> Strips:
        # A copy of a network, as for an average of its weights, lies on the same ranks.
        return self

    def begin(self, images: Tensor) -> None:
        """Ask all ranks how many rows of these images (B, C, H, W) they have, and check that they fit together."""
        rows = tuple(all_lengths(self.group, (images.shape[2],), images.device)[:, 0].tolist())
        if any(height % self.unit for height in rows[:-1]) or not all(rows):
            raise ValueError(
                f"images: expected strips of a multiple of {self.unit} rows on every rank but the last, which may have "
                f"any number, got {', '.join(map(str, rows))}; affinear.models.parallel.cut makes such strips"
            )
        self.image = rows
        for level in range(len(self.shrinkings) + 1):
            if not all(height > 0 for height in self.rows(level)):
                raise ValueError(
                    f"images: expected a row of the smallest map on every rank, got {', '.join(map(str, rows))} rows "
                    "of images; use fewer ranks for so small an image"
                )

    def rows(self, level: int) -> tuple[int, ...]:
        """Rows of the maps of a level on each rank."""
        ends, total = list(accumulate(self.image)), sum(self.image)
        for step in self.shrinkings[:level]:
            ends, total = [end // step.stride for end in ends], step.rows(total)
            ends[-1] = total
        return tuple(end - start for start, end in zip([0, *ends], ends, strict=False))

    def start(self, level: int) -> int:
        """First row of this rank."""
        return sum(self.rows(level)[: self.group.rank()])

    def with_neighbours(self, x: Tensor, dim: int, level: int, above: int, below: int) -> Tensor:
        """A map with so many rows of the ranks above and below it, zeros beyond the image."""
        rows, rank = self.rows(level), self.group.rank()
        ends = list(accumulate(rows))
        starts = [end - height for end, height in zip(ends, rows, strict=True)]

        def shared(owner: int, taker: int) -> tuple[int, int]:
            """Rows of one rank that another takes, counted from the owner's first."""
            low, high = starts[taker] - above, ends[taker] + below
            first, last = max(low, starts[owner]), min(high, ends[owner])
            return (first - starts[owner], max(last, first) - starts[owner]) if owner != taker else (0, 0)

        x = x.movedim(dim, 0)
        ranks = range(len(rows))
        given, taken = ([shared(rank, other) for other in ranks], [shared(other, rank) for other in ranks])
        sent, received = ([last - first for first, last in pieces] for pieces in (given, taken))
        came = exchange(torch.cat([x[first:last] for first, last in given]), sent, received, self.group)
        top = sum(received[:rank])
        missing = above - top, below - (came.shape[0] - top)
        zeros = [x.new_zeros(max(number, 0), *x.shape[1:]) for number in missing]
        return torch.cat((zeros[0], came[:top], x, came[top:], zeros[1])).movedim(0, dim)

    def mean(self, x: Tensor, weight: Tensor | float) -> Tensor:
        """The mean over ranks of x (B, ...), each of which counts by its weight, (B,) or one number."""
        wide = widen(x)
        n = torch.as_tensor(weight, dtype=wide.dtype, device=x.device).expand(x.shape[0]).view(-1, *[1] * (x.ndim - 1))
        total = all_sum(torch.cat(((n * wide).flatten(1), n.flatten(1)), dim=1), self.group)
        return (total[:, :-1].view_as(wide) / total[:, -1:].clamp(min=1).view_as(n)).to(x.dtype)


if TYPE_CHECKING:
    _Conv2d, _BatchNorm2d, _Module = nn.Conv2d, nn.BatchNorm2d, nn.Module
    _Attention, _Rotary, _Position, _Residual = Attention, AxialRotary, LearnedPosition, LocalResidual
else:  # what they stand in front of is known when they are put there
    _Conv2d = _BatchNorm2d = _Module = _Attention = _Rotary = _Position = _Residual = object


class InStrips:
    """What every layer over strips knows: the strips, and the level of the maps that come in."""

    strips: Strips
    level: int


class StripConv(InStrips, _Conv2d):
    """A convolution that asks its neighbours for the rows it needs."""

    one_pass = False  # of a depthwise one

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        assert not isinstance(self.padding, str)
        above = self.padding[0]
        below = max(kernel - stride - above, 0)
        x = self.strips.with_neighbours(input, 2, self.level, above, below)
        if self.strips.group.rank() == self.strips.group.size() - 1:
            x = F.pad(x, (0, 0, 0, max(above - below, 0)))  # as far as the convolution pads a whole image
        return F.conv2d(x, weight, bias, self.stride, (0, self.padding[1]), self.dilation, self.groups)


class StripBatchNorm(InStrips, _BatchNorm2d):
    """A batch norm whose statistics in training are those of whole images."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps (B, C, H, W), normalised."""
        if not self.training:
            return super().forward(input)
        x = widen(input)
        group, places = self.strips.group, input.numel() // input.shape[1]
        sums = all_sum(torch.cat((x.sum((0, 2, 3)), x.new_tensor([places]))), group)
        mean = sums[:-1] / sums[-1].detach()
        centred = x - mean[:, None, None]
        variance = all_sum(centred.square().sum((0, 2, 3)), group) / sums[-1].detach()
        self._remember(mean.detach(), variance.detach(), sums[-1].detach())
        weight = (variance + self.eps).rsqrt()
        weight = weight if self.weight is None else weight * self.weight  # pyright: ignore[reportUnnecessaryComparison]
        out = centred * weight[:, None, None]
        return (out if self.bias is None else out + self.bias[:, None, None]).to(input.dtype)  # pyright: ignore

    def _remember(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running statistics as torch's own batch norm does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked.float() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


class StripRotary(InStrips, _Rotary):
    """Rotary tables of the strip's own rows."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, each (H * W, head_dim)."""
        start = self.strips.start(self.level)
        return ops.rotary_2d(x.shape[1], x.shape[2], self.head_dim, base=self.base, offset=start, device=x.device)


class StripPosition(InStrips, _Position):
    """Learned positions of the strip's own rows."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The map with its positions."""
        if mask is not None:
            raise ValueError(
                "mask: expected None for images in strips with learned positions, got a mask; a strip does not say how "
                "tall each image is"
            )
        table = resize_table(self.table, (sum(self.strips.rows(self.level)), x.shape[2]))
        return x + table[:, self.strips.start(self.level) :][:, : x.shape[1]]


class StripResidual(InStrips, _Residual):
    """InLine's local residual, whose kernels reach one row into the neighbours."""

    def forward(self, mean: Tensor, value: Tensor) -> Tensor:
        """Values (B, H, W, C), convolved."""
        taller = self.strips.with_neighbours(value, 1, self.level, 1, 1)
        return super().forward(mean, taller)[:, 1 : 1 + value.shape[1]]


class StripPool(InStrips, _Module):
    """The mean over places of whole images."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, ...) of maps (B, C, H, W)."""
        return self.strips.mean(super().forward(x), x.shape[2])


class StripAttention(InStrips, _Attention):
    """Attention to the tokens of all strips. Linear mechanisms exchange states, softmax the keys and values."""

    def forward(
        self,
        x: Tensor,
        grid: tuple[int, int],
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        key_mask: Tensor | None = None,
        mean: Tensor | None = None,
    ) -> Tensor:
        """Tokens (B, N, C) that have looked at all others; arguments as of `Attention`."""
        key_mask = self._once(x, key_mask)
        if self.residual is not None:
            weight = x.shape[1] if key_mask is None else key_mask.sum(1)
            mean = self.strips.mean(masked_mean(x, key_mask) if mean is None else mean, weight)
        return super().forward(x, grid, rotary=rotary, key_mask=key_mask, mean=mean)

    def _once(self, x: Tensor, key_mask: Tensor | None) -> Tensor | None:
        """Class tokens are the same on all ranks, and count on the first alone."""
        if not self.prefix_tokens or self.strips.group.rank() == 0:
            return key_mask
        key_mask = x.new_ones(x.shape[:2], dtype=torch.bool) if key_mask is None else key_mask.clone()
        key_mask[:, : self.prefix_tokens] = False
        return key_mask

    def _start(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        key_mask: Tensor | None,
    ) -> Callable[[], Tensor]:
        if not self.linear:
            return lambda: self._softmax(query, key, value, rotary, key_mask)
        call = Call(self.mechanism, key_mask=key_mask, rotary=rotary)
        finish = start_attention(query, key, value, call, self.strips.group)
        return lambda: finish()[0]

    def _softmax(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        key_mask: Tensor | None,
    ) -> Tensor:
        """Softmax needs every key: they are gathered."""
        if rotary is not None:
            query, key = rotate(query, rotary), rotate(key, rotary)
        rows = self.strips.rows(self.level)
        width = (key.shape[1] - self.prefix_tokens) // rows[self.strips.group.rank()]
        lengths = [self.prefix_tokens + height * width for height in rows]
        visible = key.new_ones(key.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
        key, value = (self._gathered(x, lengths) for x in (key, value))
        visible = self._gathered(visible.byte(), lengths).bool()
        return ops.attention(query, key, value, self.mechanism, key_mask=visible)

    def _gathered(self, x: Tensor, lengths: list[int]) -> Tensor:
        """The tokens of all ranks, (B, N, ...), of which each has its number."""
        missing = max(lengths) - x.shape[1]
        everyone = gather(F.pad(x, [0, 0] * (x.ndim - 2) + [0, missing]), self.strips.group)
        return torch.cat([part[:, :length] for part, length in zip(everyone, lengths, strict=True)], dim=1)


def adopt(module: nn.Module, kind: type[InStrips], strips: Strips, level: int) -> None:
    """Make a layer one over strips, in place."""
    module.__class__ = _joined(kind, type(module))
    module.strips, module.level = strips, level  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


@cache
def _joined(kind: type[Any], own: type[nn.Module]) -> type[nn.Module]:
    """A class that is both, with what is different first."""
    return type(f"{kind.__name__}Of{own.__name__}", (kind, own), {"__doc__": kind.__doc__})

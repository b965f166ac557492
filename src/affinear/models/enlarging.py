"""A large image through an upscaler strip by strip: the numbers of one piece, in memory that depth does not add to.

Every layer goes over the whole map before the next one begins, a strip of rows at a time. Attention over the whole
image goes over it twice: states of strips add, so the first pass summarizes all strips into one state, and the second
asks it. Softmax has no state: its keys and values are kept. Convolutions see as many rows of their neighbours as they
need. What is kept is the map, and the map that the group began with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..layers import Attention, Windows
from ..ops import State
from ..ops.precision import exact
from .upscaler import Group, Layer, Upscaler, WindowAttention

Told = Callable[[float], None]
Memory = State | tuple[Tensor, Tensor] | None  # what attention over the whole image knows of all strips


@dataclass(frozen=True)
class Strip:
    """Some rows of a map, with those around them.

    Attributes:
        rows: The rows and their neighbours, (B, h, W, C), as far as the map goes.
        above: How many of them are neighbours above.
        height: How many are the strip's own.
        halo: How many neighbours there would be on either side of a strip in the middle.
        start: First row of its own, counted from the top of the map.
    """

    rows: Tensor
    above: int
    height: int
    halo: int
    start: int

    def own(self, x: Tensor) -> Tensor:
        """Of a map made of all rows, the strip's own."""
        return x[:, self.above : self.above + self.height]

    def convolved(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        """A map (B, h, W, C) made of all rows, convolved: the strip's own rows. Beyond the map there are zeros."""
        below = x.shape[1] - self.above - self.height
        x = F.pad(x, (0, 0, 0, 0, self.halo - self.above, self.halo - below)).permute(0, 3, 1, 2)
        reach = conv.kernel_size[0] // 2
        cut = self.halo - reach
        x = x[:, :, cut : x.shape[2] - cut]
        return F.conv2d(x, conv.weight, conv.bias, padding=(0, reach), groups=conv.groups).permute(0, 2, 3, 1)


@torch.no_grad()
def enlarge(
    network: Upscaler, images: Tensor, *, rows: int = 64, keep: torch.device | None = None, told: Told | None = None
) -> Iterator[Tensor]:
    """The larger images, strip by strip from the top: what `network(images)` gives, up to rounding.

    Args:
        network: In evaluation mode.
        images: (B, 3, H, W), white being 1, on the network's device.
        rows: Of a strip, about; windows round it.
        keep: Where maps are kept between strips; None for the network's device. Main memory takes more.
        told: Called with the share that is done.

    Yields:
        Images (B, 3, scale h, scale W), one below the other.

    Example:
        >>> import torch
        >>> from affinear.models.enlarging import enlarge
        >>> from affinear.models.upscaler import Upscaler
        >>> network = Upscaler(2, 16, (2, 2), 2, mechanism="mala", position_kernel=5).eval()
        >>> images = torch.rand(1, 3, 50, 20)
        >>> torch.allclose(torch.cat(list(enlarge(network, images, rows=16)), 2), network(images), atol=1e-4)
        True
    """
    if network.training:
        raise ValueError("network: expected one in evaluation mode, got one that trains; call its eval()")
    if rows < 1:
        raise ValueError(f"rows: expected 1 or more, got {rows}")
    yield from _Pass(network, images, rows, keep or images.device, told or _silent).run()


class _Pass:
    """One image on its way through the network."""

    def __init__(self, network: Upscaler, images: Tensor, rows: int, keep: torch.device, told: Told) -> None:
        self.network, self.images, self.keep, self.told = network, network.padded(images), keep, told
        self.size = [network.scale * side for side in images.shape[2:]]  # of what comes out
        self.rows = max(rows // network.multiple, 1) * network.multiple
        groups = [group for group in network.layers if isinstance(group, Group)]
        whole = sum(_needs_memory(layer) for group in groups for layer in group.blocks)
        self.groups, self.sweeps = groups, 3 + sum(1 + len(group.blocks) for group in groups) + whole
        self.done = 0.0

    def run(self) -> Iterator[Tensor]:
        """The larger images, strip by strip."""
        network, bands = self.network, self.bands()
        x = torch.cat([self.first(start, stop).to(self.keep) for start, stop in bands], dim=1)
        self.sweep(x, bands, 0, lambda strip: network.norm_first(strip.rows))
        for group in self.groups:
            came = x.clone()
            for layer in group.blocks:
                assert isinstance(layer, Layer)
                self.layer(x, layer)
            self.sweep(x, bands, 1, lambda strip, conv=group.conv: strip.convolved(conv, strip.rows))
            x += came
            del came
        after = network.conv_after_body
        # In place, after the norm; what the first convolution gave is made anew.
        self.sweep(x, bands, 1, lambda strip: self.skipped(strip, strip.convolved(after, network.norm(strip.rows))))
        for strip in self.strips(x, bands, 1):
            left = max(0, self.size[0] - network.scale * strip.start)  # rows that are no padding
            yield self.finish(strip)[:, :, :left, : self.size[1]]

    def bands(self, first: int = 0) -> list[tuple[int, int]]:
        """Where strips begin and end; the first may have another height."""
        height = self.images.shape[2]
        starts = [0, *range(first or self.rows, height, self.rows)]
        return list(zip(starts, [*starts[1:], height], strict=True))

    def strips(self, x: Tensor, bands: list[tuple[int, int]], halo: int) -> Iterator[Strip]:
        """The strips of a map, which may be replaced as they come: neighbours are those of before."""
        device = self.images.device
        above = x[:, :0]
        for start, stop in bands:
            own, below = x[:, start:stop], x[:, stop : stop + halo]
            rows = torch.cat((above, own, below), dim=1).to(device)
            seen = above.shape[1]
            above = torch.cat((above, own), dim=1)[:, -halo:].clone() if halo else x[:, :0]
            yield Strip(rows, seen, stop - start, halo, start)
            self.done += (stop - start) / x.shape[1]
            self.told(min(1.0, self.done / self.sweeps))

    def sweep(self, x: Tensor, bands: list[tuple[int, int]], halo: int, function: Callable[[Strip], Tensor]) -> None:
        """Put in place of every strip what a function makes of it."""
        for strip in self.strips(x, bands, halo):
            x[:, strip.start : strip.start + strip.height] = function(strip)

    def first(self, start: int, stop: int) -> Tensor:
        """What the first convolution makes of some rows, (B, h, W, C)."""
        low, high = max(0, start - 1), min(self.images.shape[2], stop + 1)
        rows = (self.images[:, :, low:high].to(self.network.mean.dtype) - self.network.mean).permute(0, 2, 3, 1)
        with exact(rows):  # as the network does
            return Strip(rows, start - low, stop - start, 1, start).convolved(self.network.conv_first, rows)

    def skipped(self, strip: Strip, x: Tensor) -> Tensor:
        """A strip of the last map, with what the first convolution gave."""
        return x + self.first(strip.start, strip.start + strip.height)

    def finish(self, strip: Strip) -> Tensor:
        """Larger images (B, 3, scale h, scale W) of a strip of the last map."""
        network = self.network
        with exact(strip.rows):
            out = strip.convolved(network.upsample, strip.rows).permute(0, 3, 1, 2)
        return F.pixel_shuffle(out, network.scale) + network.mean

    def layer(self, x: Tensor, layer: Layer) -> None:
        """One layer over the whole map."""
        attn = layer.attn
        bands = self.bands(attn.shift if isinstance(attn, WindowAttention) else 0)
        halo = 0 if attn.position is None else attn.position.kernel_size[0] // 2
        memory = self.memory(x, layer) if _needs_memory(layer) else None

        def replaced(strip: Strip) -> Tensor:
            rows = layer.norm1(strip.rows)
            if isinstance(layer.attn, WindowAttention):
                answered = _in_windows(layer.attn, strip, rows)
            else:
                answered = _over_all(layer.attn, strip, rows, memory)
            out, normed = layer.norm2(strip.own(strip.rows), answered)
            return out + layer.mlp(normed)

        self.sweep(x, bands, halo, replaced)

    def memory(self, x: Tensor, layer: Layer) -> Memory:
        """What queries of a layer have to know of all strips."""
        attn = layer.attn
        assert isinstance(attn, Attention)
        state: State | None = None
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for strip in self.strips(x, self.bands(), 0):
            _, key, value, *_ = attn.project(layer.norm1(strip.rows).flatten(1, 2))
            if attn.linear:
                found = ops.summarize(key, value, attn.mechanism)
                state = found if state is None else state + found
            else:
                keys.append(key)
                values.append(value)
        return (torch.cat(keys, dim=1), torch.cat(values, dim=1)) if state is None else state


def _needs_memory(layer: nn.Module) -> bool:
    """Whether a layer has to know of the whole map before it answers."""
    return isinstance(layer, Layer) and isinstance(layer.attn, Attention) and layer.attn.attends


def _over_all(attn: Attention, strip: Strip, rows: Tensor, memory: Memory) -> Tensor:
    """What attention over the whole image adds to a strip; its rows come with their neighbours."""
    grid = (rows.shape[1], rows.shape[2])
    projected = [x.flatten(2).unflatten(1, grid) for x in attn.project(rows.flatten(1, 2))]
    streams = 3 if attn.attends else 1
    value, gates = projected[streams - 1], projected[streams:]
    out = torch.zeros_like(strip.own(value)) if memory is None else _answers(attn, strip.own(projected[0]), memory)
    if attn.position is not None:
        out = out + strip.convolved(attn.position, value)
    if gates:
        gate = strip.own(gates[0])
        out = out * (F.silu(gate) if attn.parts.gate == "silu" else gate)
    return attn.proj(out)


def _answers(attn: Attention, query: Tensor, memory: Memory) -> Tensor:
    """Answers (B, h, W, C) to the queries of a strip."""
    asked = query.flatten(1, 2).unflatten(-1, (attn.num_heads, -1))
    if isinstance(memory, State):
        out = ops.attend(asked, memory)
    else:
        assert memory is not None
        out = ops.attention(asked, *memory, attn.mechanism)
    return out.flatten(2).view_as(query)


def _in_windows(attn: WindowAttention, strip: Strip, rows: Tensor) -> Tensor:
    """What attention within windows adds to a strip, which begins and ends where windows do."""
    qkv = attn.qkv(rows)
    own = strip.own(qkv)
    # Above the first displaced window, and below the last, windows are lower: none reaches around the border.
    first = attn.shift if strip.start == 0 else 0
    pieces = [own[:, :first], own[:, first:]]
    rest = pieces[1].shape[1] % attn.window
    pieces = [pieces[0], pieces[1][:, : pieces[1].shape[1] - rest], pieces[1][:, pieces[1].shape[1] - rest :]]
    answers = [
        attn.look(x, Windows((x.shape[1], x.shape[2]), (min(attn.window, x.shape[1]), attn.window), (0, attn.shift)))
        for x in pieces
        if x.shape[1]
    ]
    out = torch.cat(answers, dim=1)
    if attn.position is not None:
        out = out + strip.convolved(attn.position, qkv[..., 2 * out.shape[3] :])
    return attn.proj(out)


def _silent(share: float) -> None:
    """Tell nobody."""

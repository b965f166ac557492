"""The length at which linear attention begins to be faster than the softmax it replaced, measured where it will run.

All else in a network takes the same time before and after a swap, so that the network is faster from the length on at
which its attention is. Below it, it is slower, and is not called anything else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .core import LinearCore, Shape
from .distil import swapped_layers

SHORTEST, LONGEST = 128, 2**17  # tokens
ROOM = 2**31  # bytes of queries, keys and values together
READING, NEXT = "reading", "the next token"


@dataclass(frozen=True)
class Timing:
    """Both attentions of one layer at one length.

    Attributes:
        tokens: The length.
        softmax: Seconds.
        linear: Seconds.
    """

    tokens: int
    softmax: float
    linear: float


@dataclass(frozen=True)
class Crossover:
    """Where linear attention overtakes softmax.

    Attributes:
        what: "reading", all tokens at once; or "the next token", one after so many.
        where: The device, and the dtype.
        timings: By length, from the shortest on.
    """

    what: str
    where: str
    timings: tuple[Timing, ...]

    @property
    def tokens(self) -> int | None:
        """The first length from which on the linear one was faster at all that were measured; None if there is none."""
        found = None
        for timing in reversed(self.timings):
            if timing.linear >= timing.softmax:
                break
            found = timing.tokens
        return found

    def __str__(self) -> str:
        last = self.timings[-1]
        if self.tokens is None:
            said = f"not faster up to {last.tokens:,} tokens ({last.softmax / last.linear:.2f} times the speed there)"
        elif self.tokens == self.timings[0].tokens:
            said = f"faster at {self.tokens:,} tokens already"
        else:
            said = f"faster from {self.tokens:,} tokens on"
        if self.tokens is not None:
            said += f", {last.softmax / last.linear:.1f} times at {last.tokens:,}"
        return f"{self.what}, {self.where}: {said}"


def crossovers(
    student: nn.Module,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    shortest: int = SHORTEST,
    longest: int = LONGEST,
    seconds: float = 10.0,
) -> list[Crossover]:
    """Time one swapped layer's attention beside torch's softmax of the same shape, at lengths that double.

    Args:
        student: A linearized network; its first linear layer is timed.
        device: Where.
        dtype: Of queries, keys and values.
        shortest: The first length.
        longest: The last, if time and memory reach so far.
        seconds: About how long it may take altogether; a length that would take too long ends the search.

    Returns:
        Of reading a whole input; and of the next token, where the layer is causal.

    Raises:
        ValueError: If nothing in the network is linear, or its heads are not known.

    Example:
        >>> import affinear, timm
        >>> from affinear.linearizing.crossover import crossovers
        >>> student, _ = affinear.linearize(timm.create_model("vit_tiny_patch16_224", depth=1), "mala")
        >>> [reading] = crossovers(student, longest=256)
        >>> max(timing.tokens for timing in reading.timings)
        256
    """
    layer = next(iter(swapped_layers(student).values()))
    core = layer.get_submodule("linearized")
    assert isinstance(core, LinearCore)
    shape = core.shape
    if shape is None:
        raise ValueError("student: expected a layer whose heads are known, got one that does not tell")
    place = torch.device(device)
    # Values do not change the time. Tokens stand in a line here: on a grid a convolution would need a square of them.
    twin = LinearCore(core.choices, shape, device=place, dtype=dtype)
    causal = bool(getattr(layer, "is_causal", False))
    lengths = [shortest]
    while lengths[-1] * 2 <= longest:
        lengths.append(lengths[-1] * 2)
    kinds = (READING, NEXT) if causal else (READING,)
    where = f"{_named(place)}, {str(dtype).removeprefix('torch.')}"
    found: list[Crossover] = []
    for what in kinds:
        timings = _timings(twin, shape, lengths, what, causal, place, dtype, seconds / len(kinds))
        found.append(Crossover(what, where, tuple(timings)))
    return found


@torch.no_grad()
def _timings(
    core: LinearCore,
    shape: Shape,
    lengths: list[int],
    what: str,
    causal: bool,
    device: torch.device,
    dtype: torch.dtype,
    seconds: float,
) -> list[Timing]:
    """Both, at each length, for as long as there is time."""
    found: list[Timing] = []
    ends = time.perf_counter() + seconds
    spent = 0.0
    for tokens in lengths:
        # Softmax takes four times as long for twice the tokens; what would not fit is not begun.
        if found and (time.perf_counter() + 4 * spent > ends or _bytes(shape, tokens, dtype) > ROOM):
            break
        began = time.perf_counter()
        query, key, value = _drawn(shape, tokens, device, dtype)
        drawn = (core, query, key, value)
        pair = _reading(*drawn, causal) if what == READING else _next(*drawn)
        softmax, linear = _in_turns(pair, device, (ends - began) / len(lengths))
        found.append(Timing(tokens, softmax, linear))
        spent = time.perf_counter() - began
    return found


def _reading(
    core: LinearCore, query: Tensor, key: Tensor, value: Tensor, causal: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    grouped = query.shape[2] != key.shape[2]
    return (
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped),
        lambda: core(query, key, value, causal=causal),
    )


def _next(
    core: LinearCore, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    """One token after all others: a cache of keys and values that grows, beside a memory that does not."""
    memory = core.step(query, key, value, None)[1]
    q, k, v = (x.transpose(1, 2).contiguous() for x in (query[:, -1:], key, value))
    grouped = query.shape[2] != key.shape[2]
    last = [x[:, -1:].contiguous() for x in (query, key, value)]
    return (
        lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped),
        lambda: core.step(last[0], last[1], last[2], memory),
    )


def _drawn(shape: Shape, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    def draw(heads: int, width: int) -> Tensor:
        return torch.randn(1, tokens, heads, width, device=device, dtype=dtype)

    return draw(shape.heads, shape.width), draw(shape.key_heads, shape.width), draw(shape.key_heads, shape.value_width)


def _bytes(shape: Shape, tokens: int, dtype: torch.dtype) -> int:
    # A window's scores, in float32, are the largest of what either needs.
    return tokens * shape.heads * (4 * shape.width * dtype.itemsize + 1024)


def _in_turns(
    pair: tuple[Callable[[], object], Callable[[], object]], device: torch.device, seconds: float
) -> tuple[float, float]:
    """Median seconds of each, measured in turns; the first turns are thrown away."""
    times: tuple[list[float], list[float]] = ([], [])
    ends = time.perf_counter() + seconds
    turn = 0
    while turn < 3 or (turn < 30 and time.perf_counter() < ends):
        for call, spent in zip(pair, times, strict=True):
            _wait(device)
            began = time.perf_counter()
            call()
            _wait(device)
            if turn:
                spent.append(time.perf_counter() - began)
        turn += 1
    return statistics.median(times[0]), statistics.median(times[1])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()

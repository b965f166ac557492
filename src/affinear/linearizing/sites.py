"""A place where a network attends: what is there, whether it can be linear, and how it becomes so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from .choices import Choices
from .core import LinearCore, Shape


@dataclass(frozen=True)
class Site:
    """One attention layer of a network.

    Attributes:
        name: Where it is, as `named_modules` says.
        module: What is there.
        was: What that is, for people.
        shape: Its heads, where they are known.
        install: Puts a core there; None where that cannot be.
        reason: Why not; empty where it can.
        causal: Whether it sees earlier tokens only.
        biased: Whether it adds a bias of position to its scores.
        prefix_tokens: Of tokens on a square grid, how many stand before it; None for tokens in a line.
        grid_known: Whether it is known how its tokens lie, which a convolution needs.
        optional: Whether it is swapped only if it is named.
        note: What the user should know of the swap.
    """

    name: str
    module: nn.Module
    was: str
    shape: Shape | None = None
    install: Callable[[LinearCore], None] | None = None
    reason: str = ""
    causal: bool = False
    biased: bool = False
    prefix_tokens: int | None = None
    grid_known: bool = True
    optional: bool = False
    note: str = ""

    @property
    def in_a_line(self) -> bool:
        """Whether queries and keys are one sequence of tokens, one after the other."""
        return self.causal or (self.grid_known and self.prefix_tokens is None and not self.optional)

    def why_not(self, choices: Choices) -> str:
        """Why it stays as it is under these choices; empty if it does not."""
        if self.install is None:
            return self.reason
        if self.biased and choices.bias == "leave":
            return "its bias of position has no place in a state, and bias='leave'"
        if choices.window and not self.in_a_line:
            return "a window is of tokens in a line, and these lie otherwise"
        if choices.convolution and not self.grid_known:
            return "it is not known how its tokens lie, which a convolution needs"
        if self.shape is None and (choices.feature_map != "own" or choices.gain or choices.norm or choices.window):
            return "its number of heads is not known, and something is to be learned per head"
        return ""

    def told(self, choices: Choices) -> str:
        """What is said of it once it is swapped."""
        notes = [self.note] if self.note else []
        if self.biased and choices.bias == "position":
            notes.append("its bias of position is kept as attention by position alone, N x N")
        if self.biased and choices.bias == "drop":
            notes.append("its bias of position is DROPPED, as bias='drop'")
        return "; ".join(notes)


def core_for(site: Site, choices: Choices) -> LinearCore:
    """A fresh core where the layer's own weights are."""
    weight = next(iter(site.module.parameters()), None)
    device, dtype = (None, None) if weight is None else (weight.device, weight.dtype)
    if dtype is not None and not dtype.is_floating_point:
        dtype = None  # a quantized layer
    return LinearCore(choices, site.shape, prefix_tokens=site.prefix_tokens, device=device, dtype=dtype)

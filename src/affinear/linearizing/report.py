"""What was swapped in a network, what was not, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

from .choices import Choices

NAME = re.compile(r"\w[\w.]{0,255}")  # of a layer: nothing that a pattern or a path could do with
MOST_LAYERS = 4096


def checked_names(names: object, source: str) -> list[str]:
    """Names of layers that a file gave.

    Raises:
        ValueError: If they are not.
    """
    found = cast("list[object]", names) if isinstance(names, list) else []
    fine = [name for name in found if isinstance(name, str) and NAME.fullmatch(name)]
    if not isinstance(names, list) or len(fine) != len(found) or len(found) > MOST_LAYERS:
        raise ValueError(f"{source}: layers: expected a list of names of letters, digits, dots and _, got another")
    return fine


@dataclass(frozen=True)
class Layer:
    """What became of one attention layer.

    Attributes:
        name: Where it is.
        was: What it was.
        now: What it is; the same as before where it was left alone.
        swapped: Whether it is linear now.
        added: Parameters added.
        remark: Why it was left alone, or what is to know of the swap.
    """

    name: str
    was: str
    now: str
    swapped: bool
    added: int = 0
    remark: str = ""


@dataclass(frozen=True)
class Report:
    """Every attention layer of a network, in order.

    Attributes:
        layers: What became of each.
        choices: How the swapped ones compute.
    """

    layers: tuple[Layer, ...]
    choices: Choices

    @property
    def swapped(self) -> tuple[Layer, ...]:
        """The layers that are linear now."""
        return tuple(layer for layer in self.layers if layer.swapped)

    @property
    def left(self) -> tuple[Layer, ...]:
        """The layers that are what they were."""
        return tuple(layer for layer in self.layers if not layer.swapped)

    @property
    def added(self) -> int:
        """Parameters added in all."""
        return sum(layer.added for layer in self.layers)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"choices": self.choices.as_dict(), "layers": [vars(layer) for layer in self.layers]}

    def __str__(self) -> str:
        swapped, left = self.swapped, self.left
        lines = [f"{len(swapped)} of {len(self.layers)} attention layers are linear, {self.added:,} parameters added"]
        wide = max((len(layer.name) for layer in self.layers), default=0)
        for layer in (*swapped, *left):
            change = f"{layer.was} -> {layer.now}" if layer.swapped else f"{layer.was}, left alone"
            remark = f": {layer.remark}" if layer.remark else ""
            lines.append(f"  {layer.name:<{wide}}  {change}{remark}")
        return "\n".join(lines)

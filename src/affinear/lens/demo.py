"""The first experiment: make one query louder and see, mechanism by mechanism, what its attention row does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import affinear
from affinear.lens.rows import Loudness, loudness

if TYPE_CHECKING:
    from rich.table import Table

KEYS, WIDTH = 64, 32
FACTORS = (0.25, 1.0, 4.0, 16.0)

# Where the reading draws its lines: a row that moved less than STILL (half of Σ|difference|) sat still, and a
# mechanism whose largest weight grew at least LOUD-fold heard the query.
STILL, LOUD = 1e-3, 2.0


@dataclass(frozen=True)
class Example:
    """One query among random keys, one of which it clearly prefers.

    Attributes:
        query: (1, 1, 1, 32), of norm 2, so that the factors cover quiet and loud.
        key: (1, 64, 1, 32), standard normal.
    """

    query: Tensor
    key: Tensor


def example(seed: int = 0) -> Example:
    """Draw the demo's tokens: random keys, and a query that is a noisy copy of the first of them.

    Args:
        seed: Of the random numbers.

    Returns:
        Query and key, float64 on the CPU.

    Examples:
        >>> tokens = example(seed=3)
        >>> int((tokens.query * tokens.key).sum(-1).argmax())
        0
    """
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(KEYS, WIDTH, generator=generator, dtype=torch.float64)
    query = key[0] + 0.5 * torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    query = 2 * query / query.norm()
    return Example(query.reshape(1, 1, 1, WIDTH), key.reshape(1, KEYS, 1, WIDTH))


def collect(tokens: Example, factors: Sequence[float] = FACTORS) -> tuple[Loudness, ...]:
    """Make the query louder under every registered mechanism, softmax first.

    Args:
        tokens: What to look at.
        factors: What to multiply the query by.

    Returns:
        One curve per mechanism, its weights (F, 1, 1, 1, N).

    Examples:
        >>> collect(example())[0].mechanism
        'softmax'
    """
    names = sorted(affinear.mechanisms(), key=lambda name: name != "softmax")
    return tuple(loudness(tokens.query, tokens.key, factors, name) for name in names)


def table(curves: Sequence[Loudness]) -> Table:
    """Lay the curves out as a table of 80 columns, one block per mechanism and one line per factor.

    Args:
        curves: As `collect` returns them.

    Returns:
        A table for rich to print.

    Examples:
        >>> table(collect(example())).columns[0].header
        'mechanism'
    """
    from rich import box
    from rich.table import Table

    uniform = torch.tensor(float(curves[0].weights.shape[-1]))
    grid = Table(
        title="One query, made louder",
        caption=f"A uniform row has entropy {uniform.log():.3f} and largest weight {1 / uniform:.3f}. Entropy is that "
        "of |w| / Σ|w|; negative is the sum of |w| over negative weights.",
        box=box.SIMPLE_HEAD,
        width=76,
    )
    grid.add_column("mechanism", style="bold", no_wrap=True)
    for header in ("query", "entropy", "largest", "negative", "row sum"):
        grid.add_column(header, justify="right")
    for curve in curves:
        for step, label in enumerate(curve.labels):
            grid.add_row(curve.mechanism if step == 0 else "", label, *_cells(curve, step))
        grid.add_section()
    return grid


def reading(curves: Sequence[Loudness]) -> str:
    """Say in a few sentences what the curves show; every name and number in them comes from the curves.

    Args:
        curves: As `collect` returns them.

    Returns:
        Plain text without line breaks.

    Examples:
        >>> "relu" in reading(collect(example()))
        True
    """
    growth = {curve.mechanism: _growth(curve) for curve in curves}
    still = [curve.mechanism for curve in curves if _moved(curve) < STILL]
    sharpened = [name for name in growth if name not in still and growth[name] >= LOUD]
    slight = [name for name in growth if name not in still and name not in sharpened]
    sentences = (_who_hears(curves, sharpened, growth), _who_does_not(still, slight), _price(curves))
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences if sentence)


def _cells(curve: Loudness, step: int) -> list[str]:
    numbers = curve.numbers
    fields = (numbers.entropy, numbers.largest_weight, numbers.negative_mass, numbers.row_sum)
    return [f"{field[step].item():.3f}" for field in fields]


def _growth(curve: Loudness) -> float:
    largest = curve.numbers.largest_weight.flatten()
    return (largest[-1] / largest[0]).item()


def _moved(curve: Loudness) -> float:
    return 0.5 * (curve.weights - curve.weights[:1]).abs().sum(-1).max().item()


def _who_hears(curves: Sequence[Loudness], sharpened: list[str], growth: dict[str, float]) -> str:
    first, last = curves[0].labels[0], curves[0].labels[-1]
    if not sharpened:
        return f"From {first} to {last} no mechanism sharpens."
    ranked = sorted(sharpened, key=lambda name: -round(growth[name], 1))
    told = _listed([f"{name} ({growth[name]:.3g}-fold)" for name in ranked])
    return f"From {first} to {last} the largest weight grows most with {told}: they hear that the query got louder."


def _who_does_not(still: list[str], slight: list[str]) -> str:
    groups = {"sitting still": still, "moving a little": slight}
    parts = [f"{what}: {_listed(names)}" for what, names in groups.items() if names]
    # The one surprise worth a reason: linear attention divides the magnitude away and moves nevertheless.
    reason = " (linear because elu + 1 is not homogeneous)" if "linear" in slight else ""
    return f"{'; '.join(parts)}{reason}." if parts else ""


def _price(curves: Sequence[Loudness]) -> str:
    masses = {curve.mechanism: curve.numbers.negative_mass[-1].item() for curve in curves}
    errors = {curve.mechanism: (curve.numbers.row_sum - 1).abs().max().item() for curve in curves}
    signed = [f"{mass:.2f} in {name}" for name, mass in masses.items() if mass >= 0.005]
    inexact = [f"{name} (off by {error:.0e})" for name, error in errors.items() if error >= 1e-9]
    price = f"Negative weights at {curves[0].labels[-1]} add up to {_listed(signed)}; " if signed else ""
    return f"{price}rows sum to one{f', but for {_listed(inexact)}' if inexact else ''}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))

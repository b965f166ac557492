"""The numbers behind the page: rows of weights of one patch, and how they answer a louder query."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import affinear
from affinear.lens.measures import score_ratio
from affinear.lens.microscope.refusal import Refusal
from affinear.lens.microscope.tokens import Layer
from affinear.lens.rows import measure
from affinear.lens.scene import Scene

MECHANISMS = ("softmax", "linear", "inline", "nala", "mala")
LOWEST, HIGHEST = 1 / 16, 16.0
FACTORS = tuple(2 ** (step / 4) for step in range(-16, 17))
NEAR = (-0.18, -0.1, -0.05, -0.02, -0.005, -0.001, 0.001, 0.005, 0.02, 0.05, 0.1, 0.18)  # powers of two around a pole

Answer = dict[str, Any]


@dataclass(frozen=True)
class Spot:
    """One patch under the microscope: a query of one head, and all keys that it sees.

    Attributes:
        layer: Where it is looked at.
        patch: Its number on the grid, row by row.
        head: The head's number.
        window: The window's number.
    """

    layer: Layer
    patch: int
    head: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        rows, columns = self.layer.grid
        _check("patch", self.patch, rows * columns, f"the patches of the {rows} x {columns} grid")
        _check("head", self.head, self.layer.heads, f"the heads of {self.layer.name}")
        _check("window", self.window, self.layer.windows, f"the windows of {self.layer.name}")

    @property
    def token(self) -> int:
        """The number of the patch among all tokens."""
        return self.layer.prefix_tokens + self.patch

    @property
    def query(self) -> Tensor:
        """The patch's query, (1, 1, 1, D)."""
        return self.layer.query[self.window, self.token, self.head].reshape(1, 1, 1, -1)

    @property
    def key(self) -> Tensor:
        """All keys, (1, N, 1, D)."""
        return self.layer.key[self.window, :, self.head].reshape(1, -1, 1, self.layer.key.shape[-1])

    @property
    def visible(self) -> Tensor:
        """Numbers of the keys that the patch sees, (M,)."""
        mask = self.layer.key_mask
        return torch.arange(self.key.shape[1]) if mask is None else mask[self.window].nonzero().flatten()


def rows(spot: Spot, factor: float) -> Answer:
    """The patch's row under every mechanism, its query multiplied by a factor, with the numbers that describe it."""
    check_factor(factor)
    found = {name: _row(spot, name, factor) for name in MECHANISMS}
    return {"factor": factor, "uniform": 1 / len(spot.visible), "prefix": spot.layer.prefix_tokens, "mechanisms": found}


def curves(spot: Spot, factors: Sequence[float] = FACTORS) -> Answer:
    """Entropy and score ratio of the patch's row under every mechanism, over many factors."""
    found = {name: _curve(spot, name, factors) for name in MECHANISMS}
    extent = max(curve.pop("extent") for curve in found.values())
    return {
        "factors": list(factors),
        "uniform_entropy": math.log(len(spot.visible)),
        "extent": extent,
        "scaled": "features" if _closed(spot) else "query",
        "mechanisms": found,
    }


def weights(spot: Spot, mechanism: str, factors: Sequence[float]) -> Tensor:
    """Rows of the patch, (F, N), its query multiplied by each factor."""
    query = torch.cat([spot.query * factor for factor in factors], dim=1)
    mask = None if spot.layer.key_mask is None else spot.layer.key_mask[spot.window : spot.window + 1]
    if spot.layer.rotary is None:  # then queries do not know their places
        return affinear.weights(query, spot.key, mechanism, key_mask=mask)[0, 0]
    # Where positions turn, queries and keys share their places. So louder copies of the patch stand behind all others,
    # in its own place, as queries that are no keys.
    count, louder = spot.key.shape[1], len(factors)
    turned = [torch.cat((table, table[[spot.token]].expand(louder, -1))) for table in spot.layer.rotary]
    seen = torch.ones(1, count, dtype=torch.bool) if mask is None else mask
    found = affinear.weights(
        torch.cat((torch.zeros_like(spot.key), query), dim=1),
        F.pad(spot.key, (0, 0, 0, 0, 0, louder)),
        mechanism,
        key_mask=F.pad(seen, (0, louder), value=False),
        rotary=(turned[0], turned[1]),
        rows=torch.arange(count, count + louder),
    )
    return found[0, 0, :, :count]


@dataclass(frozen=True)
class Look:
    """One mechanism at one spot, the query multiplied by F factors.

    Attributes:
        weights: (F, N), the rows.
        moved: (F,), how far they are from the row at the factor one: half of the sum of |difference|.
        keys: The numbers of the strongest and of the median key that the patch sees, at the factor one.
        ratio: (F,), the weight of the strongest over that of the median. It is the features of the query that are
            multiplied there, by `lens.score_ratio`; where positions turn or keys are masked, the query itself.
        pole: The factor at which the median's weight passes through zero; infinite where it does not, or is unknown.
    """

    weights: Tensor
    moved: Tensor
    keys: tuple[int, int]
    ratio: Tensor
    pole: float


def look(spot: Spot, mechanism: str, factors: Sequence[float]) -> Look:
    """Rows and score ratios of one mechanism."""
    *found, plain = weights(spot, mechanism, (*factors, 1.0))
    rows = torch.stack(found)
    order = spot.visible[plain[spot.visible].argsort(descending=True, stable=True)]
    keys = (int(order[0]), int(order[len(order) // 2]))
    moved = 0.5 * (rows - plain).abs().sum(-1)
    if not _closed(spot):
        return Look(rows, moved, keys, rows[:, keys[0]] / rows[:, keys[1]], math.inf)
    ratio = score_ratio(Scene(spot.query, spot.key, mechanism), 0, keys, factors)
    return Look(rows, moved, keys, ratio.ratio[:, 0, 0], ratio.pole.item())


def check_factor(factor: float) -> None:
    """Raise a Refusal if the query cannot be multiplied by this."""
    if not LOWEST <= factor <= HIGHEST:
        raise Refusal(f"factor: expected a number from 1/16 to 16, got {factor:g}; move the slider.")


def _closed(spot: Spot) -> bool:
    """Whether the ratio has a closed form."""
    return spot.layer.rotary is None and spot.layer.key_mask is None


def _row(spot: Spot, mechanism: str, factor: float) -> Answer:
    found = look(spot, mechanism, (factor,))
    numbers = measure(found.weights[0])
    return {
        "row": found.weights[0].tolist(),
        "entropy": numbers.entropy.item(),
        "largest": numbers.largest_weight.item(),
        "negative": numbers.negative_mass.item(),
        "sum": numbers.row_sum.item(),
        "moved": found.moved.item(),
        "ratio": _finite(found.ratio.item()),
    }


def _curve(spot: Spot, mechanism: str, factors: Sequence[float]) -> Answer:
    found = look(spot, mechanism, factors)
    around = [found.pole * 2**step for step in NEAR if LOWEST <= found.pole * 2**step <= HIGHEST]
    near = look(spot, mechanism, around).ratio.tolist() if around else []
    return {
        "entropy": measure(found.weights).entropy.tolist(),
        "ratio": [_finite(number) for number in found.ratio.tolist()],
        "near": [(factor, _finite(number)) for factor, number in zip(around, near, strict=True)],
        "pole": _finite(found.pole),
        "keys": found.keys,
        "extent": found.weights.abs().max().item() * len(spot.visible),
    }


def _finite(number: float) -> float | None:
    """JSON has no infinity."""
    return number if math.isfinite(number) else None


def _check(name: str, number: int, count: int, what: str) -> None:
    if not 0 <= number < count:
        raise Refusal(f"{name}: expected a number from 0 to {count - 1}, {what}, got {number}; choose another.")

"""Whether a result is right: its error against float64, beside that of the torch backend in the same dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from affinear.bench.cases import TRAINING, Case, Inputs
from affinear.bench.contenders import ours, step

SLACK = 4 * torch.finfo(torch.float32).eps  # float32 against float32 would otherwise fail by luck
LARGE = 2**25  # beyond so many elements only the corners are compared


@dataclass(frozen=True)
class Finding:
    """How far a result is from float64, and how far it may be.

    Attributes:
        error: Relative, of the worst (batch, head) of the tensor that fares worst.
        budget: What that tensor is allowed.
    """

    error: float
    budget: float

    @property
    def right(self) -> bool:
        """Whether the error is within its budget; NaN is not."""
        return self.error <= self.budget


class Judge:
    """Knows the float64 answer and gradients of one set of inputs, computed when first asked for.

    Where inputs are large, the first and last batch entry and of those the first and last head stand for all.

    Args:
        case: What is computed.
        inputs: Of what.
    """

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.case, self.inputs = case, inputs

    def find(self, results: Sequence[Tensor]) -> Finding:
        """Compare an answer (and its three gradients) with float64."""
        expected, budgets = self._expected
        # An answer alone is compared with the answer alone.
        return worst([self._corners(x) for x in results], expected[: len(results)], budgets[: len(results)])

    @cached_property
    def _expected(self) -> tuple[tuple[Tensor, ...], list[float]]:
        narrow = Inputs(*(self._corners(x) for x in (*self.inputs.tokens, self.inputs.grad)))
        wide = Inputs(*(x.double() for x in (*narrow.tokens, narrow.grad)))
        torch_backend = ours(self.case, narrow.query.device, "torch")
        expected = step(torch_backend, wide, TRAINING)()
        plain = step(torch_backend, narrow, TRAINING)()
        return expected, [budget(relative_error(got, want)) for got, want in zip(plain, expected, strict=True)]

    def _corners(self, x: Tensor) -> Tensor:
        if self.case.shape.elements <= LARGE:
            return x
        batch, heads = ([0] if size == 1 else [0, size - 1] for size in (x.shape[0], x.shape[2]))
        return x[batch][:, :, heads]


def worst(got: Sequence[Tensor], want: Sequence[Tensor], budgets: Sequence[float]) -> Finding:
    """What to say about several results: the first that is wrong, or the one nearest to its budget."""
    errors = [relative_error(x, y) for x, y in zip(got, want, strict=True)]
    findings = [Finding(error, allowed) for error, allowed in zip(errors, budgets, strict=True)]
    return next((one for one in findings if not one.right), max(findings, key=lambda one: one.error / one.budget))


def budget(plain_error: float) -> float:
    """What a contender may be off where the torch backend in the same dtype is off by so much."""
    return 2 * plain_error + SLACK


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm, of the worst (batch, head) of (B, N, H, D).

    Examples:
        >>> want = torch.ones(1, 4, 2, 3)
        >>> round(relative_error(want * torch.tensor([1.0, 1.5])[:, None], want), 3)
        0.5
    """
    difference = (got.double() - want.double()).square().sum((1, 3)).sqrt()
    size = want.double().square().sum((1, 3)).sqrt()
    return (difference / size.clamp(min=torch.finfo(torch.float64).tiny)).max().item()


def finite(results: Sequence[Tensor]) -> bool:
    """Whether every number of every result is finite."""
    return all(bool(torch.isfinite(x).all()) for x in results)

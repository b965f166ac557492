"""One token at a time: how long a step from state to state takes, beside reading and writing the state once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from affinear.bench import timing
from affinear.bench.cases import Case, Shape, draw
from affinear.bench.contenders import Step
from affinear.bench.judge import Finding, budget, relative_error, worst
from affinear.bench.measure import Clock, blank, measured, surviving
from affinear.bench.plan import Plan
from affinear.bench.rows import Row
from affinear.ops import State, attention, summarize

ONE_TOKEN = "one token"
PAST = 256  # tokens that a state has seen already; its size does not depend on them

Advance = Callable[[State, Tensor, Tensor, Tensor], tuple[Tensor, State]]


@dataclass(frozen=True)
class Decoder:
    """A way to take one step.

    Attributes:
        name: As the table has it.
        advance: State, query, key and value (B, 1, H, D) to the answer and the next state, which may be the same
            object changed in place.
    """

    name: str
    advance: Advance


def decoders(mechanism: str, device: torch.device) -> list[Decoder]:
    """Every way to take a step; a new one is added here.

    Examples:
        >>> [one.name for one in decoders("mala", torch.device("cpu"))]
        ['affinear torch']
    """
    backends = ("triton", "torch") if device.type == "cuda" else ("torch",)
    return [Decoder(f"affinear {backend}", functional(mechanism, backend)) for backend in backends]


def functional(mechanism: str, backend: str) -> Advance:
    """The public operator over one token, which makes a new state."""

    def advance(state: State, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, State]:
        return attention(
            query, key, value, mechanism, causal=True, initial_state=state, return_state=True, backend=backend
        )

    return advance


def state_bytes(state: State) -> int:
    """Bytes of all statistics of a state."""
    sizes: list[int] = []
    state.map(lambda x: sizes.append(x.nbytes) or x)
    return sum(sizes)


class Decoding:
    """States and tokens for a step, and what the first of them has to come to.

    Args:
        case: One token per sequence.
        clock: Where.
    """

    def __init__(self, case: Case, clock: Clock) -> None:
        self.case, self.clock = case, clock

    @cached_property
    def states(self) -> list[State]:
        """Different pasts, enough of them to keep the cache cold."""
        first = self._past(0)
        return [first, *map(self._past, range(1, timing.input_sets(2 * state_bytes(first), self.clock.device)))]

    @cached_property
    def expected(self) -> tuple[tuple[Tensor, ...], list[float]]:
        """Answer and covariance in float64, and how far each may be off."""
        advance = functional(self.case.mechanism, "torch")
        tokens = self._token(0)
        wide = _results(*advance(self.states[0].to(torch.float64), *(x.double() for x in tokens)))
        plain = _results(*advance(self.states[0], *tokens))
        return wide, [budget(relative_error(got, want)) for got, want in zip(plain, wide, strict=True)]

    def measure(self, decoder: Decoder) -> Row:
        """Check and time one way to take a step."""
        row = blank("decode", decoder.name, ONE_TOKEN, self.case)

        def make() -> list[Step]:
            return [self._step(decoder, seed) for seed in range(len(self.states))]

        def find(results: Sequence[Tensor]) -> Finding:
            return worst(results, *self.expected)

        def fill() -> Row:
            size = state_bytes(self.states[0])
            return measured(replace(row, traffic=2 * size, held=size), make, find, self.clock)

        return surviving(row, fill)

    def _step(self, decoder: Decoder, seed: int) -> Step:
        state, tokens = self.states[seed].map(Tensor.clone), self._token(seed)

        def advance() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return _results(*decoder.advance(state, *tokens))

        return advance

    def _token(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        return draw(self.case, self.clock.device, seed).tokens

    def _past(self, seed: int) -> State:
        shape = self.case.shape
        past = Case(Shape(shape.batch, shape.heads, PAST, shape.width), self.case.dtype)
        inputs = draw(past, self.clock.device, 1000 + seed)
        return summarize(inputs.key, inputs.value, self.case.mechanism, backend="torch")


def rows(plan: Plan, told: Callable[[str], None]) -> Iterator[Row]:
    """The table of one token at a time."""
    told(f"decode {plan.decode}")
    decoding = Decoding(plan.case(plan.decode, causal=True), plan.clock)
    for decoder in decoders(plan.mechanism, plan.clock.device):
        yield decoding.measure(decoder)


def _results(out: Tensor, state: State) -> tuple[Tensor, ...]:
    # As (B, *, H, *), like tokens, so that one measure of error serves both.
    return out, state.covariance.transpose(1, 2)

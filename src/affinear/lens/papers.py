"""The papers' analysis figures, drawn anew from this library: numbers, a picture of them, and a reading in words.

Tokens are synthetic, in float64 and from fixed seeds, so every run gives the same bytes. The module needs matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from affinear.lens import plots
from affinear.lens.measures import (
    collisions,
    effective_rank,
    neighbourhood,
    norm_correlation,
    row_numbers,
    score_ratio,
    signs,
)
from affinear.lens.plots import LABELS
from affinear.lens.rows import entropy
from affinear.lens.scene import Scene
from affinear.ops import rotary_2d

COMPARED = ("softmax", "linear", "inline", "nala", "mala")

# InLine's Figure 1, part (a), as printed there.
PRINTED_KEYS = ((0.61, 1.85), (1.02, 1.0), (1.92, 0.65), (1.82, 0.31))
PRINTED_QUERIES = ((0.40, 0.71), (1.13, 2.05))
PRINTED_ROWS: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]] = MappingProxyType(
    {
        "softmax": ((0.31, 0.23, 0.25, 0.20), (0.44, 0.19, 0.23, 0.13)),
        "relu": ((0.32, 0.23, 0.25, 0.19), (0.32, 0.23, 0.25, 0.19)),
        "inline": ((0.31, 0.23, 0.25, 0.20), (0.42, 0.21, 0.26, 0.12)),
    }
)

Floats = tuple[float, ...]


@dataclass(frozen=True)
class Drawn:
    """One finished figure.

    Attributes:
        name: What `figures` calls it.
        source: Which paper's figure or claim it reproduces.
        numbers: The plain numbers behind it, a frozen dataclass.
        reading: What they say, one paragraph; every number in it is computed from `numbers`.
        figure: The picture, not yet saved; `affinear.lens.figures.render` makes a file of it.
    """

    name: str
    source: str
    numbers: Any
    reading: str
    figure: Figure


@dataclass(frozen=True)
class NormPanel:
    """Entropy beside norm under one mechanism, for N queries and M keys.

    Attributes:
        mechanism: Its name.
        row_entropy: (N,), in nats, of each query's row.
        column_entropy: (M,), in nats, of each key's column.
        query_correlation: Spearman's, of row entropy and query norm.
        key_correlation: Spearman's, of column entropy and key norm.
    """

    mechanism: str
    row_entropy: Floats
    column_entropy: Floats
    query_correlation: float
    key_correlation: float

    @property
    def span(self) -> float:
        """Largest less smallest row entropy."""
        return max(self.row_entropy) - min(self.row_entropy)


@dataclass(frozen=True)
class Norms:
    """Does a louder query look more sharply, and does a louder key?

    Attributes:
        query_norm: (N,).
        key_norm: (M,).
        panels: One for each mechanism.
    """

    query_norm: Floats
    key_norm: Floats
    panels: tuple[NormPanel, ...]

    @property
    def reading(self) -> str:
        """What the numbers say."""
        found = {panel.mechanism: panel for panel in self.panels}
        answering = ("inline", "mala", "nala")
        told = [f"{found[name].query_correlation:.2f} with {LABELS[name]}" for name in answering]
        keys = [f"{panel.key_correlation:.2f} with {LABELS[panel.mechanism]}" for panel in self.panels]
        soft, plain = found["softmax"], found["linear"]
        return (
            f"Norms run from {min(self.query_norm):.1f} to {max(self.query_norm):.0f}, for {len(self.query_norm)} "
            f"queries and {len(self.key_norm)} keys alike. Under softmax the louder query has the sharper row: rank "
            f"correlation {soft.query_correlation:.2f}, with entropies from {min(soft.row_entropy):.2f} to "
            f"{max(soft.row_entropy):.2f} nats. Plain linear attention over elu + 1 has {plain.query_correlation:.2f}, "
            f"but its entropies span {plain.span:.4f} nats in all: an order without an effect. The correlation is "
            f"{_listed(told)}; entropies span {_listed([f'{found[name].span:.2f}' for name in answering])} nats. "
            f"For keys and the entropy of their columns it is {_listed(keys)}."
        )


@dataclass(frozen=True)
class RatioCurve:
    """Ratio of two weights under one mechanism.

    Attributes:
        mechanism: Its name.
        ratio: (F,), weight of the first key over that of the second.
        start: The ratio at factor one.
        pole: Factor at which the second weight passes through zero, infinite where it never does.
    """

    mechanism: str
    ratio: Floats
    start: float
    pole: float


@dataclass(frozen=True)
class Ratios:
    """How the ratio of two keys' weights answers a louder query.

    Attributes:
        factors: (F,), what the query's features are multiplied by.
        curves: One for each mechanism.
    """

    factors: Floats
    curves: tuple[RatioCurve, ...]

    @property
    def reading(self) -> str:
        """What the numbers say."""
        found = {curve.mechanism: curve for curve in self.curves}
        soft, plain, inline, mala = (found[name] for name in ("softmax", "linear", "inline", "mala"))
        last = self.factors[-1]
        return (
            f"At factor 1 the two keys stand {soft.start:.2f} to 1 under softmax and {plain.start:.2f} to 1 under "
            f"linear attention. At factor {last:g} softmax has {soft.ratio[-1]:.0f} to 1, which is {soft.start:.2f} to "
            f"the power of {last:g}; linear attention still has {plain.ratio[-1]:.2f} to 1. MALA starts at "
            f"{mala.start:.2f} and grows without bound up to factor {mala.pole:.2f}, where the weight of the second "
            f"key passes through zero; beyond, that weight and with it the ratio are negative, {mala.ratio[-1]:.2f} at "
            f"factor {last:g}. InLine starts at {inline.start:.2f} and does the same at {inline.pole:.2f}. That a "
            f"louder query prefers the first key ever more is thus true below the pole only."
        )


@dataclass(frozen=True)
class Rows:
    """Rows of one mechanism.

    Attributes:
        mechanism: Its name.
        rows: One row of weights for each query.
    """

    mechanism: str
    rows: tuple[Floats, ...]

    @property
    def moved(self) -> float:
        """The largest difference of a weight between the first row and the last."""
        return max(abs(a - b) for a, b in zip(self.rows[0], self.rows[-1], strict=True))


@dataclass(frozen=True)
class Collided:
    """Pairs of queries that one mechanism cannot tell apart.

    Attributes:
        mechanism: Its name.
        pairs: One count for each tolerance.
    """

    mechanism: str
    pairs: tuple[int, ...]


@dataclass(frozen=True)
class Confusion:
    """Different queries, one row: the vectors of InLine's Figure 1, and a count over random rays.

    Attributes:
        keys: The four printed keys.
        queries: Four queries, evenly from the first printed one to the last.
        examples: Their rows, one entry for each mechanism.
        tolerances: How far rows may differ and still count as one, in multiples of the uniform weight.
        counts: Pairs that count as one, one entry for each mechanism.
        on_one_ray: How many pairs differ in length alone.
        pairs: How many pairs there are.
    """

    keys: tuple[Floats, ...]
    queries: tuple[Floats, ...]
    examples: tuple[Rows, ...]
    tolerances: Floats
    counts: tuple[Collided, ...]
    on_one_ray: int
    pairs: int

    @property
    def reading(self) -> str:
        """What the numbers say."""
        moved = [f"{row.moved:.3f} with {LABELS[row.mechanism]}" for row in self.examples]
        strict, loose = self.tolerances[0], self.tolerances[-1]
        exact = [f"{count.pairs[0]} with {LABELS[count.mechanism]}" for count in self.counts]
        close = [f"{count.pairs[-1]} with {LABELS[count.mechanism]}" for count in self.counts]
        return (
            f"From the first printed query to the last the most that a weight moves is {_listed(moved)}; it would be "
            f"zero for ReLU, were the printed, rounded queries exactly on one ray. Of {self.pairs} pairs of random "
            f"queries, {self.on_one_ray} differ in length alone. Rows that agree to {strict:g} of the uniform weight: "
            f"{_listed(exact)}. Rows that agree to {loose:g} of it: {_listed(close)}."
        )


@dataclass(frozen=True)
class Place:
    """Mass around the query under one mechanism, mean over the queries.

    Attributes:
        mechanism: Its name.
        plain: Sum of the weights in the 3 x 3 window.
        rotary: The same with rotary positions.
        plain_share: Sum of |w| there, as a share of the row's.
        rotary_share: The same with rotary positions.
    """

    mechanism: str
    plain: float
    rotary: float
    plain_share: float
    rotary_share: float


@dataclass(frozen=True)
class Locality:
    """How much each mechanism looks at what is around the query.

    Attributes:
        side: The grid is side x side.
        uniform: What a uniform row has in the window, mean over the queries: below 9 / N because of the border.
        places: One for each mechanism.
    """

    side: int
    uniform: float
    places: tuple[Place, ...]

    @property
    def reading(self) -> str:
        """What the numbers say."""
        times = [f"{place.plain / self.uniform:.1f} with {LABELS[place.mechanism]}" for place in self.places]
        turned = [f"{place.rotary / self.uniform:.1f} with {LABELS[place.mechanism]}" for place in self.places]
        signed = [
            f"{place.rotary_share / self.uniform:.1f} with {LABELS[place.mechanism]}"
            for place in self.places
            if place.mechanism in ("inline", "mala")
        ]
        return (
            f"A uniform row has {self.uniform:.4f} of its mass in the window (9/N is "
            f"{9 / self.side**2:.4f}; queries at the border have fewer neighbours). In multiples of that, rows have "
            f"{_listed(times)}. With rotary positions they have {_listed(turned)}. Counted as a share of all |w|, so "
            f"that what is negative elsewhere does not help, they have {_listed(signed)}, rotary positions included."
        )


@dataclass(frozen=True)
class SignCurve:
    """Signs and sums of one mechanism's rows, one entry for each size of the features.

    Attributes:
        mechanism: Its name.
        rotary: Whether positions turn.
        negative_share: Mean share of negative weights.
        absolute_mass: Mean sum of |w|.
        row_sum: Mean row sum.
        lowest_sum: Smallest row sum.
        highest_sum: Largest row sum.
    """

    mechanism: str
    rotary: bool
    negative_share: Floats
    absolute_mass: Floats
    row_sum: Floats
    lowest_sum: Floats
    highest_sum: Floats


@dataclass(frozen=True)
class SignsBySize:
    """What lies below zero as features grow, and what the released order of operations does to row sums.

    Attributes:
        keys: How many there are.
        width: Head width.
        sizes: Standard deviations of queries and keys.
        curves: One for each mechanism, with and without rotary positions.
    """

    keys: int
    width: int
    sizes: Floats
    curves: tuple[SignCurve, ...]

    def of(self, mechanism: str, rotary: bool) -> SignCurve:
        """The curve of a mechanism."""
        return next(curve for curve in self.curves if (curve.mechanism, curve.rotary) == (mechanism, rotary))

    @property
    def reading(self) -> str:
        """What the numbers say."""
        mala, turned, inline = self.of("mala", False), self.of("mala", True), self.of("inline", False)
        released = self.of("mala_released", True)
        start, late = self.sizes.index(0.2), self.sizes.index(2.0)
        error = max(abs(total - 1) for total in (*turned.lowest_sum, *turned.highest_sum))
        return (
            f"With {self.keys} keys of width {self.width} and features of size {self.sizes[start]:g}, about what MAViT "
            f"starts its training with, {mala.negative_share[start]:.1%} of MALA's weights are negative; at size "
            f"{self.sizes[late]:g} it is {mala.negative_share[late]:.1%}, with Σ|w| = {mala.absolute_mass[late]:.2f}, "
            f"and of InLine's {inline.negative_share[late]:.1%}, with Σ|w| = {inline.absolute_mass[late]:.2f}. Rotary "
            f"positions, applied as released, make {released.negative_share[start]:.1%} of the weights negative "
            f"already at size {self.sizes[start]:g}, and rows sum to {released.row_sum[start]:.2f} on average, to "
            f"{released.row_sum[late]:.2f} at size {self.sizes[late]:g}. The centred form has "
            f"{turned.negative_share[start]:.1%} negative weights at size {self.sizes[start]:g}, and no row sum is "
            f"further from one than {_order(error)}."
        )


@dataclass(frozen=True)
class Scores:
    """The weights of one mechanism's rows, sorted.

    Attributes:
        mechanism: Its name.
        mean_sorted: (M,), each row from its largest weight to its smallest, mean over the rows, times M.
        largest: (R,), the largest weight of each row, sorted.
    """

    mechanism: str
    mean_sorted: Floats
    largest: Floats

    @property
    def p_max(self) -> float:
        """Mean of the largest weights."""
        return math.fsum(self.largest) / len(self.largest)


@dataclass(frozen=True)
class Distributions:
    """How a row spreads its weights over the keys.

    Attributes:
        scores: One for each mechanism.
    """

    scores: tuple[Scores, ...]

    @property
    def reading(self) -> str:
        """What the numbers say."""
        keys = len(self.scores[0].mean_sorted)
        told = [
            f"{score.p_max:.4f} ({score.p_max * keys:.1f} times) with {LABELS[score.mechanism]}"
            for score in self.scores
        ]
        found = {score.mechanism: score for score in self.scores}
        half = {name: _keys_for_half(found[name].mean_sorted) for name in ("softmax", "linear", "mala")}
        lowest = found["mala"].mean_sorted[-1]
        return (
            f"Over {keys} keys a uniform row has weights of {1 / keys:.4f}. The largest weight is on average "
            f"{_listed(told)}. The first half of a row's sum lies on {half['softmax']} keys under softmax, on "
            f"{half['mala']} under MALA, on {half['linear']} under linear attention. MALA pays with its smallest "
            f"weights, on average {lowest:.1f} times the uniform one."
        )


@dataclass(frozen=True)
class RankCurve:
    """Ranks of one mechanism's weight matrix, one entry for each number of tokens.

    Attributes:
        mechanism: Its name.
        effective: Exp of the entropy of the singular values.
        exact: How many singular values are not zero but for rounding.
    """

    mechanism: str
    effective: Floats
    exact: tuple[int, ...]


@dataclass(frozen=True)
class Ranks:
    """How many different rows a weight matrix can mix.

    Attributes:
        width: Head width.
        lengths: Numbers of tokens.
        curves: One for each mechanism.
    """

    width: int
    lengths: tuple[int, ...]
    curves: tuple[RankCurve, ...]

    @property
    def reading(self) -> str:
        """What the numbers say."""
        effective = [f"{curve.effective[-1]:.1f} with {LABELS[curve.mechanism]}" for curve in self.curves]
        exact = [f"{curve.exact[-1]} with {LABELS[curve.mechanism]}" for curve in self.curves]
        return (
            f"With {self.lengths[-1]} tokens and heads of width {self.width} the weight matrix has rank "
            f"{_listed(exact)}: d = {self.width} for linear attention, d + 1 = {self.width + 1} where a mean is taken "
            f"off, 2d = {2 * self.width} with NaLa's doubled features, however many tokens there are. Counted by how "
            f"evenly the singular values share, the rank is {_listed(effective)}."
        )


def norms() -> Norms:
    """Entropy against query norm and key norm (NaLaFormer, Figure 1).

    Example:
        >>> from affinear.lens import papers
        >>> papers.norms().panels[0].query_correlation < -0.9
        True
    """
    generator = _seed(0)
    query, key = (_cloud(generator, tokens=300, width=64) for _ in range(2))
    panels = tuple(_norm_panel(Scene(query, key, name)) for name in COMPARED)
    return Norms(_plain(query.norm(dim=-1)), _plain(key.norm(dim=-1)), panels)


def ratios() -> Ratios:
    """The ratio of two weights against the size of the query's features (MALA's diagnosis).

    Example:
        >>> from affinear.lens import papers
        >>> [round(curve.pole, 2) for curve in papers.ratios().curves]
        [inf, inf, 6.32, 2.47]
    """
    generator = _seed(8)
    query, key = _normal(generator, 1, 1, 1, 8), _normal(generator, 1, 16, 1, 8)
    # From almost nothing to ten, and clear of the poles.
    factors = tuple(round(0.01 + 0.037 * step, 3) for step in range(271))

    def curve(name: str) -> RatioCurve:
        found = score_ratio(Scene(query, key, name), row=0, keys=(0, 3), factors=(*factors, 1.0))
        *ratio, start = _plain(found.ratio)
        return RatioCurve(name, tuple(ratio), start, found.pole.item())

    return Ratios(factors, tuple(curve(name) for name in ("softmax", "linear", "inline", "mala")))


def confusion() -> Confusion:
    """Different queries with one row (InLine, Figures 1 and 2)."""
    key = torch.tensor(PRINTED_KEYS, dtype=torch.float64)
    first, last = torch.tensor(PRINTED_QUERIES, dtype=torch.float64)
    query = first + torch.linspace(0, 1, 4, dtype=torch.float64)[:, None] * (last - first)
    scene = Scene(query[None, :, None], key[None, :, None])
    examples = tuple(Rows(name, _table(scene.under(name).weights()[0, 0])) for name in PRINTED_ROWS)

    rays, lengths = 32, torch.tensor([2.0, 4.0, 8.0, 16.0], dtype=torch.float64)
    generator = _seed(2)
    direction, tokens = _normal(generator, rays, 1, 64), _normal(generator, 1, 196, 1, 64)
    loud = lengths[:, None] * direction / direction.norm(dim=-1, keepdim=True)
    crowd = Scene(loud.reshape(1, -1, 1, 64), tokens)
    tolerances = tuple(10.0 ** (power / 2) for power in range(-16, -1))

    def count(name: str) -> Collided:
        return Collided(name, tuple(int(collisions(crowd.under(name), step).pairs.item()) for step in tolerances))

    counts = tuple(count(name) for name in ("relu", "linear", "nala", "mala", "inline", "softmax"))
    total = rays * len(lengths)
    pairs = rays * math.comb(len(lengths), 2), math.comb(total, 2)
    return Confusion(PRINTED_KEYS, _table(query), examples, tolerances, counts, *pairs)


def locality() -> Locality:
    """Mass in the 3 x 3 window around the query (InLine, Figure 4).

    Example:
        >>> from affinear.lens import papers
        >>> found = papers.locality()
        >>> all(place.plain > found.uniform for place in found.places)
        True
    """
    side, tokens = 14, _smooth_tokens()
    turning = rotary_2d(side, side, tokens.shape[-1])
    uniform = 0.0
    places: list[Place] = []
    for name in COMPARED:
        scene = Scene(tokens, tokens, name, grid=(side, side))
        plain, rotary = neighbourhood(scene), neighbourhood(Scene(tokens, tokens, name, None, turning, (side, side)))
        uniform = plain.uniform.mean().item()
        means = (x.mean().item() for x in (plain.weight, rotary.weight, plain.share, rotary.share))
        places.append(Place(name, *means))
    return Locality(side, uniform, tuple(places))


def signs_by_size() -> SignsBySize:
    """Negative weights, Σ|w| and row sums against the size of the features (MALA, and its released code)."""
    side, width, sizes = 56, 64, (0.05, 0.2, 0.5, 1.0, 2.0, 4.0)
    generator = _seed(4)
    query, key = (_normal(generator, 1, side**2, 1, width) for _ in range(2))
    turning = rotary_2d(side, side, width)

    def curve(name: str, rotary: bool) -> SignCurve:
        found: list[Floats] = []
        for size in sizes:
            scene = Scene(size * query, size * key, name, rotary=turning if rotary else None)
            scene = scene.only(range(0, side**2, 16))
            sign, total = signs(scene), row_numbers(scene).row_sum
            means = (x.mean().item() for x in (sign.negative_share, sign.absolute_mass, total))
            found.append((*means, total.min().item(), total.max().item()))
        return SignCurve(name, rotary, *zip(*found, strict=True))

    drawn = (("mala", False), ("mala", True), ("inline", False), ("inline", True), ("mala_released", True))
    return SignsBySize(side**2, width, sizes, tuple(curve(*which) for which in drawn))


def distributions() -> Distributions:
    """Weights of a row from largest to smallest: over-local, over-smooth, and between (MALA's score distributions).

    Example:
        >>> from affinear.lens import papers
        >>> softmax, mala, linear = papers.distributions().scores
        >>> softmax.p_max > mala.p_max > linear.p_max
        True
    """
    tokens = _smooth_tokens()

    def score(name: str) -> Scores:
        weights = Scene(tokens, tokens, name).weights()[0, 0]
        ordered = weights.sort(descending=True).values.mean(0) * weights.shape[-1]
        return Scores(name, _plain(ordered), _plain(weights.amax(-1).sort().values))

    return Distributions(tuple(score(name) for name in ("softmax", "mala", "linear")))


def ranks() -> Ranks:
    """Rank of the weight matrix against the number of tokens: that of linear attention stops.

    Example:
        >>> from affinear.lens import papers
        >>> found = papers.ranks()
        >>> {curve.mechanism: curve.exact[-1] for curve in found.curves}["mala"] == found.width + 1
        True
    """
    width, lengths = 16, (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    generator = _seed(6)
    query, key = (_normal(generator, 1, lengths[-1], 1, width) for _ in range(2))

    def curve(name: str) -> RankCurve:
        matrices = [Scene(query[:, :length], key[:, :length], name).weights()[0, 0] for length in lengths]
        exact = tuple(int(torch.linalg.matrix_rank(matrix)) for matrix in matrices)
        return RankCurve(name, tuple(effective_rank(matrix).item() for matrix in matrices), exact)

    return Ranks(width, lengths, tuple(curve(name) for name in COMPARED))


def figures() -> Mapping[str, Callable[[], Drawn]]:
    """Every figure by its name: call one to compute its numbers and draw it, in a few seconds at most.

    Example:
        >>> from affinear.lens import papers
        >>> list(papers.figures())
        ['norms', 'ratios', 'confusion', 'locality', 'signs', 'distributions', 'ranks']
        >>> papers.figures()["ranks"]().numbers.width
        16
    """
    return MappingProxyType(
        {
            "norms": _figure("norms", "NaLaFormer, Figure 1", norms, plots.norms_figure),
            "ratios": _figure("ratios", "MALA, the diagnosis and its equations", ratios, plots.ratios_figure),
            "confusion": _figure("confusion", "InLine, Figures 1 and 2", confusion, plots.confusion_figure),
            "locality": _figure("locality", "InLine, Figure 4", locality, plots.locality_figure),
            "signs": _figure("signs", "MALA, non-negative scores, and its code", signs_by_size, plots.signs_figure),
            "distributions": _figure(
                "distributions", "MALA, score distributions", distributions, plots.distributions_figure
            ),
            "ranks": _figure("ranks", "the bound on the rank of linear attention", ranks, plots.ranks_figure),
        }
    )


def pick(only: str | None) -> Mapping[str, Callable[[], Drawn]]:
    """Those of `figures` that a command line names, in the order of `figures`.

    Args:
        only: Names, with commas; None is all.

    Raises:
        ValueError: If a name is not that of a figure.

    Example:
        >>> from affinear.lens import papers
        >>> list(papers.pick("ranks,norms"))
        ['norms', 'ranks']
    """
    known = figures()
    wanted = list(known) if only is None else [name.strip() for name in only.split(",")]
    for name in wanted:
        if name not in known:
            raise ValueError(f"only: expected some of {', '.join(known)}, with commas, got {name!r}")
    return MappingProxyType({name: draw for name, draw in known.items() if name in wanted})


def _figure(name: str, source: str, collect: Callable[[], Any], draw: Callable[[Any], Figure]) -> Callable[[], Drawn]:
    def drawn() -> Drawn:
        numbers = collect()
        return Drawn(name, source, numbers, numbers.reading, draw(numbers))

    return drawn


def _norm_panel(scene: Scene) -> NormPanel:
    weights, correlation = scene.weights(), norm_correlation(scene)
    return NormPanel(
        str(scene.mechanism),
        _plain(entropy(weights)),
        _plain(entropy(weights.transpose(-2, -1))),
        correlation.query.item(),
        correlation.key.item(),
    )


def _seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _cloud(generator: torch.Generator, tokens: int, width: int) -> Tensor:
    """Tokens (1, N, 1, D) in random directions, with norms from 0.2 to 16, evenly on a logarithmic scale."""
    direction = _normal(generator, 1, tokens, 1, width)
    norm = 0.2 * 80 ** torch.rand(1, tokens, 1, 1, generator=generator, dtype=torch.float64)
    return norm * direction / direction.norm(dim=-1, keepdim=True)


def _smooth_tokens(side: int = 14, width: int = 32, reach: float = 1.5) -> Tensor:
    """Tokens (1, N, 1, D) of a square grid, blurred normal noise: neighbours are alike, every channel has size one."""
    noise = _normal(_seed(3), width, side, side)
    place = torch.arange(side, dtype=torch.float64)
    blur = torch.exp(-0.5 * ((place[:, None] - place) / reach) ** 2)
    blur = blur / blur.norm(dim=1, keepdim=True)
    return (blur @ noise @ blur.T).flatten(1).T.reshape(1, side**2, 1, width).contiguous()


def _plain(numbers: Tensor) -> Floats:
    return tuple(numbers.flatten().tolist())


def _table(numbers: Tensor) -> tuple[Floats, ...]:
    return tuple(_plain(row) for row in numbers)


def _keys_for_half(multiples: Floats) -> int:
    """How many keys, the heaviest first, make up half of a row whose weights times M are given."""
    total = 0.0
    for number, multiple in enumerate(multiples, start=1):
        total += multiple / len(multiples)
        if total >= 0.5:
            return number
    return len(multiples)


def _order(error: float) -> str:
    """An error rounded up to a power of ten, 1e-12 at least: what is left of rounding differs between machines."""
    return f"1e{math.ceil(math.log10(max(error, 1e-12))):d}"


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))

"""Numbers that describe an attention: how sharp, how signed, how far it looks, and how it answers a louder query.

All work on a `Scene`, row by row or a few rows at a time, for every mechanism, softmax included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import affinear
from affinear.lens.rows import RowNumbers, entropy, measure
from affinear.lens.scene import Scene
from affinear.ops import find
from affinear.ops.mechanisms import one, one_plus_reciprocal


@dataclass(frozen=True)
class Spikiness:
    """How much of a row lies on few keys; fields are (B, H, R).

    Attributes:
        largest: The largest weight.
        effective_keys: exp of the entropy: 1 for a row on one key, M for a uniform one.
    """

    largest: Tensor
    effective_keys: Tensor


@dataclass(frozen=True)
class Signs:
    """What lies below zero; fields are (B, H, R).

    Attributes:
        negative_share: How many of the weights are negative, from 0 to 1.
        negative_mass: Sum of |w| over them.
        absolute_mass: Sum of |w| over all: 1 where nothing is negative and rows sum to one.
    """

    negative_share: Tensor
    negative_mass: Tensor
    absolute_mass: Tensor


@dataclass(frozen=True)
class NormCorrelation:
    """Rank correlation of entropy and norm; fields are (B, H), from -1 to 1.

    Attributes:
        query: Of the entropy of a row and the norm of its query.
        key: Of the entropy of a column, over the rows that are looked at, and the norm of its key.
    """

    query: Tensor
    key: Tensor


@dataclass(frozen=True)
class Neighbourhood:
    """What lies around the query; fields are (B, H, R), but for `uniform`.

    Attributes:
        weight: Sum of the weights in the window, as InLine counts it.
        share: Sum of |w| in the window, as a share of the row's.
        uniform: (R,), the weight that a uniform row has there: 9 / M away from the border.
    """

    weight: Tensor
    share: Tensor
    uniform: Tensor


@dataclass(frozen=True)
class Collisions:
    """Pairs of different queries that get the same row; fields are (B, H).

    Attributes:
        pairs: How many pairs there are.
        share: Of all pairs of different queries.
        nearest: The smallest distance of two rows of different queries: the largest difference of a weight, times M.
    """

    pairs: Tensor
    share: Tensor
    nearest: Tensor


@dataclass(frozen=True)
class ScoreRatio:
    """How the ratio of two weights moves as the query grows.

    Attributes:
        factors: (F,), what the query's features are multiplied by.
        ratio: (F, B, H), weight of the first key over that of the second.
        pole: (B, H), the factor at which the second weight passes through zero; infinite where it never does.
    """

    factors: Tensor
    ratio: Tensor
    pole: Tensor


def row_numbers(scene: Scene) -> RowNumbers:
    """Entropy, largest weight, negative mass and sum of every row, each (B, H, R).

    Example:
        >>> import torch
        >>> from affinear import lens
        >>> scene = lens.Scene(torch.randn(1, 20, 2, 8), torch.randn(1, 20, 2, 8), "inline")
        >>> bool(((lens.row_numbers(scene).row_sum - 1).abs() < 1e-5).all())
        True
    """
    return _joined([measure(weights) for _, weights in scene.pieces()])


def spikiness(scene: Scene) -> Spikiness:
    """How much of each row lies on few keys (NaLaFormer's spikiness, MALA's score distributions)."""
    numbers = row_numbers(scene)
    return Spikiness(numbers.largest_weight, numbers.entropy.exp())


def signs(scene: Scene) -> Signs:
    """How much of each row is negative, as nothing is of softmax; MALA's paper saw none, and says there may be."""
    shares: list[Tensor] = []
    pieces: list[RowNumbers] = []
    for _, weights in scene.pieces():
        shares.append((weights < 0).to(weights.dtype).mean(-1))
        pieces.append(measure(weights))
    numbers = _joined(pieces)
    return Signs(torch.cat(shares, dim=-1), numbers.negative_mass, numbers.row_sum + 2 * numbers.negative_mass)


def row_sum_error(scene: Scene) -> Tensor:
    """How far each row is from summing to one, (B, H, R); `mala_released` with rotary positions is far."""
    return (row_numbers(scene).row_sum - 1).abs()


def norm_correlation(scene: Scene) -> NormCorrelation:
    """Does a louder query look more sharply? Spearman's correlation of entropy and norm (NaLaFormer, Figure 1).

    For keys it is the entropy of a column, which tells over how many queries a key's weights are spread.
    """
    heads = scene.query.shape[2] // scene.key.shape[2]
    query = scene.query[:, scene.numbers].norm(dim=-1).transpose(1, 2)
    key = scene.key.norm(dim=-1).transpose(1, 2).repeat_interleave(heads, dim=1)
    return NormCorrelation(spearman(row_numbers(scene).entropy, query), spearman(_column_entropy(scene), key))


def neighbourhood(scene: Scene, radius: int = 1) -> Neighbourhood:
    """How much each query on the grid looks at the window around it, 3 x 3 for a radius of 1 (InLine, Figure 4).

    Class tokens have no neighbours: rows of theirs are left out.
    """
    near, scene = _distances(scene, lambda offset: (offset.abs().amax(-1) <= radius).double())

    def sums(weights: Tensor, inside: Tensor) -> Tensor:
        sizes = weights.abs()
        return torch.stack(((weights * inside).sum(-1), (sizes * inside).sum(-1) / sizes.sum(-1)))

    weight, share = _of_rows(scene, sums, near)
    return Neighbourhood(weight, share, near.sum(-1) / scene.key.shape[1])


def attention_distance(scene: Scene) -> Tensor:
    """How far each query on the grid looks, in places, (B, H, R): the mean distance under |w| / Σ|w|.

    Class tokens lie nowhere: rows of theirs are left out, and columns do not count.
    """

    def length(offset: Tensor) -> Tensor:
        return torch.linalg.vector_norm(offset.double(), dim=-1)

    far, scene = _distances(scene, length)

    def mean(weights: Tensor, distance: Tensor) -> Tensor:
        sizes = weights.abs()
        sizes[..., : scene.prefix_tokens] = 0
        return (sizes * distance).sum(-1) / sizes.sum(-1)

    return _of_rows(scene, mean, far)


def collisions(scene: Scene, tolerance: float = 1e-6) -> Collisions:
    """Pairs of different queries that get the same row: InLine's semantic confusion (its Figures 1 and 2).

    Args:
        scene: At most a few hundred rows: all their weights are held at once.
        tolerance: Rows are the same if no weight differs by more than this times 1 / M, queries if no channel differs
            by more than this times the largest channel of both.
    """
    rows = scene.weights() * scene.key.shape[1]
    query = scene.query[:, scene.numbers].transpose(1, 2)
    apart = torch.stack([(rows - rows[:, :, i : i + 1]).abs().amax(-1) for i in range(rows.shape[2])], dim=2)
    distance = (query[:, :, :, None] - query[:, :, None]).abs().amax(-1)
    size = query.abs().amax(-1)
    different = distance > tolerance * torch.maximum(size[..., :, None], size[..., None, :])
    different = different & torch.ones_like(different[0, 0]).triu(1)
    same = (apart <= tolerance) & different
    total = different.sum((-2, -1))
    nearest = apart.where(different, torch.inf).amin((-2, -1))
    return Collisions(same.sum((-2, -1)), same.sum((-2, -1)) / total.clamp(min=1), nearest)


def score_ratio(scene: Scene, row: int, keys: tuple[int, int], factors: Sequence[float]) -> ScoreRatio:
    """How the ratio of two weights of a row moves as the features of its query are multiplied (MALA's diagnosis).

    Softmax raises the ratio to the power of the factor, plain linear attention leaves it alone. MALA's is a Möbius
    function of it, which grows, has a pole where the second weight passes through zero, and is negative beyond.

    Args:
        scene: Without rotary positions.
        row: Number of the query.
        keys: Numbers of the two keys.
        factors: F factors.
    """
    if scene.rotary is not None:
        raise ValueError("scene: expected one without rotary positions, whose ratios are closed forms, got tables")
    mechanism = find(scene.mechanism)

    def louder(factor: float) -> Tensor:
        def grow(query: Tensor) -> Tensor:
            return factor * mechanism.query_map(query)

        grown = replace(mechanism, query_map=grow)
        weights = scene.under(grown).only([row]).weights()[:, :, 0]
        return weights[..., keys[0]] / weights[..., keys[1]]

    ratio = torch.stack([louder(float(factor)) for factor in factors])
    return ScoreRatio(torch.tensor(list(factors), dtype=torch.float64), ratio, _pole(scene, row, keys[1]))


def effective_rank(matrix: Tensor) -> Tensor:
    """Exp of the entropy of the singular values of matrices (..., N, M): 1 for rank one, min(N, M) for equal values.

    Example:
        >>> import torch
        >>> from affinear.lens import effective_rank
        >>> round(effective_rank(torch.eye(5)).item(), 3)
        5.0
    """
    return entropy(torch.linalg.svdvals(matrix.to(torch.promote_types(matrix.dtype, torch.float32)))).exp()


def weight_rank(scene: Scene) -> Tensor:
    """Effective rank of the weights of the rows that are looked at, (B, H); a linear mechanism has at most D + 1."""
    return effective_rank(scene.weights())


def covariance_rank(scene: Scene, value: Tensor) -> Tensor:
    """Effective rank of the covariance of keys and values (B, M, G, E), which is all that is kept of them: (B, G)."""
    state = affinear.summarize(scene.key, value, find(scene.mechanism), rotary=scene.rotary)
    return effective_rank(state.covariance)


def spearman(first: Tensor, second: Tensor) -> Tensor:
    """Rank correlation along the last axis, (...,); zero where one of them never changes.

    Example:
        >>> import torch
        >>> from affinear.lens import spearman
        >>> round(spearman(torch.tensor([1.0, 5.0, 9.0]), torch.tensor([3.0, 2.0, 1.0])).item(), 3)
        -1.0
    """
    first, second = (_ranks(x) for x in (first, second))
    first, second = (x - x.mean(-1, keepdim=True) for x in (first, second))
    length = first.norm(dim=-1) * second.norm(dim=-1)
    return (first * second).sum(-1) / length.where(length > 0, 1.0)


def _ranks(x: Tensor) -> Tensor:
    """Ranks along the last axis; equal numbers share the mean of theirs."""
    x = x.contiguous()
    ordered = x.sort(dim=-1).values
    return (torch.searchsorted(ordered, x) + torch.searchsorted(ordered, x, right=True) - 1).double() / 2


def _joined(pieces: Sequence[RowNumbers]) -> RowNumbers:
    """Numbers of all rows from those of some each."""
    fields = ([getattr(piece, name) for piece in pieces] for name in RowNumbers.__dataclass_fields__)
    return RowNumbers(*(torch.cat(field, dim=-1) for field in fields))


def _of_rows(scene: Scene, number: Callable[[Tensor, Tensor], Tensor], by_row: Tensor) -> Tensor:
    """A number of every row, (..., R), from its weights and from what else is known of it, (R, M)."""
    found: list[Tensor] = []
    done = 0
    for rows, weights in scene.pieces():
        found.append(number(weights, by_row[done : done + len(rows)].to(weights)))
        done += len(rows)
    return torch.cat(found, dim=-1)


def _column_entropy(scene: Scene) -> Tensor:
    """Entropy of |w| down every column, (B, H, M), collected row by row."""
    total = spread = torch.zeros(())
    for _, weights in scene.pieces():
        sizes = weights.abs().to(torch.promote_types(weights.dtype, torch.float32))
        total, spread = total + sizes.sum(-2), spread + torch.special.entr(sizes).sum(-2)
    return (spread / total + total.log()).where(total > 0, 0.0)


def _distances(scene: Scene, number: Callable[[Tensor], Tensor]) -> tuple[Tensor, Scene]:
    """A number of the way from each query on the grid to each key, (R, M), and the scene without class tokens' rows.

    Columns of class tokens get zero.
    """
    if scene.grid is None:
        raise ValueError("scene: expected one with a grid, got none; pass grid=(rows, columns)")
    first, places = scene.prefix_tokens, scene.grid[0] * scene.grid[1]
    if scene.key.shape[1] != first + places:
        raise ValueError(
            f"grid: expected rows x columns = {scene.key.shape[1] - first}, the number of keys but class tokens, got "
            f"{scene.grid[0]} x {scene.grid[1]}"
        )
    place = torch.arange(places, device=scene.query.device)
    place = torch.stack((place // scene.grid[1], place % scene.grid[1]), dim=-1)
    on_grid = scene.only(scene.numbers[scene.numbers >= first])
    found = number(place[on_grid.numbers - first][:, None] - place)
    return torch.nn.functional.pad(found, (first, 0)), on_grid


def _pole(scene: Scene, row: int, key: int) -> Tensor:
    """Where the weight of a key passes through zero as the query's features grow, (B, H); infinite where it never does.

    Of InLine 1 + a (s - z) vanishes, of MALA 1 + (a + 1 / z) (s - z), with the score s of the key and the mean score z.
    """
    mechanism = find(scene.mechanism)
    plain = replace(mechanism, gain=one, mean_weight=None)
    weights = scene.under(plain).only([row]).weights()[:, :, 0, key]
    below = 1 - weights * scene.key.shape[1]  # z - s
    if mechanism.gain not in (one, one_plus_reciprocal):
        return torch.full_like(below, torch.inf)
    pole = 1 / below
    if mechanism.gain is one_plus_reciprocal:
        pole = pole - 1 / _mean_score(scene, row)
    return pole.where((below > 0) & (pole > 0), torch.inf)


def _mean_score(scene: Scene, row: int) -> Tensor:
    """Z of a query, (B, H)."""
    mechanism = find(scene.mechanism)
    query, key = mechanism.query_map(scene.query[:, row]), mechanism.key_map(scene.key).mean(dim=1)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scale = mechanism.scale_for(scene.query.shape[-1]) if scene.scale is None else scene.scale
    return scale * (query * key).sum(-1)

"""The oracle itself: weight matrices against loops over the papers' formulas, and what every row obeys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import affinear as af
from affinear.ops import rotary_1d, rotary_2d
from affinear.ops.mechanisms import elu_plus_one, nala_key, nala_query
from affinear.ops.rotary import Rotary

CENTRED = ("linear", "relu", "focused", "inline", "mala", "nala", "nala_cosine", "softmax")
RELEASED = ("mala_released", "nala_released", "linear_released")
DIVIDING = ("linear", "relu", "focused", "nala", "nala_cosine")

Randn = Callable[..., Tensor]
Error = Callable[[Tensor, Tensor], float]


def one_head(x: Tensor) -> Tensor:
    """(N, D) as a batch of one with one head."""
    return x[None, :, None]


def row_sums(query: Tensor, key: Tensor, mechanism: str, rotary: Rotary | None = None, causal: bool = False) -> Tensor:
    return af.weights(query, key, mechanism, rotary=rotary, causal=causal).sum(-1)


def assert_all_one(sums: Tensor) -> None:
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-12)


# Rows sum to one.


@pytest.mark.parametrize("mechanism", CENTRED)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_rows_sum_to_one(mechanism: str, causal: bool, rotated: bool, randn: Randn):
    # One sign per channel, so that z does not vanish where rotated scores do not.
    sign = torch.where(randn(24) < 0, -1.0, 1.0)
    query, key = sign * (randn(2, 63, 4, 24).abs() + 0.1), sign * (randn(2, 63, 2, 24).abs() + 0.1)
    assert_all_one(row_sums(query, key, mechanism, rotary_1d(63, 24) if rotated else None, causal))


@pytest.mark.parametrize("mechanism", CENTRED)
@pytest.mark.parametrize("keys", [1, 2, 7, 300])
def test_rows_over_any_number_of_keys_sum_to_one(mechanism: str, keys: int, randn: Randn):
    assert_all_one(row_sums(randn(2, 17, 3, 8), randn(2, keys, 3, 8), mechanism))


@pytest.mark.parametrize("mechanism", CENTRED)
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("loudness", [0.0, 1e-300, 1e-14, 1e-5])
def test_rows_at_the_guard_sum_to_one(mechanism: str, rotated: bool, loudness: float, randn: Randn):
    query, key = loudness * randn(1, 16, 2, 8).abs(), loudness * randn(1, 16, 2, 8).abs()
    assert_all_one(row_sums(query, key, mechanism, rotary_1d(16, 8) if rotated else None))


@pytest.mark.parametrize("mechanism", ["linear", "mala"])
def test_rows_of_queries_whose_features_all_but_vanish_sum_to_one(mechanism: str, randn: Randn):
    query = -40 + randn(1, 16, 2, 8)  # features of about 1e-18, far below the guard
    assert elu_plus_one(query).max() < 1e-12
    assert_all_one(row_sums(query, randn(1, 16, 2, 8), mechanism))


@pytest.mark.parametrize("mechanism", RELEASED)
def test_released_rows_fall_short_of_one_by_their_epsilon(mechanism: str, randn: Randn):
    rule = af.mechanisms()[mechanism]
    query, key = randn(1, 30, 2, 24), randn(1, 40, 2, 24)
    z = rule.scale_for(24) * torch.einsum("bnhf,bhf->bhn", rule.query_map(query), rule.key_map(key).mean(1))
    torch.testing.assert_close(row_sums(query, key, mechanism), z / (z + 1e-6), rtol=0, atol=1e-12)
    assert (row_sums(query, key, mechanism) < 1).all()


@pytest.mark.parametrize("mechanism", RELEASED)
def test_released_rows_with_rotary_do_not_sum_to_one(mechanism: str, randn: Randn):
    sums = row_sums(randn(1, 100, 2, 24), randn(1, 100, 2, 24), mechanism, rotary_2d(10, 10, 24))
    assert ((sums - 1).abs() > 1e-2).double().mean() > 0.5


# Each row from its paper's formula, written as loops.


def dot(x: list[float], y: list[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def linear_row(scores: list[float]) -> list[float]:
    return [score / math.fsum(scores) for score in scores]


def inline_row(scores: list[float]) -> list[float]:
    # Eq. 5, with s / N inside the scores as in the released code.
    n = len(scores)
    scores = [score / n for score in scores]
    return [score - math.fsum(scores) / n + 1 / n for score in scores]


def mala_row(scores: list[float]) -> list[float]:
    # beta * score - gamma, with s / N inside the scores as in the released code.
    n = len(scores)
    scores = [score / n for score in scores]
    beta, gamma = 1 + 1 / math.fsum(scores), math.fsum(scores) / n
    return [beta * score - gamma for score in scores]


def mala_released_row(scores: list[float]) -> list[float]:
    n, z = len(scores), math.fsum(scores) / len(scores)
    return [(score * (1 + 1 / (z + 1e-6)) - z) / n for score in scores]


def nala_released_row(scores: list[float]) -> list[float]:
    n, z = len(scores), math.fsum(scores) / len(scores)
    return [score / (z + 1e-6) / n for score in scores]


def softmax_row(scores: list[float]) -> list[float]:
    total = math.fsum(math.exp(score) for score in scores)
    return [math.exp(score) / total for score in scores]


RULES: dict[str, Callable[[list[float]], list[float]]] = {
    **dict.fromkeys(DIVIDING, linear_row),
    "inline": inline_row,
    "mala": mala_row,
    "mala_released": mala_released_row,
    "nala_released": nala_released_row,
    "linear_released": nala_released_row,  # one rule for two feature maps
    "softmax": softmax_row,
}


@pytest.mark.parametrize("mechanism", RULES)
def test_weights_are_the_paper_s_formula_term_by_term(mechanism: str, randn: Randn, relative_error: Error):
    rule = af.mechanisms()[mechanism]
    query, key = randn(5, 24), randn(9, 24)
    features_q, features_k = rule.query_map(query).tolist(), rule.key_map(key).tolist()
    scale = 1.0 if mechanism in ("nala_released", "linear_released") else 24**-0.5
    expected = [RULES[mechanism]([scale * dot(q, k) for k in features_k]) for q in features_q]
    out = af.weights(one_head(query), one_head(key), mechanism)[0, 0]
    assert relative_error(out, torch.tensor(expected, dtype=torch.float64)) <= 1e-12


def test_a_mechanism_without_a_paper_is_the_mean_plus_the_gain_times_the_centred_scores(
    randn: Randn, relative_error: Error
):
    own = af.Mechanism("own", torch.sin, torch.cos, torch.exp, nonnegative=False, paper="none")
    query, key = randn(1, 5, 1, 6), randn(1, 9, 1, 6)
    scores = 6**-0.5 * query[0, :, 0].sin() @ key[0, :, 0].cos().mT
    z = scores.mean(-1, keepdim=True)
    assert relative_error(af.weights(query, key, own)[0, 0], (1 + z.exp() * (scores - z)) / 9) <= 1e-12


# The released networks, as their code goes.


def turn(x: Tensor, rotary: Rotary) -> Tensor:
    cos, sin = (table.double()[:, None] for table in rotary)
    quarter = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + quarter * sin


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_mala_released_is_the_released_layer(backend: str, randn: Randn, relative_error: Error):
    q, k, v = randn(3, 2, 35, 3, 16).unbind()
    rotary, scale, n = rotary_2d(5, 7, 16), 16**-0.5, 35
    features_q, features_k = F.elu(q) + 1, F.elu(k) + 1
    z = scale * torch.einsum("bnhd,bhd->bnh", features_q, features_k.mean(1))[..., None]
    kv = torch.einsum("bnhd,bnhe->bhde", turn(features_k, rotary) * (scale / n) ** 0.5, v * (scale / n) ** 0.5)
    expected = torch.einsum("bnhd,bhde->bnhe", turn(features_q, rotary), kv)
    expected = expected * (1 + 1 / (z + 1e-6)) - z * v.mean(1, keepdim=True)
    assert relative_error(af.attention(q, k, v, "mala_released", rotary=rotary, backend=backend), expected) <= 1e-12


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_nala_released_is_the_released_layer(backend: str, randn: Randn, relative_error: Error):
    q, k, v = randn(3, 2, 35, 3, 16).unbind()
    rotary, n = rotary_2d(5, 7, 16), 35
    norm = q.norm(dim=-1, keepdim=True)
    power = 3 * (0.5 + norm.tanh())
    features_q = [(F.relu(sign * q) / norm) ** power for sign in (1, -1)]
    features_k = [F.relu(sign * k**3) for sign in (1, -1)]
    rotated_q, rotated_k = (
        torch.cat([turn(x, rotary) for x in features], dim=-1) for features in (features_q, features_k)
    )
    denominator = torch.einsum("bnhf,bhf->bnh", torch.cat(features_q, -1), torch.cat(features_k, -1).mean(1)) + 1e-6
    kv = torch.einsum("bnhf,bnhe->bhfe", rotated_k * n**-0.5, v * n**-0.5)
    expected = torch.einsum("bnhf,bhfe->bnhe", rotated_q, kv) / denominator[..., None]
    assert relative_error(af.attention(q, k, v, "nala_released", rotary=rotary, backend=backend), expected) <= 1e-12


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_linear_released_is_the_released_layer_of_mila(backend: str, randn: Randn, relative_error: Error):
    q, k, v = randn(3, 2, 35, 3, 16).unbind()
    rotary, n = rotary_2d(5, 7, 16), 35
    features_q, features_k = F.elu(q) + 1, F.elu(k) + 1
    z = 1 / (torch.einsum("bnhd,bhd->bnh", features_q, features_k.mean(1)) + 1e-6)
    kv = torch.einsum("bnhd,bnhe->bhde", turn(features_k, rotary) * n**-0.5, v * n**-0.5)
    expected = torch.einsum("bnhd,bhde->bnhe", turn(features_q, rotary), kv) * z[..., None]
    assert relative_error(af.attention(q, k, v, "linear_released", rotary=rotary, backend=backend), expected) <= 1e-12


# Identities between mechanisms.


def with_map(name: str, feature_map: Callable[[Tensor], Tensor]) -> af.Mechanism:
    """A built-in rule with another feature map."""
    rule = af.mechanisms()[name]
    return dataclasses.replace(rule, name=f"{name} of another map", query_map=feature_map, key_map=feature_map)


def test_mala_is_inline_plus_linear_less_the_uniform_row(randn: Randn):
    query, key = randn(2, 40, 3, 24), randn(2, 50, 3, 24)
    inline = af.weights(query, key, with_map("inline", elu_plus_one))
    expected = inline + af.weights(query, key, "linear") - 1 / 50
    torch.testing.assert_close(af.weights(query, key, "mala"), expected, rtol=0, atol=1e-13)


def test_answers_of_mala_are_those_of_inline_and_linear_less_the_mean(randn: Randn, relative_error: Error):
    query, key, value = randn(2, 40, 3, 24), randn(2, 50, 3, 24), randn(2, 50, 3, 10)
    inline = af.attention(query, key, value, with_map("inline", elu_plus_one))
    expected = inline + af.attention(query, key, value, "linear") - value.mean(1, keepdim=True)
    assert relative_error(af.attention(query, key, value, "mala"), expected) <= 1e-12


def positive(x: Tensor) -> Tensor:
    """The identity, told to be a feature map: the tokens are positive, so phi(q) is the query itself."""
    return 1.0 * x


@pytest.mark.parametrize("mechanism", ["mala", "inline"])
def test_scaling_the_query_s_features_sharpens_mala_and_inline(mechanism: str, randn: Randn):
    query, key = randn(1, 20, 2, 8).abs(), randn(1, 30, 2, 8).abs()
    rule = with_map(mechanism, positive)
    rows = torch.stack([af.weights(factor * query, key, rule) for factor in (0.25, 1.0, 4.0, 16.0)])
    spread, peak = rows.amax(-1) - rows.amin(-1), rows.amax(-1)
    assert (spread.diff(dim=0) > 0).all()
    assert (peak.diff(dim=0) > 0).all()
    assert (rows[-1] - rows[0]).abs().amax() > 1e-2


def test_scaling_the_query_s_features_leaves_linear_attention_as_it_was(randn: Randn):
    query, key = randn(1, 20, 2, 8).abs(), randn(1, 30, 2, 8).abs()
    rule = with_map("linear", positive)
    for factor in (0.25, 4.0, 16.0):
        torch.testing.assert_close(
            af.weights(factor * query, key, rule), af.weights(query, key, rule), rtol=0, atol=1e-14
        )


@pytest.mark.parametrize(
    ("mechanism", "smallest", "largest"),
    [
        ("softmax", (0.31, 0.23, 0.25, 0.20), (0.44, 0.19, 0.23, 0.13)),
        ("relu", (0.32, 0.23, 0.25, 0.19), (0.32, 0.23, 0.25, 0.19)),
        ("inline", (0.31, 0.23, 0.25, 0.20), (0.42, 0.21, 0.26, 0.12)),
    ],
)
def test_the_rows_of_inline_s_first_figure(mechanism: str, smallest: tuple[float, ...], largest: tuple[float, ...]):
    key = torch.tensor([(0.61, 1.85), (1.02, 1.0), (1.92, 0.65), (1.82, 0.31)], dtype=torch.float64)
    query = torch.tensor([(0.40, 0.71), (1.13, 2.05)], dtype=torch.float64)
    rows = af.weights(one_head(query), one_head(key), mechanism)[0, 0]
    torch.testing.assert_close(rows, torch.tensor([smallest, largest]).double(), rtol=0, atol=0.02)


# What `weights` shows is what `attention` applies.


@pytest.mark.parametrize("mechanism", RULES)
def test_weights_times_values_are_the_answers(mechanism: str, randn: Randn, relative_error: Error):
    query, key, value = randn(2, 30, 6, 24), randn(2, 30, 3, 24), randn(2, 30, 3, 10)
    mask = randn(2, 30) < 0.5
    calls: list[dict[str, Any]] = [{}, {"causal": True}, {"key_mask": mask}, {"causal": True, "key_mask": mask}]
    for options in calls:
        rows = af.weights(query, key, mechanism, **options)
        assert rows.shape == (2, 6, 30, 30)
        expected = torch.einsum("bhnm,bmhe->bnhe", rows, value.repeat_interleave(2, dim=2))
        assert relative_error(af.attention(query, key, value, mechanism, **options), expected) <= 1e-12


@pytest.mark.parametrize("mechanism", RULES)
def test_weights_are_zero_where_a_query_does_not_look(mechanism: str, randn: Randn):
    query, key = randn(1, 12, 2, 8), randn(1, 12, 2, 8)
    bounds, mask = torch.tensor([0, 5, 5, 12]), torch.arange(12) % 3 > 0
    sequence = torch.tensor([0] * 5 + [2] * 7)
    calls: list[tuple[dict[str, Any], Tensor]] = [
        ({"causal": True}, torch.ones(12, 12, dtype=torch.bool).tril()),
        ({"key_mask": mask[None]}, mask.expand(12, 12)),
        ({"cu_seqlens_q": bounds, "cu_seqlens_k": bounds}, sequence[:, None] == sequence),
    ]
    for options, visible in calls:
        rows = af.weights(query, key, mechanism, **options)
        assert (rows.masked_select(~visible) == 0).all()
        assert (rows.masked_select(visible) != 0).any()


def test_weights_have_the_dtype_of_the_query(randn: Randn):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert af.weights(randn(1, 3, 1, 4, dtype=dtype), randn(1, 5, 1, 4, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("mechanism", RULES)
def test_a_mechanism_s_weight_matrix_has_at_most_one_rank_more_than_its_features(mechanism: str, randn: Randn):
    rows = af.weights(randn(1, 60, 1, 4), randn(1, 60, 1, 4), mechanism)[0, 0]
    rank = int(torch.linalg.matrix_rank(rows, rtol=1e-10))
    if mechanism == "softmax":
        assert rank > 9
    else:
        assert rank <= (9 if mechanism.startswith("nala") else 5)


def test_nala_s_maps_tell_queries_from_keys(randn: Randn):
    x = randn(1, 5, 1, 6)
    assert not torch.allclose(nala_query(x), nala_key(x))
    forward, backward = af.weights(x, 2 * x, "nala")[0, 0], af.weights(2 * x, x, "nala")[0, 0]
    assert not torch.allclose(forward, backward.mT)

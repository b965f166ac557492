"""The numbers of a row, against loops in float64 and against closed forms."""

import math

import pytest
import torch
from torch import Tensor

import affinear
from affinear import lens

EXACT = [name for name in affinear.mechanisms() if not name.endswith("_released")]
FACTORS = (0.25, 1.0, 4.0, 16.0)


def tokens(
    *, batch: int = 2, queries: int = 3, keys: int = 40, heads: int = 2, width: int = 16
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(batch, queries, heads, width, generator=generator, dtype=torch.float64)
    key = torch.randn(batch, keys, heads, width, generator=generator, dtype=torch.float64)
    return query, key


@pytest.mark.parametrize("keys", [1, 2, 7, 300])
def test_a_uniform_row_has_entropy_log_n(keys: int):
    row = torch.full((keys,), 1 / keys, dtype=torch.float64)
    assert lens.entropy(row).item() == pytest.approx(math.log(keys), abs=1e-13)


def test_a_row_with_one_key_has_entropy_zero():
    assert lens.entropy(torch.tensor([0.0, 0.0, 1.0, 0.0])).item() == 0.0


def test_the_entropy_of_a_signed_row_is_that_of_its_absolute_shares():
    signed, shares = torch.tensor([1.5, -1.0, 0.5]).double(), torch.tensor([0.5, 1 / 3, 1 / 6]).double()
    torch.testing.assert_close(lens.entropy(signed), -(shares * shares.log()).sum())


def test_a_row_of_zeros_has_entropy_zero_and_nothing_else_either():
    numbers = lens.measure(torch.zeros(2, 5))
    for field in (numbers.entropy, numbers.largest_weight, numbers.negative_mass, numbers.row_sum):
        assert torch.equal(field, torch.zeros(2))


def test_every_number_equals_a_plain_loop():
    rows = torch.randn(4, 3, 23, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    numbers = lens.measure(rows)
    for index in torch.cartesian_prod(torch.arange(4), torch.arange(3)).tolist():
        row = rows[tuple(index)].tolist()
        total = math.fsum(abs(weight) for weight in row)
        entropy = -math.fsum(abs(weight) / total * math.log(abs(weight) / total) for weight in row)
        assert numbers.entropy[tuple(index)].item() == pytest.approx(entropy, abs=1e-13)
        assert numbers.largest_weight[tuple(index)].item() == max(row)
        assert numbers.negative_mass[tuple(index)].item() == pytest.approx(-math.fsum(w for w in row if w < 0))
        assert numbers.row_sum[tuple(index)].item() == pytest.approx(math.fsum(row), abs=1e-13)


def test_the_absolute_mass_is_the_row_sum_plus_twice_the_negative_mass():
    rows = torch.randn(9, 31, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(rows.abs().sum(-1), lens.row_sum(rows) + 2 * lens.negative_mass(rows))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rows_are_summed_in_float32(dtype: torch.dtype):
    row = torch.full((65536,), 2.0**-16, dtype=dtype)
    numbers = lens.measure(row)
    assert numbers.row_sum.dtype == numbers.entropy.dtype == torch.float32
    assert numbers.row_sum.item() == 1.0
    assert numbers.entropy.item() == pytest.approx(16 * math.log(2), rel=1e-5)


def test_loudness_gives_one_row_per_factor_batch_head_and_query():
    query, key = tokens()
    found = lens.loudness(query, key, FACTORS, "mala")
    assert found.mechanism == "mala"
    assert found.weights.shape == (4, 2, 2, 3, 40)
    assert found.numbers.entropy.shape == (4, 2, 2, 3)
    torch.testing.assert_close(found.weights[3], affinear.weights(16 * query, key, "mala"))


def test_factors_are_labelled_as_people_write_them():
    query, key = tokens()
    assert lens.loudness(query, key, (0.25, 1, 16, 0.3), "inline").labels == ("× 1/4", "× 1", "× 16", "× 0.3")


def test_loudness_without_a_factor_is_refused():
    with pytest.raises(ValueError, match="factors: expected at least one number"):
        lens.loudness(*tokens(), ())


@pytest.mark.parametrize("mechanism", EXACT)
def test_rows_sum_to_one_however_loud_the_query(mechanism: str):
    numbers = lens.loudness(*tokens(), FACTORS, mechanism).numbers
    torch.testing.assert_close(numbers.row_sum, torch.ones_like(numbers.row_sum), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "relu", "focused", "nala", "nala_cosine"])
def test_mechanisms_that_divide_have_no_negative_weight(mechanism: str):
    assert lens.loudness(*tokens(), FACTORS, mechanism).numbers.negative_mass.max() < 1e-15


def test_the_entropy_of_softmax_falls_as_the_query_gets_louder():
    assert (lens.loudness(*tokens(), FACTORS, "softmax").numbers.entropy.diff(dim=0) < 0).all()


def test_the_entropy_of_softmax_falls_at_the_rate_of_the_scores_variance():
    """For the row p of scores τx the derivative of the entropy with respect to τ is -τ Var_p(x)."""
    query, key = tokens()
    tau, step = 1.5, 1e-5
    found = lens.loudness(query, key, (tau - step, tau, tau + step), "softmax")
    slope = (found.numbers.entropy[2] - found.numbers.entropy[0]) / (2 * step)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / 4
    mean = (found.weights[1] * scores).sum(-1, keepdim=True)
    torch.testing.assert_close(slope, -tau * (found.weights[1] * (scores - mean) ** 2).sum(-1), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mechanism", ["relu", "focused"])
def test_a_homogeneous_map_with_a_division_cannot_hear_the_query(mechanism: str):
    weights = lens.loudness(*tokens(), FACTORS, mechanism).weights
    torch.testing.assert_close(weights, weights[:1].expand_as(weights), rtol=0, atol=1e-12)


def test_linear_attention_moves_a_little_because_elu_plus_one_is_not_homogeneous():
    entropy = lens.loudness(*tokens(), FACTORS, "linear").numbers.entropy
    assert 0 < (entropy - entropy[0]).abs().max() < 0.2


def test_the_largest_weight_of_mala_grows_with_a_loud_query():
    largest = lens.loudness(*tokens(), (1.0, 4.0, 16.0, 64.0), "mala").numbers.largest_weight
    assert (largest.diff(dim=0) > 0).all()


def test_inline_leaves_the_uniform_row_in_proportion_to_the_query():
    largest = lens.loudness(*tokens(), FACTORS, "inline").numbers.largest_weight
    contrast = 40 * largest - 1
    torch.testing.assert_close(contrast, contrast[1] * torch.tensor(FACTORS, dtype=torch.float64)[:, None, None, None])


def test_inline_weights_are_negative_exactly_where_a_key_falls_short_of_the_mean_by_more_than_one():
    query, key = tokens()
    shortfall = torch.einsum("bqhd,bkhd->bhqk", 4 * query, key.mean(1, keepdim=True) - key) / 4
    weights = lens.loudness(query, key, (4.0,), "inline").weights[0]
    assert torch.equal(weights < 0, shortfall > 1)
    assert (weights < 0).any()

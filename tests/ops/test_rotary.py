"""Rotary tables and the rotation of features by them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import affinear as af
from affinear.ops import rotary_1d, rotary_2d
from affinear.ops.rotary import rotate

MECHANISMS = ("linear", "inline", "mala", "nala", "nala_cosine", "mala_released", "nala_released", "softmax")

Randn = Callable[..., Tensor]
Error = Callable[[Tensor, Tensor], float]


def angles(table: tuple[Tensor, Tensor]) -> Tensor:
    """The angle of each channel pair, within half a turn, (N, D / 2)."""
    cos, sin = table
    return torch.atan2(sin.double(), cos.double())[:, ::2]


# Tables.


@pytest.mark.parametrize("dim", [2, 8, 24, 64, 96])
def test_one_dimensional_tables_turn_by_the_standard_frequencies(dim: int):
    cos, sin = rotary_1d(7, dim)
    assert cos.shape == sin.shape == (7, dim)
    assert cos.dtype == sin.dtype == torch.float32
    for position in range(7):
        for channel in range(dim):
            angle = position * 10000 ** (-2 * (channel // 2) / dim)
            assert cos[position, channel].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert sin[position, channel].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_another_base_changes_all_frequencies_but_the_first():
    turned = angles(rotary_1d(2, 8, base=100.0))[1]
    torch.testing.assert_close(turned, torch.tensor([100 ** (-m / 4) for m in range(4)]).double(), rtol=0, atol=1e-6)


def test_an_offset_table_is_a_piece_of_a_longer_one():
    for piece, whole in zip(rotary_1d(5, 8, offset=11), rotary_1d(16, 8), strict=True):
        assert torch.equal(piece, whole[11:])


@pytest.mark.parametrize("dim", [8, 24, 64])
def test_two_dimensional_frequencies_run_from_one_to_one_ten_thousandth_both_included(dim: int):
    quarter = dim // 4
    frequencies = angles(rotary_2d(2, 1, dim))[1, :quarter]  # one row down
    expected = torch.tensor([10000 ** (-m / (quarter - 1)) for m in range(quarter)]).double()
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=1e-9)
    assert frequencies[0].item() == pytest.approx(1)
    assert frequencies[-1].item() == pytest.approx(1e-4, rel=1e-6)


def test_four_channels_have_one_frequency_for_each_axis():
    torch.testing.assert_close(
        angles(rotary_2d(2, 2, 4)), torch.tensor([(0, 0), (0, 1), (1, 0), (1, 1)]).double(), rtol=0, atol=1e-6
    )


def test_the_first_half_of_the_channels_turns_with_the_row_and_the_second_with_the_column():
    height, width, dim = 3, 5, 16
    cos, sin = rotary_2d(height, width, dim)
    assert cos.shape == sin.shape == (15, 16)
    for row in range(height):
        for column in range(width):
            for channel in range(dim):
                position = row if channel < dim // 2 else column
                angle = position * 10000 ** (-((channel % (dim // 2)) // 2) / (dim // 4 - 1))
                assert cos[row * width + column, channel].item() == pytest.approx(math.cos(angle), abs=1e-7)
                assert sin[row * width + column, channel].item() == pytest.approx(math.sin(angle), abs=1e-7)


def test_tables_of_far_positions_are_as_exact_as_those_of_near_ones():
    position = 10_000_000
    cos, sin = rotary_1d(1, 64, offset=position)
    exact = [math.fmod(position * 10000 ** (-m / 32), 2 * math.pi) for m in range(32)]
    torch.testing.assert_close(cos[0, ::2].double(), torch.tensor(exact).double().cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[0, ::2].double(), torch.tensor(exact).double().sin(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dim", [0, -2, 3, 7])
def test_channels_come_in_pairs(dim: int):
    with pytest.raises(ValueError, match=rf"dim: expected a positive multiple of 2, got {dim}"):
        rotary_1d(5, dim)


@pytest.mark.parametrize("dim", [0, 2, 6, 9])
def test_channels_of_a_grid_come_in_fours(dim: int):
    with pytest.raises(ValueError, match=rf"dim: expected a positive multiple of 4, got {dim}"):
        rotary_2d(5, 5, dim)


# Rotation.


def test_rotation_turns_adjacent_pairs_of_channels(randn: Randn):
    x = randn(2, 7, 3, 8)
    turned = rotate(x, rotary_1d(7, 8))
    as_complex = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
    angle = torch.outer(torch.arange(7), 10000 ** -(torch.arange(4) / 4)).double()
    expected = torch.view_as_real(as_complex * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-2)
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-6)


def test_rotation_is_the_released_networks_x_cos_plus_turned_x_sin(randn: Randn):
    x = randn(2, 12, 3, 16)
    cos, sin = rotary_2d(3, 4, 16)
    quarter_turn = torch.empty_like(x)
    quarter_turn[..., ::2], quarter_turn[..., 1::2] = -x[..., 1::2], x[..., ::2]
    expected = x * cos.double()[:, None] + quarter_turn * sin.double()[:, None]
    torch.testing.assert_close(rotate(x, (cos, sin)), expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("tables", [rotary_1d(300, 24), rotary_2d(15, 20, 24), rotary_1d(300, 24, offset=10**6)])
def test_rotation_preserves_the_norm_of_every_pair(tables: tuple[Tensor, Tensor], randn: Randn):
    x = randn(2, 300, 3, 24)
    before, after = (y.unflatten(-1, (12, 2)).norm(dim=-1) for y in (x, rotate(x, tables)))
    torch.testing.assert_close(after, before, rtol=1e-6, atol=0)


def test_the_first_position_does_not_turn(randn: Randn):
    x = randn(2, 1, 3, 24)
    assert torch.equal(rotate(x, rotary_1d(1, 24)), x)
    assert torch.equal(rotate(x, rotary_2d(1, 1, 24)), x)


def test_products_of_rotated_features_depend_on_the_distance_alone(randn: Randn):
    query, key = randn(1, 1, 1, 24), randn(1, 1, 1, 24)
    tables = rotary_1d(400, 24)
    turned_q, turned_k = (rotate(x.expand(-1, 400, -1, -1), tables)[0, :, 0] for x in (query, key))
    products = turned_q @ turned_k.mT
    for distance in (-7, 0, 3, 100):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=2e-5)


def test_products_on_a_grid_depend_on_the_two_distances_alone(randn: Randn):
    query, key = randn(1, 1, 1, 16), randn(1, 1, 1, 16)
    tables = rotary_2d(6, 8, 16)
    turned_q, turned_k = (rotate(x.expand(-1, 48, -1, -1), tables)[0, :, 0] for x in (query, key))
    products = (turned_q @ turned_k.mT).unflatten(0, (6, 8)).unflatten(-1, (6, 8))
    torch.testing.assert_close(products[0, 0, 2, 3], products[3, 4, 5, 7], rtol=0, atol=1e-5)
    torch.testing.assert_close(products[5, 1, 1, 6], products[4, 0, 0, 5], rtol=0, atol=1e-5)
    assert (products[0, 0, 2, 3] - products[0, 0, 3, 2]).abs() > 1e-6


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_moving_all_positions_by_the_same_distance_changes_no_answer(
    mechanism: str, randn: Randn, relative_error: Error
):
    # Tokens of one sign keep z away from zero, where rotated scores would be divided by nothing.
    query, key, value = randn(1, 30, 2, 24).abs() + 0.5, randn(1, 30, 2, 24).abs() + 0.5, randn(1, 30, 2, 5)
    here, there = (
        af.attention(query, key, value, mechanism, rotary=rotary_1d(30, 24, offset=offset)) for offset in (0, 1000)
    )
    assert relative_error(there, here) < 1e-5


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_wider_features_turn_block_by_block(blocks: int, randn: Randn):
    x, tables = randn(2, 7, 3, blocks * 8), rotary_1d(7, 8)
    turned = torch.cat([rotate(block, tables) for block in x.split(8, dim=-1)], dim=-1)
    assert torch.equal(rotate(x, tables), turned)


def test_both_signs_of_nala_turn_by_the_same_tables_of_the_head_width(randn: Randn):
    query, key = randn(1, 12, 1, 8), randn(1, 12, 1, 8)
    tables, rule = rotary_1d(12, 8), af.mechanisms()["nala_released"]
    features_q, features_k = rule.query_map(query), rule.key_map(key)

    def turn(x: Tensor) -> Tensor:
        return torch.cat([rotate(half, tables) for half in x.split(8, dim=-1)], dim=-1)[0, :, 0]

    z = features_q[0, :, 0] @ features_k[0, :, 0].mean(0)
    expected = turn(features_q) @ turn(features_k).mT / (z[:, None] + 1e-6) / 12
    torch.testing.assert_close(af.weights(query, key, "nala_released", rotary=tables)[0, 0], expected)


def test_rotation_keeps_the_dtype_of_the_features(randn: Randn):
    for dtype in (torch.float32, torch.float64):
        assert rotate(randn(1, 7, 1, 8, dtype=dtype), rotary_1d(7, 8)).dtype == dtype


# Tables of each head.


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_heads_may_turn_differently(mechanism: str, backend: str, randn: Randn, relative_error: Error):
    query, key, value = randn(3, 2, 90, 3, 8).abs().unbind()
    angle = randn(90, 3, 4).repeat_interleave(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    mask = torch.rand(2, 90) < 0.8
    every: list[dict[str, Any]] = [{}, {"causal": True}, {"key_mask": mask}]
    for options in every:
        out = af.attention(query, key, value, mechanism, rotary=(cos, sin), backend=backend, **options)
        for i in range(3):
            one, tables = slice(i, i + 1), (cos[:, i], sin[:, i])
            expected = af.attention(
                query[:, :, one],
                key[:, :, one],
                value[:, :, one],
                mechanism,
                rotary=tables,
                backend="reference",
                **options,
            )
            assert relative_error(out[:, :, one], expected) <= 1e-12


def test_a_state_keeps_that_heads_turn_differently(randn: Randn, relative_error: Error):
    query, key, value = randn(3, 2, 40, 3, 8).unbind()
    angle = randn(40, 3, 4).repeat_interleave(2, dim=-1)
    tables = angle.cos(), angle.sin()
    halves = [
        af.summarize(key[:, part], value[:, part], rotary=(tables[0][part], tables[1][part]))
        for part in (slice(0, 15), slice(15, 40))
    ]
    out = af.attend(query, halves[0] + halves[1], rotary=tables)
    assert relative_error(out, af.attention(query, key, value, rotary=tables, backend="reference")) <= 1e-12


def test_tables_of_each_head_must_have_the_heads_of_queries_and_keys(randn: Randn):
    query, key = randn(1, 6, 4, 8), randn(1, 6, 2, 8)
    tables = (torch.ones(6, 4, 8), torch.zeros(6, 4, 8))
    with pytest.raises(ValueError, match=r"rotary: expected as many query heads as key heads .* got 4 and 2; repeat"):
        af.attention(query, key, key, rotary=tables)
    with pytest.raises(ValueError, match=r"cos of shape \(tokens, heads, head_dim\) = \(6, 2, 8\), .* got \(6, 4, 8\)"):
        af.attention(key, key, key, rotary=tables)

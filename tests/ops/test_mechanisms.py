"""Feature maps and gains against the papers' formulas, written out plainly; and the registry that names them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import affinear as af
from affinear.ops.mechanisms import (
    elu_plus_one,
    focused,
    identity,
    nala_cosine_key,
    nala_cosine_query,
    nala_key,
    nala_query,
    one,
    one_plus_reciprocal,
    reciprocal,
    released_one_plus_reciprocal,
    released_reciprocal,
)

BUILT_IN = (
    "linear",
    "relu",
    "focused",
    "inline",
    "mala",
    "nala",
    "nala_cosine",
    "mala_released",
    "nala_released",
    "linear_released",
    "softmax",
)
MAPS = (identity, elu_plus_one, focused, F.relu, nala_query, nala_key, nala_cosine_query, nala_cosine_key)
DIVIDED_MAPS = (focused, nala_query, nala_cosine_query)  # those that take a norm

Randn = Callable[..., Tensor]
Error = Callable[[Tensor, Tensor], float]


# Feature maps.


def test_elu_plus_one_is_elu_plus_one(randn: Randn):
    x = 3 * randn(50, 24)
    torch.testing.assert_close(elu_plus_one(x), F.elu(x) + 1, rtol=1e-12, atol=1e-15)


def test_elu_plus_one_has_the_slope_of_elu_on_either_side_of_zero(randn: Randn):
    x = (3 * randn(50, 24)).requires_grad_()
    (slope,) = torch.autograd.grad(elu_plus_one(x).sum(), x)
    torch.testing.assert_close(slope, torch.where(x > 0, 1.0, x.exp()), rtol=1e-12, atol=0)


def test_elu_plus_one_keeps_its_relative_accuracy_however_negative_the_input():
    x = torch.linspace(-80, 0, 500)
    torch.testing.assert_close(elu_plus_one(x).double(), x.double().exp(), rtol=1e-6, atol=0)


def test_the_focused_map_is_the_cube_at_the_old_length(randn: Randn):
    x = randn(50, 24)
    positive = F.relu(x)
    cube = positive**3
    expected = cube / cube.norm(dim=-1, keepdim=True) * positive.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(focused(x), expected)
    torch.testing.assert_close(focused(x).norm(dim=-1), positive.norm(dim=-1))


def norm_aware_power(x: Tensor) -> Tensor:
    """|d(x)| ** (lambda (tau + tanh ||x||)), with lambda = 3 and tau = 0.5."""
    norm = x.square().sum(-1, keepdim=True).sqrt()
    return (x / norm).abs() ** (3 * (0.5 + torch.tanh(norm)))


def test_nala_s_query_map_is_the_norm_aware_power_split_by_sign(randn: Randn):
    x = randn(50, 24)
    power = norm_aware_power(x)
    expected = torch.cat((power * (x > 0), power * (x < 0)), dim=-1)
    torch.testing.assert_close(nala_query(x), expected)


def test_nala_s_key_map_is_the_cube_split_by_sign(randn: Randn):
    x = randn(50, 24)
    torch.testing.assert_close(nala_key(x), torch.cat((F.relu(x) ** 3, F.relu(-x) ** 3), dim=-1))


def test_nala_s_cosine_maps_multiply_to_the_cosine_of_the_difference_of_phases(randn: Randn):
    query, key = randn(50, 24), randn(60, 24)

    def phase(x: Tensor) -> Tensor:
        return math.pi / 4 * torch.tanh(20 * x / x.norm(dim=-1, keepdim=True))

    cosines = torch.cos(phase(query)[:, None] - phase(key))
    expected = (norm_aware_power(query)[:, None] * key.abs() ** 3 * cosines).sum(-1)
    torch.testing.assert_close(nala_cosine_query(query) @ nala_cosine_key(key).mT, expected)
    assert (expected >= 0).all()


def test_nala_s_cosine_maps_keep_the_norm_of_what_they_split(randn: Randn):
    x = randn(50, 24)
    torch.testing.assert_close(nala_cosine_query(x).norm(dim=-1), norm_aware_power(x).norm(dim=-1))
    torch.testing.assert_close(nala_cosine_key(x).norm(dim=-1), (x.abs() ** 3).norm(dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-8, 1.0, 1e8])
def test_features_and_their_gradients_are_finite_whatever_the_size(
    feature_map: Callable[[Tensor], Tensor], size: float, dtype: torch.dtype, randn: Randn
):
    x = (size * randn(20, 24)).to(dtype)
    x[:, ::5] = 0
    x.requires_grad_()
    features = feature_map(x)
    (gradient,) = torch.autograd.grad(features, x, torch.ones_like(features))
    assert features.isfinite().all()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("feature_map", DIVIDED_MAPS)
@pytest.mark.parametrize("size", [1e-37, 1e-30, 1e30, 1e37])
def test_norms_neither_overflow_nor_underflow(
    feature_map: Callable[[Tensor], Tensor], size: float, randn: Randn, relative_error: Error
):
    x = (size * randn(20, 24)).float()
    assert relative_error(feature_map(x), feature_map(x.double())) < 2e-6


@pytest.mark.parametrize("feature_map", [focused, nala_query, nala_cosine_query, nala_key, nala_cosine_key])
def test_a_zero_vector_has_zero_features(feature_map: Callable[[Tensor], Tensor]):
    assert (feature_map(torch.zeros(3, 8)) == 0).all()


@pytest.mark.parametrize("feature_map", MAPS)
def test_feature_maps_pass_gradcheck(feature_map: Callable[[Tensor], Tensor], randn: Randn):
    signs = randn(2, 5).sign()
    x = (signs * (0.3 + randn(2, 5).abs())).requires_grad_()  # away from the kinks at zero
    assert torch.autograd.gradcheck(feature_map, x)


@pytest.mark.parametrize("feature_map", MAPS)
def test_feature_maps_are_as_exact_in_float32_as_float32_is(
    feature_map: Callable[[Tensor], Tensor], randn: Randn, relative_error: Error
):
    x = randn(50, 24, dtype=torch.float32)
    assert feature_map(x).dtype == torch.float32
    assert relative_error(feature_map(x), feature_map(x.double())) < 1e-6


@pytest.mark.parametrize("name", BUILT_IN)
def test_products_of_features_are_not_negative_where_the_mechanism_says_so(name: str, randn: Randn):
    rule = af.mechanisms()[name]
    products = rule.query_map(randn(100, 8)) @ rule.key_map(randn(100, 8)).mT
    assert rule.nonnegative == bool((products >= 0).all())


# Gains.


@pytest.mark.parametrize(
    ("gain", "formula"),
    [
        (reciprocal, lambda z: 1 / z),
        (one, lambda z: 1.0),
        (one_plus_reciprocal, lambda z: 1 + 1 / z),
        (released_reciprocal, lambda z: 1 / (z + 1e-6)),
        (released_one_plus_reciprocal, lambda z: 1 + 1 / (z + 1e-6)),
    ],
)
def test_gains_are_exact_above_the_guard(gain: Callable[[Tensor], Tensor], formula: Callable[[float], float]):
    for z in (1e-11, 1e-3, 1.0, 8.0, 1e6):
        assert gain(torch.tensor(z, dtype=torch.float64)).item() == pytest.approx(formula(z), rel=1e-15)


@pytest.mark.parametrize("gain", [reciprocal, one_plus_reciprocal])
def test_gains_are_finite_at_and_below_the_guard(gain: Callable[[Tensor], Tensor]):
    z = torch.tensor([1e-12, 1e-300, 0.0, -1e-20], dtype=torch.float64, requires_grad=True)
    assert gain(z).tolist() == pytest.approx([1e12] * 4)
    (slope,) = torch.autograd.grad(gain(z).sum(), z)
    assert slope.isfinite().all()


@pytest.mark.parametrize(
    ("name", "gain"),
    [
        ("linear", reciprocal),
        ("relu", reciprocal),
        ("focused", reciprocal),
        ("inline", one),
        ("mala", one_plus_reciprocal),
        ("nala", reciprocal),
        ("nala_cosine", reciprocal),
        ("mala_released", released_one_plus_reciprocal),
        ("nala_released", released_reciprocal),
        ("linear_released", released_reciprocal),
        ("softmax", None),
    ],
)
def test_each_mechanism_has_its_gain(name: str, gain: Callable[[Tensor], Tensor] | None):
    assert af.mechanisms()[name].gain is gain


def test_scores_are_scaled_by_the_head_width_but_where_released_networks_do_not():
    assert af.mechanisms()["mala"].scale_for(64) == 1 / 8
    assert af.mechanisms()["nala_released"].scale_for(64) == 1
    assert af.mechanisms()["linear_released"].scale_for(64) == 1


# The registry.


def squared(name: str = "squared") -> af.Mechanism:
    return af.Mechanism(name, torch.square, torch.square, reciprocal, nonnegative=True, paper="none")


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_mechanism_is_registered_under_its_name_and_cites_a_paper(name: str):
    assert af.mechanisms()[name].name == name
    assert "arXiv" in af.mechanisms()[name].paper


@pytest.mark.usefixtures("own_registry")
def test_a_registered_mechanism_is_called_by_its_name(randn: Randn):
    rule = af.register(squared())
    assert rule == squared()
    assert af.mechanisms()["squared"] is rule
    assert list(af.mechanisms())[-1] == "squared"
    tokens = (randn(1, 9, 2, 8), randn(1, 9, 2, 8), randn(1, 9, 2, 5))
    for backend in ("torch", "reference"):
        by_name = af.attention(*tokens, "squared", backend=backend)
        assert torch.equal(by_name, af.attention(*tokens, rule, backend=backend))
    expected = torch.einsum("bhnm,bmhe->bnhe", af.weights(*tokens[:2], "squared"), tokens[2])
    torch.testing.assert_close(af.attention(*tokens, "squared"), expected)


@pytest.mark.usefixtures("own_registry")
def test_a_name_is_given_once():
    af.register(squared())
    with pytest.raises(ValueError, match=r"'squared' is taken by another mechanism; choose a new name"):
        af.register(dataclasses.replace(squared(), gain=one))
    with pytest.raises(ValueError, match=r"'mala' is taken"):
        af.register(squared("mala"))
    assert af.mechanisms()["squared"] == squared()


@pytest.mark.usefixtures("own_registry")
def test_registering_the_same_mechanism_again_changes_nothing():
    af.register(squared())
    before = dict(af.mechanisms())
    af.register(squared())
    assert dict(af.mechanisms()) == before


@pytest.mark.usefixtures("own_registry")
def test_only_a_mechanism_with_a_name_can_be_registered():
    with pytest.raises(ValueError, match=r"expected an affinear\.Mechanism, got str"):
        af.register("mala")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"expected a non-empty string, got ''"):
        af.register(squared(""))


def test_the_mapping_of_mechanisms_is_read_only():
    with pytest.raises(TypeError):
        af.mechanisms()["mine"] = squared("mine")  # pyright: ignore[reportIndexIssue]
    with pytest.raises(TypeError):
        del af.mechanisms()["mala"]  # pyright: ignore[reportIndexIssue]


@pytest.mark.usefixtures("own_registry")
def test_a_mapping_taken_earlier_does_not_change():
    before = af.mechanisms()
    af.register(squared())
    assert "squared" not in before


def test_a_mechanism_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        af.mechanisms()["mala"].gain = one  # pyright: ignore[reportAttributeAccessIssue]


def test_an_unknown_name_is_answered_with_the_known_ones(randn: Randn):
    tokens = (randn(1, 3, 1, 4), randn(1, 3, 1, 4), randn(1, 3, 1, 4))
    with pytest.raises(ValueError, match="mechanism: expected one of") as caught:
        af.attention(*tokens, "malla")
    message = str(caught.value)
    assert "'malla'" in message
    assert "affinear.register" in message
    for name in BUILT_IN:
        assert name in message


def test_a_misspelt_mechanism_is_answered_with_the_one_that_was_meant(randn: Randn):
    tokens = randn(1, 3, 1, 4)
    with pytest.raises(ValueError, match=r"got 'malla'; did you mean 'mala'\?"):
        af.attention(tokens, tokens, tokens, mechanism="malla")

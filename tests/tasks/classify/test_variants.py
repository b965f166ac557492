"""The variants say what their names say: lengths of queries, sums of rows, gains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import affinear as af
from affinear.layers import Attention
from affinear.tasks.classify import variants
from affinear.tasks.classify.variants import variant

GRID, DIM, HEADS = (4, 5), 32, 2


def layer_of(name: str) -> Attention:
    chosen = variant(name)
    layer = chosen.layer(DIM, HEADS, chosen.parts, dtype=torch.float64)
    for parameter in layer.qkv.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def rows_of(layer: Attention, x: Tensor) -> Tensor:
    query, key, *_ = layer.project(x)
    return af.weights(query, key, layer.mechanism)


def values_through(layer: Attention, x: Tensor) -> Tensor:
    """What the layer gives before its output projection, from explicit weights."""
    *_, value = layer.project(x)[:3]
    return torch.einsum("bhij,bjhe->bihe", rows_of(layer, x), value).flatten(2)


@pytest.mark.parametrize("name", ["gain_one", "no_beta", "no_gamma", "learned_constants", "learned_gain", "mala_exp"])
def test_what_is_trained_is_what_the_weights_say(name: str):
    layer, x = layer_of(name), torch.randn(2, 20, DIM, dtype=torch.float64)
    for key, parameter in layer.named_parameters():
        if "constants" in key or key.startswith("gain"):
            torch.nn.init.normal_(parameter)
    torch.testing.assert_close(layer(x, GRID), layer.proj(values_through(layer, x)))


def test_normed_queries_all_have_the_length_of_a_query_of_size_one():
    layer, x = layer_of("softmax_normed"), torch.randn(2, 20, DIM, dtype=torch.float64)
    query, key, _ = layer.project(x)
    torch.testing.assert_close(query.norm(dim=-1), torch.full((2, 20, HEADS), (DIM // HEADS) ** 0.5).double())
    plain = Attention.project(layer, x)
    torch.testing.assert_close(plain[1], key)


@pytest.mark.parametrize(
    ("name", "expected"), [("gain_one", 1.0), ("no_beta", 0.0), ("learned_gain", 1.0), ("mala_relu", 1.0)]
)
def test_rows_sum_to_what_they_should(name: str, expected: float):
    rows = rows_of(layer_of(name), torch.randn(2, 20, DIM, dtype=torch.float64)).sum(-1)
    torch.testing.assert_close(rows, torch.full_like(rows, expected))


def test_without_gamma_rows_sum_to_one_and_z():
    layer, x = layer_of("no_gamma"), torch.randn(2, 20, DIM, dtype=torch.float64)
    query, key, _ = layer.project(x)
    features = [layer.mechanism.query_map(query), layer.mechanism.key_map(key).mean(1, keepdim=True)]
    z = (DIM // HEADS) ** -0.5 * (features[0] * features[1]).sum(-1).transpose(1, 2)
    torch.testing.assert_close(rows_of(layer, x).sum(-1), 1 + z)


def test_the_gain_of_mala_is_the_sum_of_its_parts():
    query, key = torch.randn(2, 2, 20, HEADS, 16, dtype=torch.float64).unbind()
    gains = [variant(name).parts.mechanism for name in ("mala", "linear", "gain_one")]
    whole, divided, plain = (af.weights(query, key, mechanism) for mechanism in gains if mechanism is not None)
    torch.testing.assert_close(whole, divided + plain - 1 / 20)


def test_learned_constants_begin_as_malas_for_features_of_one():
    layer = layer_of("learned_constants")
    torch.nn.init.zeros_(layer.get_parameter("qkv.weight"))
    torch.nn.init.zeros_(layer.get_parameter("qkv.bias"))
    rows = rows_of(layer, torch.randn(1, 20, DIM, dtype=torch.float64))
    torch.testing.assert_close(rows, torch.full_like(rows, 1 / 20))


def test_every_list_holds_variants_that_exist():
    for name in (*variants.DEFAULT, *variants.SCORE, *variants.LAYERS, *variants.ABLATION):
        found = variant(name)
        assert found.name == name
        assert found.about
        assert found.parts.rotary == (name.endswith("+rotary") or name.startswith(("mala_layer", "nala_layer")))


@pytest.mark.parametrize("name", ["", "mela", "mala+turned", "mala+rotary+rotary", "nala_layer+rotary"])
def test_a_name_that_means_nothing_gets_a_sentence(name: str):
    with pytest.raises(ValueError, match=r"mechanism: expected one of softmax|expected one of|already"):
        variant(name)

"""The Conformer: its parts against their definitions, padding that is not seen, and streams that equal the whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from affinear.models import making
from affinear.models.speech import Conformer, LogMel
from affinear.models.speech import conformer as module
from affinear.models.speech import features as features_module
from affinear.models.speech.attention import RelativeAttention, by_distance, distance_table
from affinear.models.speech.conformer import tokens_of
from affinear.models.speech.features import mel_filters

LINEAR = ("mala", "nala", "inline", "linear", "none")


def small(**given: Any) -> Conformer:
    own: dict[str, Any] = {"num_tokens": 7, "dim": 24, "depth": 2, "num_heads": 2, "kernel_size": 7}
    network = Conformer(**{**own, **given})
    for parameter in network.parameters():  # what begins as nothing would hide mistakes
        if parameter.abs().max() == 0:
            nn.init.normal_(parameter, std=0.3)
    return network.double().eval()


def features_of(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 80, dtype=torch.float64)


@pytest.mark.parametrize("positions", ["rotary", "relative"])
@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_not_seen(positions: str, causal: bool):
    network = small(mechanism="softmax" if positions == "relative" else "mala", positions=positions, causal=causal)
    long, short = features_of(1, 120), features_of(1, 70)
    batch = torch.cat((long, torch.cat((short, 9 * features_of(1, 50)), dim=1)))
    logits, counts = network(batch, torch.tensor([120, 70]))
    assert counts.tolist() == [tokens_of(120), tokens_of(70)] == [29, 16]
    torch.testing.assert_close(logits[:1], network(long)[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(logits[1:, :16], network(short)[0], rtol=1e-9, atol=1e-9)


def test_batch_norms_learn_from_recordings_alone():
    network = small(conv_norm="batch", dropout=0.0).train()
    features = features_of(2, 60)
    other = features.clone()
    other[1, 40:] = 7
    lengths = torch.tensor([60, 40])
    first = network(features, lengths)[0]
    torch.testing.assert_close(first[1, : tokens_of(40)], network(other, lengths)[0][1, : tokens_of(40)])


@pytest.mark.parametrize("mechanism", LINEAR)
def test_a_stream_is_the_whole_however_it_is_cut(mechanism: str):
    random = np.random.default_rng()
    network, features = small(mechanism=mechanism, causal=True), features_of(2, 150)
    whole = network(features)[0]
    stream, heard, at = network.begin(2), [], 0
    sizes: set[int] = set()
    while at < 150:
        size = int(random.integers(0, 23))
        logits, stream = network.hear(features[:, at : at + size], stream)
        heard.append(logits)
        at += size
        if stream.position:
            sizes.add(stream.numbers)
            assert stream.frames.shape[1] < 7
    found = torch.cat(heard, dim=1)
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)
    assert torch.equal(found.argmax(-1), whole.argmax(-1))
    assert len(sizes) == 1


def test_what_comes_later_changes_nothing_in_a_causal_network():
    for given in ({"mechanism": "mala"}, {"mechanism": "softmax", "positions": "relative"}):
        network, features = small(causal=True, **given), features_of(1, 90)
        later = features.clone()
        later[:, 60:] += 5
        same = tokens_of(60)
        torch.testing.assert_close(network(later)[0][:, :same], network(features)[0][:, :same], rtol=1e-9, atol=1e-9)
        assert not torch.allclose(network(later)[0], network(features)[0])


def test_only_a_causal_network_with_a_state_streams():
    for given in ({"causal": False}, {"causal": True, "mechanism": "softmax"}):
        network = small(**given)
        assert not network.streams
        with pytest.raises(ValueError, match="stream: expected a causal network"):
            network.begin()


def test_relative_positions_are_the_published_formula():
    layer = RelativeAttention(16, 2, causal=False, dropout=0.0).double()
    for bias in (layer.content_bias, layer.place_bias):
        nn.init.normal_(bias)
    x, table = torch.randn(1, 6, 16).double(), distance_table(6, 16).double()
    query, key, value = layer.qkv(x).unflatten(-1, (3, 2, -1)).unbind(2)
    places = layer.place(table).unflatten(-1, (2, -1))
    scores = torch.zeros(1, 2, 6, 6, dtype=torch.float64)
    for i in range(6):
        for j in range(6):
            content = ((query[:, i] + layer.content_bias) * key[:, j]).sum(-1)
            place = ((query[:, i] + layer.place_bias) * places[5 - (i - j)]).sum(-1)
            scores[:, :, i, j] = (content + place) / math.sqrt(8)
    expected = layer.proj((scores.softmax(-1) @ value.transpose(1, 2)).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, None, table), expected)
    distances = torch.arange(5, -6, -1).expand(6, -1)
    rows = torch.arange(6)
    assert torch.equal(by_distance(distances), rows[:, None] - rows)


def test_a_long_recording_is_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch):
    network, features, mel, wave = small(), features_of(1, 131), LogMel(8000, 20), torch.randn(1, 9000)
    with torch.no_grad():
        whole, heard = network(features)[0], mel(wave)
        monkeypatch.setattr(module, "AT_ONCE", 5)
        monkeypatch.setattr(features_module, "AT_ONCE", 7)
        torch.testing.assert_close(network(features)[0], whole)
        torch.testing.assert_close(mel(wave), heard)


def test_checkpointing_gives_the_same_gradient():
    network, features = small(dropout=0.0, conv_norm="layer").train(), features_of(1, 40)
    gradients: list[torch.Tensor] = []
    for switch in (False, True):
        network.set_grad_checkpointing(switch)
        network.zero_grad()
        network(features)[0].square().sum().backward()
        assert network.stem.first.weight.grad is not None
        gradients.append(network.stem.first.weight.grad.clone())
    torch.testing.assert_close(*gradients)


def test_published_sizes():
    for name, dim, depth, heads in (("small", 144, 16, 4), ("medium", 256, 16, 4), ("large", 512, 17, 8)):
        network = making.outline(f"conformer_{name}", {})
        assert isinstance(network, Conformer)
        assert (network.dim, len(network.blocks), network.num_heads) == (dim, depth, heads)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"positions": "relative"}, "positions: expected 'rotary' or 'none' for mala"),
        ({"positions": "somewhere"}, "positions: expected one of"),
        ({"num_heads": 5}, "num_heads: expected a divisor"),
        ({"num_heads": 8}, "even width"),
        ({"kernel_size": 8}, "kernel_size: expected an odd"),
        ({"conv_norm": "group"}, "conv_norm: expected 'batch' or 'layer'"),
        ({"in_features": 3}, "in_features: expected 7"),
        ({"mechanism": "malla"}, "mala"),
    ],
)
def test_what_cannot_be_made_is_refused(given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        small(**given)


def test_features_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="features: expected"):
        small()(features_of(1, 6))
    with pytest.raises(ValueError, match="features: expected"):
        small()(torch.randn(1, 50, 40))
    with pytest.raises(ValueError, match="pretrained: expected False"):
        module.conformer_small(pretrained=True)


def test_a_tone_is_loudest_in_its_band_and_every_band_hears_something():
    mel = LogMel(16_000, 40)
    filters = mel_filters(40, 512, 16_000)
    assert (filters.sum(dim=0) > 0).all()
    line = int(torch.randint(20, 240, ()))
    tone = torch.sin(2 * math.pi * line * 16_000 / 512 * torch.arange(16_000, dtype=torch.float64) / 16_000).float()
    loudest = mel(tone[None])[0].mean(dim=0).argmax()
    assert filters[line, loudest] >= 0.5 * filters[line].max()
    assert torch.equal(mel(torch.zeros(1, 4000)), torch.full((1, mel.frames(4000), 40), math.log(1e-8)))
    assert mel(torch.zeros(1, 10)).shape == (1, 0, 40)


def test_features_are_the_definition():
    mel, wave = LogMel(8000, 12), torch.randn(1, 1000)
    spectrum = torch.stack(
        [
            torch.fft.fft(wave[0, i * 80 : i * 80 + 200].double() * torch.hann_window(200, False).double(), 512)
            for i in range(11)
        ]
    )
    energy = spectrum.abs().square()[:, :257] @ mel.filters.double()
    torch.testing.assert_close(mel(wave)[0], energy.log().float(), rtol=1e-4, atol=1e-4)

"""The encoder of long sequences: padding is nothing, every mechanism fits, and sizes are checked."""

from __future__ import annotations

import pytest
import torch

from affinear.models.sequence import SIZES, SequenceEncoder, numbers_of, size_of

MECHANISMS = ("softmax", "linear", "inline", "nala", "mala", "mala_released", "none")


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_changes_nothing(mechanism: str, pooling: str):
    size = size_of("sequence_small", {"mechanism": mechanism, "pooling": pooling})
    encoder = SequenceEncoder(size, 9, 30, 4).double().eval()
    tokens = torch.randint(1, 10, (2, 30))
    whole = encoder(tokens[:, :17])
    padded = encoder(tokens, torch.tensor([17, 17]))
    assert torch.allclose(padded, whole, atol=1e-10)
    changed = tokens.clone()
    changed[:, 20] = 0
    assert torch.equal(encoder(changed, torch.tensor([17, 17])), padded)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_only_the_attention_differs_and_every_weight_learns(mechanism: str):
    size = size_of("sequence_small", {"mechanism": mechanism})
    torch.manual_seed(0)
    encoder = SequenceEncoder(size, 9, 12, 4)
    encoder(torch.randint(1, 10, (3, 12))).square().sum().backward()
    silent = [name for name, weight in encoder.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert silent == []
    assert any("attn" in name for name, _ in encoder.named_parameters()) == (mechanism != "none")


def test_a_pair_is_judged_by_one_encoder_that_reads_both():
    encoder = SequenceEncoder(size_of("sequence_small", {}), 5, 8, 2, pairs=True).double().eval()
    tokens, lengths = torch.randint(1, 6, (3, 2, 8)), torch.tensor([[8, 5], [3, 8], [8, 8]])
    out = encoder(tokens, lengths)
    one, other = (encoder.pooled(tokens[:, i], lengths[:, i]) for i in range(2))
    assert torch.allclose(out, encoder.head(torch.cat((one, other, one * other, one - other), dim=-1)))
    with pytest.raises(ValueError, match=r"tokens: expected pairs, \(B, 2, N\), got \(3, 8\)"):
        encoder(tokens[:, 0], lengths[:, 0])


def test_checkpointing_gives_the_same_gradients():
    encoder = SequenceEncoder(size_of("sequence_small", {}), 5, 8, 2)
    tokens = torch.randint(1, 6, (2, 8))
    encoder(tokens).sum().backward()
    before = encoder.tokens.weight.grad
    encoder.zero_grad()
    encoder.set_grad_checkpointing()
    encoder(tokens).sum().backward()
    assert before is not None
    assert encoder.tokens.weight.grad is not None
    assert torch.allclose(before, encoder.tokens.weight.grad)


def test_the_outline_counts_what_the_encoder_has():
    for name in SIZES:
        size = size_of(name, {"depth": 1, "hidden": 8})
        made = SequenceEncoder(size, 15, 20, 10)
        assert numbers_of(size, 15, 20, 10) == sum(weight.numel() for weight in made.parameters())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"widht": 3}, "model_args: sequence_small takes no 'widht'; did you mean 'width'?"),
        ({"heads": 3}, "model_args: heads: expected a divisor of inner = 64, got 3"),
        ({"depth": 0}, "model_args: depth: expected a whole number from 1 to 16384, got 0"),
        ({"mechanism": "malla"}, "mala"),
        ({"pooling": "max"}, "model_args: pooling: expected one of mean, cls, got 'max'"),
    ],
)
def test_a_size_that_cannot_be_is_refused(given: dict[str, object], said: str):
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        size_of("sequence_small", given)


def test_more_tokens_than_positions_are_refused():
    encoder = SequenceEncoder(size_of("sequence_small", {}), 5, 8, 2)
    with pytest.raises(ValueError, match="tokens: expected at most 8 in a row, got 9"):
        encoder(torch.ones(1, 9, dtype=torch.int64))

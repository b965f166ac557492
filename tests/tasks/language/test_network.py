"""Language models of every family: documents of a row do not see each other, and losses are those of the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from affinear.models.making import MOST_NUMBERS
from affinear.tasks.language import network as networks
from affinear.tasks.language.network import IGNORED, LanguageNetwork, judged, made, positions
from affinear.tasks.language.shapes import SHAPES, shape_of

SMALL: dict[str, dict[str, Any]] = {
    "affinear_tiny": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "llama_tiny": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "mamba_small": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "mamba2_tiny": {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "head_dim": 8, "num_heads": 4},
}
FACTS = {"vocabulary": 50, "end": 0}


def network(name: str, **given: Any) -> LanguageNetwork:
    return made(name, {**SMALL[name], **given}, FACTS, MOST_NUMBERS).eval()


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(1, 50, (2, 12))
    fresh = torch.zeros(2, 12, dtype=torch.bool)
    fresh[0, [5, 6]] = fresh[1, 3] = True
    return tokens, fresh


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *((name, {}) for name in SMALL),
        ("affinear_tiny", {"mechanism": "softmax"}),
        ("affinear_tiny", {"softmax_every": 2}),
    ],
)
def test_no_document_sees_its_neighbour_and_every_one_is_read_as_if_alone(name: str, given: dict[str, Any]):
    model, (tokens, fresh) = network(name, **given), rows()
    with torch.no_grad():
        packed = model.hidden(tokens, fresh)
        for row, first, last in ((0, 0, 5), (0, 5, 6), (0, 6, 12), (1, 0, 3), (1, 3, 12)):
            alone = model.hidden(tokens[row : row + 1, first:last], None)
            assert torch.allclose(packed[row, first:last], alone[0], atol=2e-5)
        changed = tokens.clone()
        changed[0, :5] = torch.randint(1, 50, (5,))
        assert torch.allclose(model.hidden(changed, fresh)[0, 5:], packed[0, 5:], atol=1e-6)
        assert not torch.allclose(model.hidden(changed, None)[0, 5:], packed[0, 5:], atol=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_every_weight_learns_and_the_loss_is_the_mean_over_targets(name: str):
    model, (tokens, fresh) = network(name).train(), rows()
    targets = torch.randint(0, 50, (2, 12))
    targets[0, 3:6] = IGNORED
    loss = model(tokens, targets, fresh)
    losses, _ = model(tokens, targets, fresh, each=True)
    assert losses[targets != IGNORED].mean().item() == pytest.approx(loss.item(), rel=1e-4)
    assert losses[targets == IGNORED].tolist() == [0.0] * 3
    loss.backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize("name", SMALL)
def test_the_token_that_begins_a_document_learns(name: str):
    model, (tokens, fresh) = network(name, tie_word_embeddings=False), rows()
    tokens[fresh] = FACTS["end"]
    loss = model(tokens, tokens.roll(-1, 1), fresh)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    table = model.model.get_input_embeddings().weight
    assert table[FACTS["end"]].abs().sum() > 0
    assert table.grad[FACTS["end"]].abs().sum() > 0


def test_losses_are_those_of_all_logits_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(networks, "CHUNK", 5)
    hidden, weight, targets = torch.randn(2, 8, 6), torch.randn(30, 6), torch.randint(0, 30, (2, 8))
    targets[1, 2] = IGNORED
    losses, right = judged(hidden, weight, targets)
    logits = hidden @ weight.T
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    assert torch.allclose(losses.flatten(), expected, atol=1e-5)
    assert torch.equal(right, logits.argmax(-1) == targets)


def test_positions_begin_anew_with_every_document():
    fresh = torch.tensor([[True, False, False, True, True, False]])
    assert positions(fresh).tolist() == [[0, 1, 2, 0, 0, 1]]


def test_small_ones_have_about_fifteen_million_parameters():
    facts = {"vocabulary": 16_384, "end": 0}
    for name in ("affinear_small", "llama_small", "mamba_small", "mamba2_small"):
        family, fields = shape_of(name, {})
        with torch.device("meta"):
            model = family.make({**fields, "vocab_size": facts["vocabulary"]})
        count = sum(weight.numel() for weight in model.parameters())
        assert 14e6 < count < 16e6, (name, count)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("affinear_smal", {}, "model: expected one of .* did you mean 'affinear_small'?"),
        ("llama_tiny", {"mechanism": "mala"}, "model_args: llama_tiny takes no 'mechanism'; it takes"),
        ("affinear_tiny", {"mechanism": "malla"}, "mala"),
        ("affinear_tiny", {"num_attention_heads": 3}, "num_attention_heads: expected a divisor"),
        ("fla_gla_small", {}, "model: fla_gla_small needs fla, which is not installed"),
    ],
)
def test_a_model_that_cannot_be_is_refused_in_a_sentence(name: str, given: dict[str, Any], said: str):
    assert name == "affinear_smal" or name in SHAPES
    with pytest.raises(ValueError, match=said.replace("?", r"\?")) as refused:
        made(name, given, FACTS, MOST_NUMBERS)
    assert "\n" not in str(refused.value)

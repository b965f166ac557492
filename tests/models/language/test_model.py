"""The model is one function of a text, however the text is handed over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from affinear.models.language import AffinearCache, AffinearConfig, AffinearForCausalLM, preset, presets

from .conftest import VOCABULARY, made, small

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


def text(batch: int, length: int) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


@torch.no_grad()
def test_token_by_token_is_the_whole_forward(model: AffinearForCausalLM):
    tokens = text(2, 21)
    whole = model(tokens, use_cache=False).logits
    for sizes in ([1] * 21, [9, 1, 1, 10], [20, 1]):
        cache = AffinearCache(model.config)
        parts = [model(part, past_key_values=cache).logits for part in tokens.split(sizes, dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, **CLOSE)
        assert cache.get_seq_length() == 21
    precise = model.double()(tokens, use_cache=False).logits
    cache = AffinearCache(model.config)
    parts = [model(part, past_key_values=cache).logits for part in tokens.split([4, 1, 16], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), precise, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_token_sees_none_after_it(model: AffinearForCausalLM):
    tokens = text(1, 20)
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % VOCABULARY
    before, after = (model(x, use_cache=False).logits for x in (tokens, changed))
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12:], after[:, 12:])


@torch.no_grad()
def test_padding_on_either_side_changes_nothing(model: AffinearForCausalLM):
    short, long = text(1, 9), text(1, 14)
    alone = model(short, use_cache=False).logits
    for left in (True, False):
        padding = (5, 0) if left else (0, 5)
        batch = torch.cat((F.pad(short, padding, value=7), long))
        mask = torch.cat((F.pad(torch.ones_like(short), padding), torch.ones_like(long)))
        for cache in (False, True):
            logits = model(batch, attention_mask=mask, use_cache=cache).logits
            torch.testing.assert_close(logits[:1, 5:] if left else logits[:1, :9], alone, **CLOSE)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(model: AffinearForCausalLM):
    documents = [text(1, length) for length in (5, 1, 11, 3)]
    packed = torch.cat(documents, dim=1)
    starts = torch.tensor([0, 5, 6, 6, 17, 20])  # one of them is empty
    positions = torch.cat([torch.arange(x.shape[1]) for x in documents])[None]
    alone = torch.cat([model(x, use_cache=False).logits for x in documents], dim=1)
    for told in ({"cu_seqlens": starts}, {"cu_seqlens": starts.int()}, {"position_ids": positions, "use_cache": False}):
        torch.testing.assert_close(model(packed, **told).logits, alone, **CLOSE)


def test_the_loss_of_packed_documents_is_theirs(model: AffinearForCausalLM):
    model = model.double()
    documents = [text(1, length) for length in (5, 1, 11)]
    packed = torch.cat(documents, dim=1)
    targets = torch.cat([torch.cat((x[:, 1:], torch.full((1, 1), -100)), dim=1) for x in documents], dim=1)
    logits = torch.cat([model(x, use_cache=False).logits for x in documents], dim=1)
    wanted = F.cross_entropy(logits[0], targets[0])
    out = model(packed, labels=packed, cu_seqlens=torch.tensor([0, 5, 6, 17]))
    torch.testing.assert_close(out.loss, wanted, rtol=1e-9, atol=1e-9)
    assert out.logits is None
    positions = torch.cat([torch.arange(x.shape[1]) for x in documents])[None]
    again = model(packed, labels=packed, position_ids=positions, use_cache=False, logits_to_keep=0)
    torch.testing.assert_close(again.loss, wanted, rtol=1e-9, atol=1e-9)
    assert again.logits.shape == (1, 17, VOCABULARY)
    summed = model(packed, labels=packed, cu_seqlens=torch.tensor([0, 5, 6, 17]), num_items_in_batch=1)
    torch.testing.assert_close(summed.loss, wanted * 14, rtol=1e-9, atol=1e-9)


def test_the_loss_reaches_every_weight(model: AffinearForCausalLM):
    tokens = text(2, 12)
    model.train()(tokens, labels=tokens).loss.backward()
    silent = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert silent == []


@torch.no_grad()
def test_losses_of_tokens_are_those_of_the_whole():
    model, tokens = made(), text(2, 10)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    losses = model.token_losses(tokens, mask)
    assert losses.isnan().tolist() == [[True] + [False] * 9, [True] * 5 + [False] * 5]
    labels = tokens.masked_fill(mask == 0, -100)
    labels[1, 4] = -100  # foretold by padding
    torch.testing.assert_close(losses.nanmean(), model(tokens, mask, labels=labels).loss)


def test_checkpointing_changes_no_gradient(model: AffinearForCausalLM):
    tokens = text(1, 16)
    starts = torch.tensor([0, 7, 16])
    gradients: list[list[Tensor]] = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        loss = model.train()(tokens, labels=tokens, cu_seqlens=starts).loss
        gradients.append(list(torch.autograd.grad(loss, list(model.parameters()))))
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


def test_the_kinds_of_outputs():
    model, tokens = made(), text(2, 6)
    out = model(tokens, output_hidden_states=True, logits_to_keep=2)
    assert len(out.hidden_states) == 3
    assert out.logits.shape == (2, 2, VOCABULARY)
    plain = model(tokens, return_dict=False)
    assert isinstance(plain, tuple)
    torch.testing.assert_close(plain[0][:, -2:], out.logits)
    picked = model(tokens, logits_to_keep=torch.tensor([0, 3])).logits
    torch.testing.assert_close(picked, plain[0][:, [0, 3]])
    embedded = model(inputs_embeds=model.get_input_embeddings()(tokens)).logits
    torch.testing.assert_close(embedded, plain[0])
    assert model.train()(tokens).past_key_values is None


@pytest.mark.parametrize(("name", "millions"), [("small", 14.6), ("nala_340m", 341.1), ("mala_0.3b", 341.1)])
def test_presets_have_the_size_that_they_say(name: str, millions: float):
    with torch.device("meta"):
        model = AffinearForCausalLM(preset(name))
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions
    assert name in presets()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mechanism": "mela"}, "mechanism: expected one of .* did you mean 'mala'"),
        ({"mechansim": "mala"}, "mechansim: expected a name .* did you mean 'mechanism'"),
        ({"num_attention_heads": 3}, "num_attention_heads: expected a divisor of hidden_size 16, got 3"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor"),
        ({"head_dim": 5}, "head_dim: expected an even width"),
        ({"vocab_size": 0}, "vocab_size: expected a whole number, 1 or more, got 0"),
        ({"conv_size": -1}, "conv_size: expected a whole number, 0 or more"),
        ({"head_dim": -2}, "head_dim: expected a whole number, 1 or more, got -2"),
        ({"num_key_value_heads": 1.0}, "num_key_value_heads: expected a whole number, 1 or more, got 1.0"),
        ({"rope_theta": -1.0}, "rope_theta: expected a positive number or None, got -1.0"),
        ({"rope_theta": float("nan")}, "rope_theta: expected a positive number or None, got nan"),
        ({"rope_theta": "10000"}, "rope_theta: expected a positive number or None, got '10000'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a positive number, got 0"),
        ({"gate": "no"}, "gate: expected True or False, got 'no'"),
        ({"qk_norm": 1}, "qk_norm: expected True or False, got 1"),
        ({"layer_types": ["linear_attention"]}, "layer_types: expected 2 of"),
        ({"layer_types": ["linear_attention", "mamba"]}, "layer_types: .* got 'mamba'"),
        ({"mechanism": "softmax", "layer_types": ["linear_attention"] * 2}, "layer_types: expected only"),
    ],
)
def test_a_configuration_that_makes_no_model_is_refused(changes: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        small(**changes)


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match=r"preset: expected one of small, .*did you mean 'small'"):
        preset("smal")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "input_ids: expected a prompt of at least one token"),
        ({"input_ids": torch.tensor([[1, VOCABULARY]])}, "the tokenizer is of another vocabulary"),
        ({"input_ids": torch.tensor([[1, -1]])}, "input_ids: expected tokens 0 to 36, got -1"),
        ({"input_ids": torch.tensor([1, 2])}, r"input_ids: expected \(B, N\)"),
        ({"input_ids": torch.zeros(1, 0)}, "input_ids: expected a prompt of at least one token"),  # a tokenizer's of ""
        ({"input_ids": torch.zeros(1, 3)}, "input_ids: expected tokens in int64, got torch.float32"),
        ({}, "input_ids: expected either input_ids or inputs_embeds, got neither"),
        ({"output_attentions": True, "input_ids": torch.ones(1, 3, dtype=torch.long)}, "output_attentions: expected"),
        (
            {"attention_mask": torch.ones(1, 2), "input_ids": torch.ones(1, 3, dtype=torch.long)},
            "attention_mask: expec",
        ),
        ({"cu_seqlens": torch.tensor([0, 3]), "input_ids": torch.ones(2, 3, dtype=torch.long)}, "a batch of one"),
        (
            {"cu_seqlens": torch.tensor([], dtype=torch.long), "input_ids": torch.ones(1, 3, dtype=torch.long)},
            r"cu_seqlens: expected \(S \+ 1,\), where documents begin and the last one ends, got \(0,\)",
        ),
        ({"cu_seqlens": torch.tensor([0, 2]), "input_ids": torch.ones(1, 3, dtype=torch.long)}, "cu_seqlens"),
        (
            {"cu_seqlens": torch.tensor([0, 3]), "use_cache": True, "input_ids": torch.ones(1, 3, dtype=torch.long)},
            "cu_seqlens: expected use_cache=False",
        ),
        (
            {"position_ids": torch.tensor([[0, 5, 9]]), "input_ids": torch.ones(1, 3, dtype=torch.long)},
            "position_ids: expected positions that count up",
        ),
    ],
)
def test_bad_input_is_refused_in_a_sentence(given: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        made()(**given)


def test_a_tokenizer_of_another_vocabulary_is_refused():
    from affinear.models.language.tokens import check_tokenizer

    check_tokenizer(range(37), 37)
    with pytest.raises(ValueError, match="tokenizer: expected at most the 37 tokens of the model, got 38"):
        check_tokenizer(range(38), 37)


def test_layers_say_what_they_are():
    assert AffinearConfig(num_hidden_layers=3, softmax_every=3).layer_types == ["linear_attention"] * 2 + [
        "full_attention"
    ]
    assert small(mechanism="softmax").layer_types == ["full_attention"] * 2

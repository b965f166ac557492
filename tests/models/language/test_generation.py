"""`generate` from a cache says what recomputing the whole text would, in every way of decoding."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

from affinear.models.language import AffinearCache, AffinearForCausalLM

from .conftest import VOCABULARY, made

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
    "penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "several beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.3},
    "at least so many": {"do_sample": False, "min_new_tokens": 4, "eos_token_id": list(range(0, VOCABULARY, 2))},
    "words left out": {"do_sample": False, "bad_words_ids": [[number] for number in range(5, 20)]},
    "guided": {"do_sample": False, "guidance_scale": 1.5},
    "one token": {"do_sample": False, "max_new_tokens": 1},
    "until the end": {"do_sample": False, "eos_token_id": list(range(0, VOCABULARY, 3)), "max_new_tokens": 12},
}


def prompt(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def say(model: AffinearForCausalLM, tokens: Tensor, seed: int = 5, **way: Any) -> Any:
    torch.manual_seed(seed)
    return model.generate(tokens, **({"max_new_tokens": 5, "pad_token_id": 0} | way))  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def hybrid() -> AffinearForCausalLM:
    return made(softmax_every=2, conv_size=3)


@pytest.mark.parametrize("way", WAYS)
def test_a_cache_changes_nothing_that_is_said(hybrid: AffinearForCausalLM, way: str):
    tokens = prompt()
    model = hybrid.double()  # so that two ways of rounding never choose two tokens
    assert torch.equal(say(model, tokens, **WAYS[way]), say(model, tokens, use_cache=False, **WAYS[way]))


def test_every_kind_says_what_recomputing_does(model: AffinearForCausalLM):
    model, tokens = model.double(), prompt()
    for way in ("greedy", "beams"):
        assert torch.equal(say(model, tokens, **WAYS[way]), say(model, tokens, use_cache=False, **WAYS[way]))


def test_a_left_padded_batch_says_what_each_text_alone_does(model: AffinearForCausalLM):
    model = model.double()
    texts = [prompt(1, length) for length in (3, 9, 6)]
    batch = torch.cat([F.pad(x, (9 - x.shape[1], 0)) for x in texts])
    mask = torch.cat([F.pad(torch.ones_like(x), (9 - x.shape[1], 0)) for x in texts])
    for way in ({"do_sample": False, "num_beams": 2}, {"prefill_chunk_size": 4}):
        together = say(model, batch, attention_mask=mask, **way)[:, 9:]
        for row, alone in zip(together, texts, strict=True):
            assert torch.equal(
                row, say(model, alone, do_sample=False, num_beams=way.get("num_beams", 1))[0, alone.shape[1] :]
            )


@pytest.mark.parametrize("size", [1, 4, 9, 100])
def test_a_prompt_may_be_read_in_pieces(hybrid: AffinearForCausalLM, size: int):
    model, tokens = hybrid.double(), prompt()
    whole = say(model, tokens)
    assert torch.equal(say(model, tokens, prefill_chunk_size=size), whole)


def test_all_that_generate_returns(hybrid: AffinearForCausalLM):
    tokens = prompt()
    out = say(
        hybrid, tokens, do_sample=False, return_dict_in_generate=True, output_scores=True, output_logits=True,
        output_hidden_states=True,
    )  # fmt: skip
    assert isinstance(out.past_key_values, AffinearCache)
    assert out.past_key_values.get_seq_length() == 9 + 5 - 1
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == 5
    assert torch.equal(torch.stack([x.argmax(-1) for x in out.logits], dim=1), out.sequences[:, 9:])
    beams = say(hybrid, tokens, num_beams=2, return_dict_in_generate=True, output_scores=True)
    assert beams.sequences_scores.shape == (2,)


def test_it_goes_on_from_where_it_stopped(model: AffinearForCausalLM):
    model, tokens = model.double(), prompt(1, 12)
    whole = say(model, tokens)
    cache = AffinearCache(model.config)
    model(tokens[:, :8], past_key_values=cache)
    assert torch.equal(say(model, tokens, past_key_values=cache), whole)  # the whole text, as transformers has it
    cache.reset()
    model(tokens[:, :8], past_key_values=cache)
    rest = tokens[:, 8:]
    assert torch.equal(say(model, rest, past_key_values=cache, attention_mask=cache.mask_with(rest)), whole[:, 8:])


def test_embeddings_may_be_the_prompt(hybrid: AffinearForCausalLM):
    tokens = prompt()
    said = say(hybrid, tokens, do_sample=False)[:, 9:]
    torch.manual_seed(5)
    embedded = hybrid.get_input_embeddings()(tokens)
    again = hybrid.generate(inputs_embeds=embedded, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert torch.equal(again, said)  # pyright: ignore[reportArgumentType]


def test_embeddings_of_a_padded_batch_may_be_the_prompt(hybrid: AffinearForCausalLM):
    model, tokens = hybrid.double(), prompt()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    embedded = model.get_input_embeddings()(tokens)
    for way in ({"num_beams": 2}, {"use_cache": False}):
        said = say(model, tokens, attention_mask=mask, do_sample=False, num_beams=way.get("num_beams", 1))[:, 9:]
        given: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(inputs_embeds=embedded, **given, **way), said)  # pyright: ignore


def test_beams_and_samples_go_on_from_a_cache(model: AffinearForCausalLM):
    model, tokens = model.double(), prompt(2, 12)
    cache = AffinearCache(model.config)
    with torch.no_grad():
        model(tokens[:, :8], past_key_values=cache)
    cache.batch_repeat_interleave(3)
    for way in (WAYS["beams"], WAYS["several samples"]):
        copy = deepcopy(cache)
        assert torch.equal(say(model, tokens, past_key_values=copy, **way), say(model, tokens, **way))


def test_a_cache_that_generate_returned_goes_on(hybrid: AffinearForCausalLM):
    model, tokens = hybrid.double(), prompt()
    whole = say(model, tokens, do_sample=False, max_new_tokens=8)
    first = say(model, tokens, do_sample=False, max_new_tokens=3, return_dict_in_generate=True)
    rest = say(model, first.sequences, do_sample=False, past_key_values=first.past_key_values)
    assert torch.equal(rest, whole)


def test_what_generate_feeds_it_is_the_tokens_not_seen_yet(hybrid: AffinearForCausalLM):
    tokens = prompt()
    cache = hybrid(tokens[:, :6]).past_key_values
    model: Any = hybrid
    given = model.prepare_inputs_for_generation(tokens, next_sequence_length=3, past_key_values=cache)
    assert torch.equal(given["input_ids"], tokens[:, 6:])
    assert given["past_key_values"] is cache


def test_scores_are_those_of_the_whole_forward(hybrid: AffinearForCausalLM):
    model, tokens = hybrid.double(), prompt()
    out = say(model, tokens, do_sample=False, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        whole = model(out.sequences[:, :-1], logits_to_keep=5).logits
    torch.testing.assert_close(torch.stack(out.logits, dim=1).double(), whole, rtol=1e-6, atol=1e-6)


def test_a_streamer_gets_every_token():
    model, tokens = made(), prompt(1)

    class Listener(hf.generation.streamers.BaseStreamer):
        heard: list[int] = []  # noqa: RUF012

        def put(self, value: Tensor) -> None:
            self.heard += value.flatten().tolist()

        def end(self) -> None:
            self.heard.append(-1)

    said = say(model, tokens, do_sample=False, streamer=Listener())
    assert [*said.flatten().tolist(), -1] == Listener.heard


def test_a_state_does_not_grow():
    model = made(conv_size=3, mechanism="nala")
    sizes: set[int] = set()
    for length in (1, 30):
        cache = AffinearCache(model.config)
        say(model, prompt(1, length), past_key_values=cache)
        sizes.add(cache.numbers())
    assert sizes == {AffinearCache.size(model.config)}


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ({"cache_implementation": "static"}, "cache_implementation: expected None, as a state is the cache"),
        ({"cache_implementation": "quantized"}, "cache_implementation: expected None"),
        ({"cache_implementation": "offloaded"}, "cache_implementation: expected None"),
        ({"prompt_lookup_num_tokens": 3}, "stateful"),
        ({"assistant_model": made()}, "stateful"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "Group Beam Search requires"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "Contrastive Search requires"),
        ({"dola_layers": "low"}, "Dola Generation requires"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions: expected False"),
        ({"past_key_values": hf.DynamicCache()}, "past_key_values: expected an AffinearCache, got DynamicCache"),
        ({"max_new_tokens": 0}, "greater than 0"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_a_state_cannot_do_is_refused(way: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        say(made(), prompt(), **way)


def test_embeddings_are_not_read_in_pieces():
    embedded = torch.randn(1, 9, 16)
    with pytest.raises(ValueError, match="prefill_chunk_size: expected None beside inputs_embeds"):
        made().generate(inputs_embeds=embedded, prefill_chunk_size=4, max_new_tokens=2, pad_token_id=0)  # pyright: ignore


def test_a_prompt_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="input_ids: expected a prompt of at least one token"):
        say(made(), prompt()[:, :0])


def test_new_tokens_after_a_cache_have_to_say_so():
    model, cache = made(), None
    cache = model(prompt(1)).past_key_values
    with pytest.raises(ValueError, match=r"pass attention_mask=cache.mask_with\(input_ids\)"):
        say(model, prompt(1, 3), past_key_values=cache)


def test_a_state_of_another_model_is_refused():
    cache = made(mechanism="nala")(prompt()).past_key_values
    with pytest.raises(ValueError, match="past_key_values: expected a cache of this model, with mechanism mala"):
        made()(prompt(), past_key_values=cache)


def test_a_state_of_another_batch_is_refused():
    model = made()
    cache = model(prompt(2)).past_key_values
    with pytest.raises(ValueError, match="initial_state"):
        model(prompt(3), past_key_values=cache)


def test_a_state_cannot_forget():
    model = made()
    cache = model(prompt(2)).past_key_values
    with pytest.raises(ValueError, match="crop: a linear layer cannot forget"):
        cache.crop(-1)

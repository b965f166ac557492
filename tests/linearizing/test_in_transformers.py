"""Networks of transformers become linear."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import affinear
from affinear.linearizing import LinearCore, in_transformers
from affinear.linearizing.cache import MemoryLayer

from .conftest import SMALL, TEXT, Hugging, distance, exact, same_when_compiled

WINDOWS: list[dict[str, Any]] = [
    {},
    {"window": 3},
    {"window": 4, "sinks": 2},
    {"gain": True, "norm": True},
    {"convolution": 3},
]


def disturbed(model: Any) -> Any:
    """What is learned begins as nothing; here it is something."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LinearCore):
                for parameter in module.parameters():
                    parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def test_with_softmax_in_our_place_a_swapped_network_is_its_teacher(hugging: Hugging):
    student, _ = affinear.linearize(hugging.model, "linear")
    with torch.no_grad():
        assert distance(hugging.answer(exact(student), use_cache=False) if hugging.name in ("llama", "gpt2", "whisper")
                        else hugging.answer(exact(student)), hugging.answer(hugging.model)) < 1e-5  # fmt: skip


def test_one_line_swaps_a_network_and_gradients_reach_what_is_learned(hugging: Hugging):
    student, report = affinear.linearize(hugging.model, "mala", feature_map="hedgehog", gain=True)
    assert len(report.swapped) == (4 if hugging.name == "siglip" else 2)
    out = hugging.answer(student)
    assert out.shape == hugging.answer(hugging.model).shape
    out.square().sum().backward()
    for module in student.modules():
        if isinstance(module, LinearCore):
            assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in module.parameters())


def test_from_pretrained_brings_back_what_save_pretrained_wrote(hugging: Hugging, tmp_path: Path):
    student, report = affinear.linearize(hugging.model, "nala", layers=[0], feature_map="learned")
    disturbed(student).save_pretrained(tmp_path)
    again = type(hugging.model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(hugging.answer(again), hugging.answer(student))
    assert [name for name, module in again.named_modules() if isinstance(module, LinearCore)] == [
        f"{layer.name}.linearized" for layer in report.swapped
    ]
    again.save_pretrained(tmp_path / "again")
    again.float().half()  # what is closed to quantized networks is open to this one


def test_a_configuration_that_says_something_else_is_refused(tmp_path: Path):
    student, _ = affinear.linearize(Hugging("bert").model)
    student.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"mechanism": "mala"', '"mechanism": "os.system"'))
    with pytest.raises(ValueError, match="mechanism: expected one of"):
        hf.BertModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("given", WINDOWS, ids=str)
def test_decoding_step_by_step_is_the_whole_forward(decoder: Hugging, given: dict[str, Any]):
    student = disturbed(affinear.linearize(decoder.model, "mala", **given)[0])
    ids = decoder.inputs["input_ids"]
    with torch.no_grad():
        whole = student(ids, use_cache=False).logits
        out = student(ids[:, :5], use_cache=True)
        parts = [out.logits]
        for start, end in ((5, 6), (6, 7), (7, 10), (10, 12)):
            out = student(ids[:, start:end], past_key_values=out.past_key_values, use_cache=True)
            parts.append(out.logits)
    assert distance(torch.cat(parts, 1), whole) < 1e-5
    assert all(isinstance(layer, MemoryLayer) for layer in out.past_key_values.layers)


@pytest.mark.parametrize("given", [{}, {"window": 4, "sinks": 2}, {"convolution": 5}], ids=str)
def test_a_memory_has_one_size_however_long_the_text(decoder: Hugging, given: dict[str, Any]):
    student = affinear.linearize(decoder.model, **given)[0]
    with torch.no_grad():
        sizes = {
            student(torch.randint(3, 99, (1, n)), use_cache=True).past_key_values.layers[0].memory.numbers()
            for n in (10, 50, 100)
        }
    assert len(sizes) == 1


@pytest.mark.parametrize("given", [{}, {"window": 3, "sinks": 2}, {"gain": True}, {"convolution": 3}], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_an_answer_does_not_depend_on_padding_before_or_after(decoder: Hugging, given: dict[str, Any], side: str):
    student = disturbed(affinear.linearize(decoder.model, **given)[0])
    ids = decoder.inputs["input_ids"]
    filler = torch.randint(3, 99, (2, 4))
    there = torch.ones_like(ids)
    pair = ((filler, ids), (0 * filler, there)) if side == "left" else ((ids, filler), (there, 0 * filler))
    padded, mask = torch.cat(pair[0], 1), torch.cat(pair[1], 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = student(ids).logits
        found = student(padded, attention_mask=mask, position_ids=positions).logits
    found = found[:, 4:] if side == "left" else found[:, :12]
    assert distance(found, alone) < 1e-5


def test_padding_never_reaches_an_encoder():
    bert = Hugging("bert")
    student, _ = affinear.linearize(bert.model, layers=[0])  # the second layer stays softmax, and sees the mask as well
    ids = bert.inputs["input_ids"]
    padded = torch.cat((ids, torch.randint(3, 99, (2, 5))), 1)
    mask = (torch.arange(17) < 12).long().expand(2, 17)
    with torch.no_grad():
        found = student(padded, attention_mask=mask).last_hidden_state[:, :12]
        assert distance(found, student(ids).last_hidden_state) < 1e-6
        assert distance(student(padded).last_hidden_state[:, :12], found) > 1e-5  # without its mask it would


@pytest.mark.parametrize("beams", [1, 3])
def test_generate_says_what_the_whole_forward_says(decoder: Hugging, beams: int):
    student, _ = affinear.linearize(decoder.model, "mala")
    ids = decoder.inputs["input_ids"]
    told = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "pad_token_id": 0, "eos_token_id": None}
    with_memory = student.generate(ids, **told)
    assert torch.equal(with_memory, student.generate(ids, use_cache=False, **told))


def test_generate_with_left_padding_says_what_it_says_without(decoder: Hugging):
    student, _ = affinear.linearize(decoder.model, "mala", window=3, sinks=1)
    ids = decoder.inputs["input_ids"]
    told = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    padded, mask = torch.cat((0 * ids[:, :3], ids), 1), torch.cat((0 * ids[:, :3], torch.ones_like(ids)), 1)
    found = student.generate(padded, attention_mask=mask, **told)[:, 3:]
    assert torch.equal(found, student.generate(ids, **told))


def test_one_layer_may_stay_softmax_in_a_decoder():
    llama = Hugging("llama")
    student, report = affinear.linearize(llama.model, layers=[0])
    assert len(report.left) == 1
    ids = llama.inputs["input_ids"]
    with torch.no_grad():
        out = student(ids[:, :7], use_cache=True)
        rest = student(ids[:, 7:], past_key_values=out.past_key_values, use_cache=True)
        assert distance(torch.cat((out.logits, rest.logits), 1), student(ids, use_cache=False).logits) < 1e-5
    kinds = [type(layer).__name__ for layer in out.past_key_values.layers]
    assert kinds == ["MemoryLayer", "DynamicLayer"]


@pytest.mark.parametrize("name", ["bert", "vit", "llama"])
def test_a_mechanism_is_chosen_by_its_name_alone(name: str):
    net = Hugging(name)
    student, _ = affinear.linearize(net.model, "mala")
    net.model.set_attn_implementation("affinear_mala")
    with torch.no_grad():
        assert torch.equal(net.answer(net.model), net.answer(student))
        if name == "llama":  # the keys are kept then, and all is right all the same
            ids = net.inputs["input_ids"]
            out = net.model(ids[:, :7], use_cache=True)
            rest = net.model(ids[:, 7:], past_key_values=out.past_key_values, use_cache=True)
            assert distance(torch.cat((out.logits, rest.logits), 1), net.answer(student)) < 1e-5


def test_whisper_keeps_its_decoder_and_is_not_scaled_twice():
    whisper = Hugging("whisper")
    student, report = affinear.linearize(whisper.model, "mala")
    assert [layer.name.split(".")[1] for layer in report.swapped] == ["encoder"] * 2
    assert {layer.remark for layer in report.left} == {
        "a decoder beside an encoder, whose cache is of two parts",
        "cross-attention: name it in layers= to have it swapped",
    }
    layer = student.model.encoder.layers[0].self_attn
    x = torch.randn(2, 20, 32)
    q, k, v = ((p(x)).unflatten(-1, (4, 8)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    expected = layer.out_proj(affinear.attention(q, k, v, "mala").flatten(2))
    assert distance(layer(x)[0].detach(), expected.detach()) < 1e-5


def test_cross_attention_is_swapped_where_it_is_named():
    whisper = Hugging("whisper")
    student, report = affinear.linearize(whisper.model, "inline", layers=["*encoder_attn"])
    assert len(report.swapped) == 2
    ids = whisper.inputs["decoder_input_ids"]
    told = {"input_features": whisper.inputs["input_features"]}
    with torch.no_grad():
        whole = student(decoder_input_ids=ids, **told).logits
        out = student(decoder_input_ids=ids[:, :5], use_cache=True, **told)
        rest = student(decoder_input_ids=ids[:, 5:], past_key_values=out.past_key_values, use_cache=True, **told)
    assert distance(torch.cat((out.logits, rest.logits), 1), whole) < 1e-5


def test_what_a_mask_says_beyond_padding_is_refused():
    llama = Hugging("llama")
    student, _ = affinear.linearize(llama.model)
    ids = llama.inputs["input_ids"]
    with pytest.raises(ValueError, match="no place for a mask of each query and key"):
        student(ids, attention_mask=torch.ones(2, 1, 12, 12))
    with pytest.raises(ValueError, match="packed sequences"):
        student(ids[:1], position_ids=torch.tensor([[*range(4), *range(8)]]), use_cache=False)
    with pytest.raises(ValueError, match="expected a DynamicCache"):
        student.generate(ids, max_new_tokens=3, cache_implementation="static", pad_token_id=0)


def test_softmax_alone_in_a_window_with_sinks_is_what_it_says():
    llama = Hugging("llama")
    student, _ = affinear.linearize(llama.model, "none", window=4, sinks=2)
    core = student.model.layers[0].self_attn.linearized
    q, k, v = torch.randn(2, 12, 4, 8), torch.randn(2, 12, 2, 8), torch.randn(2, 12, 2, 8)
    i, j = torch.arange(12)[:, None], torch.arange(12)
    seen = (j <= i) & ((j > i - 4) | (j < 2))
    heads: list[Tensor] = [x.repeat_interleave(2, 2).transpose(1, 2) for x in (k, v)]
    truth = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), *heads, attn_mask=seen).transpose(1, 2)
    assert torch.allclose(core(q, k, v, causal=True), truth, atol=1e-5)


def test_encoders_of_tokens_in_a_line_can_keep_a_window_both_ways():
    bert = Hugging("bert")
    student, report = affinear.linearize(bert.model, "linear", window=3, sinks=1, convolution=3)
    assert [layer.now for layer in report.swapped] == ["linear beside a window of 3 and 1 sinks"] * 2
    disturbed(student)
    ids, mask = bert.inputs["input_ids"], torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:] = 0
    with torch.no_grad():
        padded = student(ids, attention_mask=mask).last_hidden_state
        alone = student(ids[:1, :8]).last_hidden_state
    assert distance(padded[:1, :8], alone) < 1e-5


def test_a_window_of_a_whole_sound_is_the_teacher():
    whisper = Hugging("whisper")
    student, report = affinear.linearize(whisper.model, "mala", window=20, sinks=2)
    assert len(report.swapped) == 2
    with torch.no_grad():
        assert distance(whisper.answer(student, use_cache=False), whisper.answer(whisper.model, use_cache=False)) < 1e-5


def test_tokens_on_a_grid_get_no_window_and_the_report_says_so():
    with pytest.raises(ValueError, match="a window is of tokens in a line"):
        affinear.linearize(Hugging("vit").model, "mala", window=3)


def gemma(**given: Any) -> Any:
    """A decoder with a layer that slides and one that does not; its scores are capped."""
    kinds = ["sliding_attention", "full_attention"]
    sizes: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 3, "layer_types": kinds}
    sizes |= {**SMALL, **TEXT, "attn_logit_softcapping": 0.05, **given}
    model = hf.Gemma2ForCausalLM(hf.Gemma2Config(**sizes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_a_layer_that_slides_stays_what_it_was_beside_one_that_is_linear():
    teacher, ids = gemma(attn_logit_softcapping=None), torch.randint(3, 99, (2, 12))
    student, report = affinear.linearize(teacher, "linear")
    assert report.left[0].remark == "it sees a sliding window of tokens, and is linear as it is"
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    with torch.no_grad():
        for told in ({}, {"attention_mask": mask}):
            truth = teacher(ids, use_cache=False, **told).logits
            found = exact(student)(ids, use_cache=False, **told).logits
            assert distance(found[:, 4:], truth[:, 4:]) < 1e-5
        student, _ = affinear.linearize(teacher, "mala", window=2)
        out = student(ids[:, :7], use_cache=True)
        rest = student(ids[:, 7:], past_key_values=out.past_key_values, use_cache=True)
        assert distance(torch.cat((out.logits, rest.logits), 1), student(ids, use_cache=False).logits) < 1e-5
        teacher.set_attn_implementation("affinear_mala")
        assert teacher(ids).logits.isfinite().all()


def test_a_layer_that_stays_keeps_the_cap_on_its_scores_and_one_that_is_swapped_tells_of_it():
    teacher, ids = gemma(), torch.randint(3, 99, (2, 12))
    teacher.set_attn_implementation("eager")
    student, report = affinear.linearize(teacher, "linear")
    assert report.swapped[0].remark == "the cap on its scores (0.05) is gone, as there are none"
    layer, other = teacher.model.layers[0].self_attn, student.model.layers[0].self_attn
    with torch.no_grad():
        heard: list[Tensor] = []
        handles = [one.register_forward_hook(lambda _m, _i, out: heard.append(out[0])) for one in (layer, other)]
        teacher(ids, use_cache=False)
        student(ids, use_cache=False)
        for handle in handles:
            handle.remove()
    assert distance(heard[1], heard[0]) < 1e-5


def t5() -> Any:
    """One with strong biases and weak scores: what is said of a bias holds to first order of the scores."""
    model = hf.T5Model(hf.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)).eval()
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(parameter)
        if name.endswith(".q.weight"):
            torch.nn.init.normal_(parameter, std=0.001)
    return model


def test_a_bias_of_position_is_kept_left_or_dropped_and_never_lost_in_silence():
    teacher, ids = t5(), torch.randint(3, 99, (2, 12))
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    told = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}
    kept, report = affinear.linearize(teacher, "linear")
    assert all("kept as attention by position alone" in layer.remark for layer in report.swapped)
    dropped, report = affinear.linearize(teacher, "linear", bias="drop")
    assert all("DROPPED" in layer.remark for layer in report.swapped)
    with pytest.raises(ValueError, match=r"nothing could be swapped[^$]*bias='leave'"):
        affinear.linearize(teacher, bias="leave")
    cross, _ = affinear.linearize(teacher, "linear", layers=["*EncDecAttention"])
    with torch.no_grad():
        truth = teacher(**told).last_hidden_state
        apart = [distance(exact(student)(**told).last_hidden_state, truth) for student in (kept, dropped, cross)]
    assert apart[0] < 0.5 * apart[1]
    assert apart[2] < 1e-5  # layers with a bias stay what they were


def test_a_text_that_is_padding_alone_spoils_nobody():
    teacher, ids = t5(), torch.randint(3, 99, (2, 12))
    encoder: Any = affinear.linearize(teacher, "linear")[0].encoder
    mask = torch.ones_like(ids)
    mask[1] = 0
    out = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    assert out.isfinite().all()
    assert distance(out[:1].detach(), encoder(input_ids=ids[:1]).last_hidden_state.detach()) < 1e-5
    out[0].sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters() if p.grad is not None)


def test_layers_that_see_a_chunk_stay_and_answer_as_before():
    sizes: dict[str, Any] = {**SMALL, **TEXT, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size_mlp": 48}
    experts: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "moe_layers": []}
    kinds = ["chunked_attention", "full_attention"]
    config = hf.Llama4TextConfig(**sizes, **experts, attention_chunk_size=4, layer_types=kinds)
    teacher: Any = hf.Llama4ForCausalLM(config).eval()
    student, report = affinear.linearize(teacher, "linear")
    assert [layer.name for layer in report.swapped] == ["model.layers.1.self_attn"]
    assert report.left[0].remark == "it sees a chunk of tokens, and is linear as it is"
    ids = torch.randint(3, 99, (1, 10))
    with torch.no_grad():
        assert distance(exact(student)(ids, use_cache=False).logits, teacher(ids, use_cache=False).logits) < 1e-5


def test_a_pattern_of_one_query_is_not_taken_for_padding():
    student: Any = affinear.linearize(Hugging("llama").model, "linear")[0]
    pattern = torch.tensor([[[[True, False, True]]]])
    layer = student.model.layers[0].self_attn
    query, key, value = torch.randn(3, 1, 4, 3, 8).unbind()
    with pytest.raises(ValueError, match=r"attention_mask: expected padding alone, \(B, M\), got \(1, 1, 1, 3\)"):
        in_transformers._attend(layer, query[:, :, :1], key, value, pattern, everywhere=None)


GRIDS: dict[str, Callable[[], Any]] = {
    "patches of sound": lambda: hf.ASTModel(hf.ASTConfig(**SMALL)),
    "patches of any shape": lambda: hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**SMALL)),
    "patches in time": lambda: hf.VJEPA2Model(
        hf.VJEPA2Config(**SMALL, pred_hidden_size=32, pred_num_attention_heads=4, pred_num_hidden_layers=1)
    ),
}


@pytest.mark.parametrize("name", GRIDS)
def test_a_window_is_not_laid_over_a_grid(name: str):
    with torch.device("meta"):
        teacher = GRIDS[name]()
    with pytest.raises(ValueError, match="a window is of tokens in a line, and these lie otherwise"):
        affinear.linearize(teacher, "linear", window=3)
    with pytest.raises(ValueError, match="it is not known how its tokens lie, which a convolution needs"):
        affinear.linearize(teacher, "linear", convolution=3)
    assert affinear.linearize(teacher, "linear")[1].swapped


def test_a_bias_that_comes_as_a_mask_is_kept_as_one():
    from .conftest import IMAGE

    teacher: Any = hf.BeitModel(hf.BeitConfig(**IMAGE, use_relative_position_bias=True)).eval()
    for name, parameter in teacher.named_parameters():
        torch.nn.init.normal_(parameter, std=1.0 if "bias_table" in name else 0.1)
    kept, dropped = (exact(affinear.linearize(teacher, "linear", bias=bias)[0]) for bias in ("position", "drop"))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        truth = teacher(images).last_hidden_state
        found = [distance(student(images).last_hidden_state, truth) for student in (kept, dropped)]
    assert found[0] < 0.5 * found[1]


def test_a_layer_that_stays_keeps_its_dropout():
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    teacher = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **TEXT, attn_pdrop=0.5))
    student, _ = affinear.linearize(teacher, layers=[0])
    ids = torch.randint(3, 99, (2, 12))
    with torch.no_grad():
        assert distance(student.train()(ids).logits, student(ids).logits) > 1e-4
        assert torch.equal(student.eval()(ids).logits, student(ids).logits)


@pytest.mark.parametrize(
    ("config", "network", "said"),
    [
        (hf.GptOssConfig, hf.GptOssForCausalLM, "a sink of its own beside the keys"),
        (hf.DiffLlamaConfig, hf.DiffLlamaForCausalLM, "it attends twice for the same tokens"),
        (hf.MistralConfig, hf.MistralForCausalLM, "it sees a sliding window of tokens"),
        (hf.CodeGenConfig, hf.CodeGenForCausalLM, "it computes its softmax itself"),
        (hf.WavLMConfig, hf.WavLMModel, "it computes its softmax itself"),
    ],
)
def test_layers_that_cannot_be_linear_are_left_alone_with_a_reason(config: Any, network: Any, said: str):
    sizes: dict[str, Any] = {**SMALL, "head_dim": 8}
    if config is hf.CodeGenConfig:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4}
    sizes |= {"num_local_experts": 2, "layer_types": ["full_attention"] * 2} if config is hf.GptOssConfig else {}
    with torch.device("meta"), pytest.raises(ValueError, match=f"nothing could be swapped[^$]*{said}"):
        affinear.linearize(network(config(**{**sizes, **TEXT})))


def test_a_cache_has_one_size_whatever_its_argument_is_called():
    sizes: dict[str, Any] = {**SMALL, **TEXT, "max_position_embeddings": 64}
    teacher = hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**sizes)).eval()
    student, _ = affinear.linearize(teacher, "mala", feature_map="learned")
    with torch.no_grad():
        held = student(torch.randint(3, 99, (2, 12)), use_cache=True).past_key_values
    assert all(isinstance(layer, MemoryLayer) for layer in held.layers)


def test_padding_that_comes_as_a_mask_of_keys_is_padding():
    teacher = hf.LayoutLMModel(hf.LayoutLMConfig(**SMALL, vocab_size=99)).eval()
    student, _ = affinear.linearize(teacher, "mala")
    ids, mask = torch.randint(3, 99, (2, 12)), (torch.arange(12) < 8).long().expand(2, 12)
    with torch.no_grad():
        padded = student(input_ids=ids, attention_mask=mask).last_hidden_state[:, :8]
        assert distance(padded, student(input_ids=ids[:, :8]).last_hidden_state) < 1e-5


@pytest.mark.exhaustive  # a vision network compiles in test_in_timm.py
def test_a_swapped_network_compiles_and_learns_as_it_would(hugging: Hugging):
    student, _ = affinear.linearize(hugging.model, "mala", gain=True)
    others: dict[str, Any] = {"use_cache": False} if hugging.name in ("llama", "gpt2", "whisper") else {}
    if hugging.name in ("llama", "gpt2"):
        # Without a mask transformers cannot tell, while it is traced, whether sequences are packed.
        others["attention_mask"] = torch.ones(2, 12)
    same_when_compiled(student, lambda network: hugging.answer(network, **others))

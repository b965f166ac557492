"""The model is a model of transformers': kept, found, trained, piped, compiled and sharded as any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

from affinear.models.language import AffinearConfig, AffinearForCausalLM, AffinearModel
from affinear.models.language.causal_lm import Head

from .conftest import VOCABULARY, made, small


@pytest.mark.parametrize("tied", [True, False])
def test_from_pretrained_brings_back_what_save_pretrained_wrote(
    kind: dict[str, Any], tmp_path: Path, tied: bool, seed: int
):
    model, tokens = made(tie_word_embeddings=tied, **kind), torch.randint(VOCABULARY, (1, 9))
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is AffinearForCausalLM
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again(tokens).logits)
        body = hf.AutoModel.from_pretrained(tmp_path)
        assert type(body) is AffinearModel
        assert torch.equal(body(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    config = hf.AutoConfig.from_pretrained(tmp_path)
    assert type(config) is AffinearConfig
    assert config.layer_types == model.config.layer_types


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_grew_is_learnt_in_chunks_as_before(tied: bool):
    model = made(tie_word_embeddings=tied).train()
    model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    assert isinstance(model.lm_head, Head)
    assert (model.lm_head.out_features, model.config.vocab_size) == (VOCABULARY + 5, VOCABULARY + 5)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    tokens = torch.randint(VOCABULARY + 5, (2, 9))
    out = model(tokens, labels=tokens, logits_to_keep=0)
    wanted = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(out.loss, wanted)


def test_a_vocabulary_that_grew_is_not_drawn_anew():
    model = made(tie_word_embeddings=False)
    model.resize_token_embeddings(VOCABULARY + 5, mean_resizing=False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.post_init()  # as whoever builds a model of ours into theirs calls it
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_head_that_somebody_put_there_is_called():
    model, tokens = made(tie_word_embeddings=False), torch.randint(VOCABULARY, (2, 9))
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, VOCABULARY))
    out = model(tokens, labels=tokens, logits_to_keep=0)
    wanted = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(out.loss, wanted)


def test_weights_in_several_files_come_back_in_any_dtype(tmp_path: Path):
    model, tokens = made(softmax_every=2, conv_size=3, qk_norm=True), torch.randint(VOCABULARY, (1, 9))
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for given in ({}, {"dtype": "auto"}, {"device_map": "cpu"}, {"low_cpu_mem_usage": True}):
        again: Any = hf.AutoModelForCausalLM.from_pretrained(tmp_path, **given)
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    half: Any = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    half.save_pretrained(tmp_path / "half")
    found: Any = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert found.dtype == torch.bfloat16


def test_an_outline_takes_no_memory_and_can_be_filled(tmp_path: Path):
    model, tokens = made(conv_size=3), torch.randint(VOCABULARY, (1, 9))
    with torch.device("meta"):
        outline: Any = hf.AutoModelForCausalLM.from_config(model.config)
    assert all(weight.is_meta for weight in outline.parameters())
    outline.to_empty(device="cpu")
    outline.load_state_dict(model.state_dict())
    outline.tie_weights()
    assert torch.equal(outline.eval()(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("name", ["flash_attention_2", "sdpa", "flex_attention"])
def test_other_kernels_of_attention_are_refused(name: str):
    with pytest.raises((ValueError, ImportError), match=r"does not support|attn_implementation|flash"):
        AffinearForCausalLM._from_config(small(), attn_implementation=name)  # pyright: ignore[reportPrivateUsage]


def test_weights_begin_as_they_should():
    model = AffinearForCausalLM(small(hidden_size=64, conv_size=4, initializer_range=0.05))
    weights = model.state_dict()
    assert 0.04 < float(weights["model.layers.0.mlp.up_proj.weight"].std()) < 0.06
    assert torch.equal(weights["model.norm.weight"], torch.ones(64))
    taps = weights["model.layers.1.self_attn.conv.weight"].mean(1)
    assert 0.9 < float(taps[0]) < 1.1 > 0.1 > float(taps[1:].abs().max())


def test_the_configuration_says_what_is_returned():
    tokens = torch.randint(VOCABULARY, (1, 9))
    model = made(output_hidden_states=True)
    assert len(model(tokens).hidden_states) == len(model.model(tokens).hidden_states) == 3
    assert model(tokens, output_hidden_states=False).hidden_states is None
    plain: Any = made(return_dict=False)
    for network in (plain, plain.model):
        found = network(tokens)
        assert type(found) is tuple
        assert torch.equal(found[0], network(tokens, return_dict=True)[0])
    assert type(plain.token_losses(tokens)) is Tensor
    assert plain.generate(tokens, max_new_tokens=2, pad_token_id=0).shape == (1, 11)
    asking = made()
    asking.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions: expected False"):
        asking(tokens)


def test_half_precision_is_near_the_whole():
    model, tokens = made(conv_size=3, qk_norm=True, softmax_every=2), torch.randint(VOCABULARY, (2, 30))
    with torch.no_grad():
        exact = model(tokens).logits
        half = model.bfloat16()(tokens).logits.float()
    assert float((half - exact).norm() / exact.norm()) < 0.05


def test_autocast_trains(kind: dict[str, Any]):
    model, tokens = made(**kind).train(), torch.randint(VOCABULARY, (2, 12))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.exhaustive
def test_the_trainer_trains_it(tmp_path: Path):
    model = AffinearForCausalLM(small(softmax_every=2))
    tokens = torch.randint(VOCABULARY, (1, 12)).expand(8, -1)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    settings = hf.TrainingArguments(
        output_dir=str(tmp_path), max_steps=8, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=3e-2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        gradient_checkpointing=True, logging_steps=1, eval_strategy="steps", eval_steps=4, label_names=["labels"],
    )  # fmt: skip
    trainer = hf.Trainer(model=model, args=settings, train_dataset=data, eval_dataset=data[:2])  # pyright: ignore
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.8 * losses[0]
    assert any("eval_loss" in entry for entry in trainer.state.log_history)


def test_labels_may_come_shifted():
    model, tokens = made(conv_size=3), torch.randint(VOCABULARY, (2, 9))
    after = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    wanted = model(tokens, labels=tokens).loss
    torch.testing.assert_close(model(tokens, shift_labels=after).loss, wanted)
    torch.testing.assert_close(model(tokens, labels=tokens.flip(1), shift_labels=after).loss, wanted)
    after[:, -1] = 3  # a piece's last token foretells the first of the next piece
    told = model(tokens, shift_labels=after, logits_to_keep=0)
    torch.testing.assert_close(told.loss, F.cross_entropy(told.logits.flatten(0, 1), after.flatten()))
    with pytest.raises(ValueError, match="targets"):
        model(tokens, shift_labels=after[:, 1:])


def test_documents_may_be_flattened_by_transformers():
    model = made(conv_size=3)
    texts = [{"input_ids": torch.randint(1, VOCABULARY, (n,)).tolist()} for n in (5, 8)]
    batch: Any = hf.DataCollatorWithFlattening(return_position_ids=True)(texts)
    loss = model(**{name: batch[name] for name in ("input_ids", "labels", "position_ids")}, use_cache=False).loss
    alone = [torch.tensor([x["input_ids"]]) for x in texts]
    losses = [model(x, labels=x).loss * (x.shape[1] - 1) for x in alone]
    torch.testing.assert_close(loss, sum(losses) / 11)


def test_a_few_steps_teach_it_a_text(kind: dict[str, Any]):
    model = AffinearForCausalLM(small(**kind)).train()
    tokens = torch.randint(VOCABULARY, (1, 12))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-2)
    losses: list[float] = []
    for _ in range(12):
        loss = model(tokens, labels=tokens, num_items_in_batch=11).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY - 1)} | {"<pad>": VOCABULARY - 1}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    names = ["input_ids", "attention_mask"]
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", padding_side="left", model_input_names=names
    )


def test_a_pipeline_writes_text():
    model, words = made(), tokenizer()
    pipe = hf.pipeline("text-generation", model=model, tokenizer=words, device="cpu")
    prompts = ["w1 w2 w3", "w4 w5 w6 w7 w8"]
    said: Any = pipe(prompts, max_new_tokens=5, do_sample=False, batch_size=2, return_full_text=False)
    for prompt, answer in zip(prompts, said, strict=True):
        ids = words(prompt, return_tensors="pt").input_ids
        wanted = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=VOCABULARY - 1)
        assert answer[0]["generated_text"].split() == words.decode(wanted[0, ids.shape[1] :]).split()


@pytest.mark.exhaustive
@pytest.mark.parametrize("changes", [{}, {"softmax_every": 2, "conv_size": 3, "gate": True}], ids=["linear", "hybrid"])
def test_it_is_one_graph(changes: dict[str, Any]):
    model = made(**changes).train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    tokens = torch.randint(VOCABULARY, (2, 7))
    found: list[list[Tensor]] = []
    for network in (model, compiled):
        loss = network(tokens, labels=tokens).loss
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    for eager, graph in zip(*found, strict=True):
        torch.testing.assert_close(eager, graph, rtol=1e-4, atol=1e-5)


def test_fully_shard_wraps_it_part_by_part(tmp_path: Path):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        tokens = torch.randint(VOCABULARY, (1, 14))
        model = made(tie_word_embeddings=False, softmax_every=2)
        wanted = model(tokens, labels=tokens).loss
        mesh = dist.init_device_mesh("cpu", (1,))
        for part in (*model.model.layers, model.lm_head, model):
            fully_shard(part, mesh=mesh)
        loss = model(tokens, labels=tokens).loss
        torch.testing.assert_close(loss, wanted)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        dist.destroy_process_group()

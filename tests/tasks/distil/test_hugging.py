"""Folders of transformers' that a stranger wrote: what is in them is read, nothing beside, and nothing is run."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from affinear.models import making
from affinear.tasks.distil import causal, hugging
from affinear.tasks.distil.speech import whisper

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama as transformers writes it."""
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


def changed(folder: Path, **fields: Any) -> None:
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**told, **fields}))


def cut(folder: Path, names: Callable[[int], str] = lambda i: f"model-{i}.safetensors") -> dict[str, Any]:
    """The weights in two files with an index, which is returned."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: names(i % 2) for i, name in enumerate(sorted(tensors))}
    for place in set(places.values()):
        save_file({name: t for name, t in tensors.items() if places[name] == place}, folder / place)
    (folder / hugging.INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return {"metadata": {}, "weight_map": places}


def test_weights_in_several_files_are_read_as_their_index_says(folder: Path):
    whole = causal.teacher_of(folder, torch.float32).state_dict()
    one = causal.source_of(str(folder)).digest
    index = cut(folder)
    parts = causal.teacher_of(folder, torch.float32).state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    several = causal.source_of(str(folder)).digest
    (folder / hugging.INDEX).write_text(json.dumps(index))
    assert len({one, several, causal.source_of(str(folder)).digest}) == 3  # the index is part of it


@pytest.mark.parametrize(
    "name", ["../private/model.safetensors", "/etc/passwd", "x.bin", "", ".", "a/b.safetensors", "\0.safetensors", 3]
)
def test_an_index_names_files_of_its_folder_alone(folder: Path, name: Any):
    private = folder.parent / "private"
    shutil.copytree(folder, private)
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "x.bin")
    (folder / "model.safetensors").unlink()
    save_file({"x": torch.zeros(1)}, folder / "decoy.safetensors")
    (folder / hugging.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    for look in (lambda: causal.source_of(str(folder)), lambda: causal.teacher_of(folder, torch.float32)):
        with pytest.raises(ValueError, match="expected names of safetensors in its folder, got"):
            look()


@pytest.mark.parametrize("told", [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": "no.safetensors"}}])
def test_an_index_that_names_nothing_is_told(folder: Path, told: Any):
    (folder / "model.safetensors").unlink()
    (folder / hugging.INDEX).write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"expected the file (of each weight|'no.safetensors')"):
        causal.source_of(str(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_links_do_not_lead_out_of_a_folder(folder: Path, name: str):
    out = folder.parent / "out"
    if not (folder / name).exists():
        (folder / name).write_text("{}")
    (folder / name).rename(out)
    (folder / name).symlink_to(out)
    with pytest.raises(ValueError, match=f"expected '{name}' in .* itself, got a link that leads out of it"):
        causal.source_of(str(folder))
    out.unlink()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if name == "model.safetensors":
        with pytest.raises(ValueError, match=r"expected the file 'model.safetensors' in .*, got none"):
            causal.source_of(str(folder))


def test_the_cache_of_the_hub_is_a_folder_like_any(folder: Path):
    wanted = causal.source_of(str(folder)).digest
    home = folder.parent / "models--a--b"
    (home / "snapshots" / "1").mkdir(parents=True)
    (home / "blobs").mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, home / "blobs" / str(number))
        (home / "snapshots" / "1" / file.name).symlink_to(f"../../blobs/{number}")
    assert causal.source_of(str(home / "snapshots" / "1")).digest == wanted
    causal.teacher_of(home / "snapshots" / "1", torch.float32)


def test_nothing_beside_the_weights_decides_what_is_read(folder: Path):
    """Other files that transformers looks for, and fields that name some, change nothing."""
    whole = causal.teacher_of(folder, torch.float32).state_dict()
    other = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(other, folder / "shard-00001-model-00001-of-00001.safetensors", {"format": "pt"})
    save_file(other, folder / "other.safetensors", {"format": "pt"})
    torch.save(other, folder / "pytorch_model.bin")
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "somebody/something"}))
    (folder / "generation_config.json").write_text("[" * 10**5)
    code = "raise SystemExit('run')\n"
    (folder / "custom_generate").mkdir()
    for name in ("modeling.py", "custom_generate/generate.py"):
        (folder / name).write_text(code)
    changed(folder, transformers_weights="other.safetensors", name_or_path="somebody/something", dtype="float16",
            attn_implementation="somebody/kernel", auto_map={"AutoModelForCausalLM": "modeling.Llama"},
            return_dict=False, output_attentions=True)  # fmt: skip
    found = causal.teacher_of(folder, torch.float32).state_dict()
    assert all(torch.equal(whole[name], found[name]) and found[name].dtype == torch.float32 for name in whole)


def test_no_part_of_a_network_is_made_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import timm

    monkeypatch.setattr(timm, "create_model", lambda *_, **__: pytest.fail("timm was asked"))
    seen = {"architecture": "resnet18", "model_args": {"checkpoint_path": "bomb.pth"}}
    for fields in (
        {"model_type": "gemma3n", "vision_config": seen},
        {"model_type": "gemma3", "vision_config": {"model_type": "timm_wrapper", **seen}},
        {"model_type": "fuyu", "text_config": {"model_type": "gemma3n", "vision_config": seen}},
    ):
        with pytest.raises(ValueError, match=r"config: .*expected the part that .* has, got one that is chosen"):
            causal.made(fields, making.MOST_NUMBERS)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers: expected a number of at most 4,096"),
        ({"num_hidden_layers": 1e7}, "num_hidden_layers: expected a number of at most 4,096"),
        ({"max_position_embeddings": 2**39}, "max_position_embeddings: expected a number of at most 33,554,432"),
        ({"rope_parameters": {"attention_types": [[["a"], 10**7]]}}, "attention_types: expected a number of at most"),
        ({"hidden_size": float("nan")}, "numbers that a network can have"),
        ({"text_config": {"quantization_config": {"quant_method": "x"}}}, "quantized or linear already"),
    ],
)
def test_numbers_that_would_take_all_memory_are_told(fields: Any, said: str):
    began = time.process_time()
    with pytest.raises(ValueError, match=said):
        causal.made({"model_type": "qwen2", **SMALL, **fields}, making.MOST_NUMBERS)
    assert time.process_time() - began < 5


def test_labels_are_nobodys_to_say(folder: Path):
    changed(folder, num_labels=2**39, id2label={"0": "a"}, label2id={"a": 0})
    config = causal.source_of(str(folder)).config
    assert not {"num_labels", "id2label", "label2id"} & config.keys()
    assert causal.teacher_of(folder, torch.float32).model.config.num_labels == 2
    causal.made({**config, "num_labels": 2**39}, making.MOST_NUMBERS)


def test_a_configuration_that_asks_for_more_than_the_weights_are_is_told(folder: Path):
    changed(folder, vocab_size=2**24, hidden_size=2**20)
    with pytest.raises(ValueError, match=r"llama would have [\d,]+ numbers, and there is room for"):
        causal.teacher_of(folder, torch.float32)


@pytest.mark.parametrize("size", [None, [40], "40", True, 0, -1])
def test_a_vocabulary_is_a_number(folder: Path, size: Any):
    changed(folder, vocab_size=size)
    with pytest.raises(ValueError, match="vocab_size: expected a whole number of at least 1, got"):
        causal.source_of(str(folder))


def test_a_network_that_can_be_made_and_not_used_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", lambda *_, **__: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(ValueError, match=r"teacher: LlamaForCausalLM cannot read two tokens \(.*size.*\)"):
        causal.teacher_of(folder, torch.float32)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_weights_and_answers_are_finite(folder: Path, value: float):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][3] = value
    tensors["model.norm.weight"][:] = max(1.0, value)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"teacher: .*(expected finite weights, got others in|that are not finite)"):
        causal.teacher_of(folder, torch.float32)


def test_what_is_wrong_with_a_field_is_told(folder: Path):
    changed(folder, use_cache="x")
    with pytest.raises(ValueError, match=r"teacher: .*'use_cache': .*expected"):
        causal.teacher_of(folder, torch.float32)


def test_tables_count(tmp_path: Path):
    fields = {"model_type": "pegasus", "d_model": 2**12, "max_position_embeddings": 2**14, "decoder_layers": 1,
              "encoder_layers": 1, "vocab_size": 9}  # fmt: skip
    with pytest.raises(ValueError, match="numbers in tables of positions"):
        causal.made(fields, making.MOST_NUMBERS)


KINDS: list[tuple[Any, Any]] = [
    (transformers.LlamaConfig, {"rope_theta": 500000.0, "eos_token_id": [128001, 128008], "vocab_size": 128256,
                                "max_position_embeddings": 131072, "pretraining_tp": 1,
                                "rope_scaling": {"factor": 8.0, "rope_type": "llama3", "low_freq_factor": 1.0,
                                                 "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
    (transformers.GPT2Config, {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}),
    (transformers.Qwen2Config, {"rope_theta": 1000000, "max_window_layers": 28, "sliding_window": 131072}),
    (transformers.Gemma2Config, {}),
    (transformers.Gemma3TextConfig, {"rope_local_base_freq": 10000.0, "rope_theta": 1000000000}),
    (transformers.Llama4TextConfig, {"max_position_embeddings": 10485760}),
    (transformers.GPTNeoConfig, {}),
    (transformers.MptConfig, {}),
    (transformers.Qwen3MoeConfig, {}),
]  # fmt: skip


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_configurations_as_transformers_writes_them_pass(kind: int, tmp_path: Path):
    made, fields = KINDS[kind]
    made(**fields).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads((tmp_path / "config.json").read_text()), **fields, "_name_or_path": "a/b"})
    )
    config = causal.checked_config(hugging.fields_in(tmp_path / "config.json"), "config")
    kept = transformers.AutoConfig.for_model(**config).to_dict()
    wanted = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    differing = {name for name in wanted if kept.get(name) != wanted[name]}
    assert differing <= {"_name_or_path", "transformers_version", "dtype", "architectures"}


def test_a_whisper_as_transformers_writes_it_passes(tmp_path: Path):
    transformers.WhisperConfig().save_pretrained(tmp_path)
    told = hugging.fields_in(tmp_path / "config.json")
    told |= {"suppress_tokens": list(range(90)), "forced_decoder_ids": [[1, 50259], [2, 50359], [3, 50363]]}
    assert whisper.checked_config(told, "config")["d_model"] == 384

"""Folders of transformers', damaged and hostile: a teacher, or a sentence; nothing beside is read and nothing run."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fuzzing import Tally, changed, damaged, for_a_while, hostile
from safetensors.torch import load_file, save_file

from affinear.models import making
from affinear.tasks.distil import causal, hugging
from affinear.tasks.distil.speech import whisper
from affinear.tasks.distil.stages import plan_for
from affinear.tasks.language.spelling import learnt

SMALL: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
NAMES = ("num_labels", "id2label", "layer_types", "auto_map", "transformers_weights", "attn_implementation", "dtype",
         "quantization_config", "text_config", "vision_config", "sub_configs", "attribute_map", "per_layer_config",
         "rope_scaling", "to_dict", "get_text_config", "problem_type", "architectures", "tie_word_embeddings",
         "hidden_act", "max_position_embeddings", "pad_token_id", "num_key_value_heads", "head_dim",
         "fusion_config", "distributed_config", "is_encoder_decoder", "sliding_window", "use_cache")  # fmt: skip
LARGE = (4096, 4097, 2**16, 2**20, 2**24, 2**25, 2**30, 2**39, 10**7 + 0.0)
KINDS = (
    "llama",
    "gpt2",
    "qwen2",
    "gemma2",
    "gemma3",
    "gemma3n",
    "mpt",
    "gpt_neo",
    "bloom",
    "opt",
    "whisper",
    "pegasus",
)
PLACES = ("../private/model.safetensors", "/etc/passwd", "x.bin", "model-1.safetensors", "", ".", "\0", 3, None, "a/b")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of language, whole; one in two files; and one of speech."""
    home = tmp_path_factory.mktemp("teachers")
    spelled = learnt(iter(["a b c"]), 300)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=spelled.size, **SMALL))
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=spelled.size, n_embd=8, n_layer=1, n_head=2, n_positions=32)
    )
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "num_mel_bins": 8,
             "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "max_source_positions": 10,
             "max_target_positions": 32, "vocab_size": spelled.size}  # fmt: skip
    heard = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, **ends))
    networks: dict[str, Any] = {"whole": llama, "parts": gpt, "speech": heard}
    for name, network in networks.items():
        network.save_pretrained(home / name)
        (home / name / "tokenizer.json").write_text(spelled.text, encoding="utf-8")
        (home / name / "preprocessor_config.json").write_text(json.dumps({"feature_size": 8}))
    tensors = load_file(home / "parts" / "model.safetensors")
    (home / "parts" / "model.safetensors").unlink()
    places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(sorted(tensors))}
    for place in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == place}, home / "parts" / place)
    (home / "parts" / hugging.INDEX).write_text(json.dumps({"metadata": {"total_size": 9}, "weight_map": places}))
    return {name: home / name for name in networks}


def spoiled(draw: random.Random, folder: Path) -> str:
    """Change something about a folder, and say what."""
    victim = draw.choice([*sorted(folder.iterdir()), folder / "config.json", folder / "config.json"])
    content = victim.read_bytes()
    kind = draw.randrange(6)
    if victim.suffix == ".json" and kind < 4:
        told = json.loads(content)
        for _ in range(draw.choice((1, 1, 2, 4))):
            told = changed(draw, told)
            if isinstance(told, dict) and victim.name == hugging.CONFIG:
                told = aimed(draw, told)  # pyright: ignore[reportUnknownArgumentType]
            if isinstance(told, dict) and isinstance(told.get("weight_map"), dict) and draw.random() < 0.5:  # pyright: ignore
                places: Any = told["weight_map"]  # pyright: ignore[reportUnknownVariableType]
                if places:
                    places[draw.choice(sorted(places))] = draw.choice(PLACES)
        victim.write_text(json.dumps(told))
        return f"{victim.name} {told!r}"
    if kind == 4:
        victim.unlink()
        if draw.random() < 0.5:
            victim.symlink_to(draw.choice(("/etc/passwd", ".", victim.name, folder / "config.json")))
        return f"{victim.name} gone or a link"
    victim.write_bytes(damaged(draw, content))
    return f"{victim.name} damaged: {victim.read_bytes()[:200]!r}"


def aimed(draw: random.Random, told: dict[str, Any]) -> dict[str, Any]:
    """A configuration in which something is said that a maker of networks might listen to."""
    kind = draw.randrange(4)
    if kind == 0:
        return {**told, draw.choice(NAMES): hostile(draw)}
    if kind == 1:
        numbers = [name for name, value in told.items() if isinstance(value, int)]
        return {**told, draw.choice([*numbers, *NAMES]): draw.choice(LARGE)}
    if kind == 2:
        return {**told, "model_type": draw.choice(KINDS)}
    inner = {"model_type": draw.choice(("timm_wrapper", *KINDS)), "architecture": "resnet18", "num_labels": 2**39}
    return {**told, draw.choice(("text_config", "vision_config", "rope_scaling")): inner}


@pytest.mark.filterwarnings("ignore")
def test_hostile_folders_of_transformers(tally: Tally, draw: random.Random, teachers: dict[str, Path], tmp_path: Path):
    private = tmp_path / "private"
    shutil.copytree(teachers["whole"], private)
    whole: dict[str, Any] = {}
    looks: dict[str, tuple[Callable[[str], Any], Callable[[Path, torch.dtype], Any], Callable[..., Any]]] = {
        "whole": (causal.source_of, causal.teacher_of, causal.made),
        "parts": (causal.source_of, causal.teacher_of, causal.made),
        "speech": (whisper.source_of, whisper.teacher_of, whisper.made),
    }
    for name, (source_of, teacher_of, made) in looks.items():  # what is imported on the way may do as it likes
        source = source_of(str(teachers[name]))
        whole[name] = (source.digest, teacher_of(teachers[name], torch.float32).state_dict())
        made(source.config, making.MOST_NUMBERS)
    for number in for_a_while():
        name = draw.choice(sorted(looks))
        folder = tmp_path / "stranger"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(teachers[name], folder)
        what = f"{number} {name} {spoiled(draw, folder)}"[:1500]
        source_of, teacher_of, made = looks[name]
        tally.attempt(f"plan {what}", lambda folder=folder: plan_for(folder), ValueError)
        told, source = tally.attempt(f"look {what}", lambda f=source_of, folder=folder: f(str(folder)), ValueError)
        read, teacher = tally.attempt(
            f"load {what}", lambda f=teacher_of, folder=folder: f(folder, torch.float32), ValueError
        )
        if told:
            tally.attempt(f"make {what}", lambda f=made, source=source: f(source.config, 2**22), ValueError)
        if told and read and source.digest == whole[name][0]:
            found = teacher.state_dict()
            if any(n in found and not torch.equal(t, found[n]) for n, t in whole[name][1].items()):
                tally.bytes_lost.append(f"other weights of one digest: {what}")
    tally.check()

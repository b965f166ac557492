"""Files of language models' caches, damaged and forged: a cache, or a sentence."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from fuzzing import Tally, changed, damaged, for_a_while
from safetensors import safe_open

from affinear.models.language import AffinearCache, AffinearForCausalLM, preset
from affinear.models.sealing import SEAL, broken, sealed


def model() -> AffinearForCausalLM:
    shape = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return AffinearForCausalLM(preset("small", **shape, softmax_every=2, conv_size=3)).eval()


def test_damaged_files_of_caches(tally: Tally, draw: random.Random, tmp_path: Path):
    network, path = model(), tmp_path / "a.safetensors"
    whole = network(torch.ones(1, 5, dtype=torch.long)).past_key_values.save(path, network).read_bytes()
    for _ in for_a_while():
        content = damaged(draw, whole)
        path.write_bytes(content)
        told, is_broken = tally.attempt(f"seal of {content[:80]!r}", lambda: broken(path), ValueError, OSError)
        found, _ = tally.attempt(f"cache {content[:80]!r}", lambda: AffinearCache.load(path, network), ValueError)
        if found and content != whole and told and not is_broken and SEAL.encode() in content[:8000]:
            tally.bytes_lost.append(f"a change went unnoticed: {content[:200]!r}")
    tally.check()


def test_forged_files_of_caches(tally: Tally, draw: random.Random, tmp_path: Path):
    network, path = model(), tmp_path / "a.safetensors"
    network(torch.ones(1, 5, dtype=torch.long)).past_key_values.save(path, network)
    with safe_open(path, "pt") as file:
        told = {name: value for name, value in file.metadata().items() if name != SEAL}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for _ in for_a_while():
        said: Any = changed(draw, told) if draw.random() < 0.5 else told
        words = {str(name): str(value) for name, value in said.items()} if isinstance(said, dict) else {}
        parts = dict(tensors)
        name = draw.choice(list(parts))
        shape = [draw.choice((0, 1, 2, 3, size)) for size in parts[name].shape]
        parts[name] = torch.zeros(shape, dtype=draw.choice((parts[name].dtype, torch.float16, torch.int64)))
        try:
            path.write_bytes(sealed(parts, words))
        except UnicodeEncodeError:
            continue  # half a letter, which no file can hold
        tally.attempt(f"{name} {shape} {words}"[:500], lambda: AffinearCache.load(path, network), ValueError)
    tally.check()

"""SmolLM2-135M-Instruct out of a GGUF file, in pieces that travel, and back into a folder of transformers.

    python evidence/packing/pack_smollm2.py pack SmolLM2-135M-Instruct.Q4_1.gguf pieces
    python evidence/packing/pack_smollm2.py join pieces smollm2

`pack` needs the package gguf, `join` torch, numpy and safetensors alone. The pieces hold the blocks of the GGUF file,
each kind of byte by itself and then compressed: two of 40 MB in place of 270 in bfloat16 or 538 in float32. Its
embedding of 8 bits is rounded to 6, whose steps are finer still than those of the 4 bits that all else has: perplexity
of twelve rows of abstracts is 27.50 then and not 27.33. With `--bits 8` nothing is rounded, and the pieces are 87 MB.
What `join` writes is what they stand for, to the last bit, in float32.
"""

from __future__ import annotations

import argparse
import importlib
import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save, save_file
from torch import Tensor

PIECE = 51_500_000  # bytes before they are compressed, about
SIZES = {"Q4_1": 20, "Q8_0": 34}  # bytes of a block of 32 weights
SCALE = 2  # of them, where a block begins
# Weights are not like texts: a byte says nothing of the next, and nothing comes twice.
XZ = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 0, "pb": 0, "dict_size": 2**20}]
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OTHERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def main() -> None:
    """Pack or join."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("pack", "join"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, help="a new folder")
    parser.add_argument("--bits", type=int, default=6, choices=range(4, 9), help="of the embedding's weights")
    given = parser.parse_args()
    if given.target.exists():
        parser.error(f"{given.target} is there already; give a new folder")
    if given.do == "pack":
        pack(given.source, given.target, given.bits)
    else:
        join(given.source, given.target)


def pack(file: Path, target: Path, bits: int = 8) -> None:
    """Write the pieces of a GGUF file of the Llama family, with its configuration and its tokenizer.

    Args:
        file: The GGUF file.
        target: A new folder.
        bits: How many are left of weights that have 8.
    """
    from transformers import AutoConfig, AutoTokenizer

    GGUFReader: Any = importlib.import_module("gguf").GGUFReader  # a package that nothing else here needs
    config: Any = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    target.mkdir(parents=True)
    told = {**config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    told = {name: value for name, value in told.items() if name not in ("quantization_config", "_name_or_path")}
    (target / "config.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    tokenizer.backend_tokenizer.save(str(target / "tokenizer.json"))
    piece: dict[str, Tensor] = {}
    number = 0
    for tensor in GGUFReader(file).tensors:
        kind, name = tensor.tensor_type.name, name_of(tensor.name)
        blocks = np.array(tensor.data)
        heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if part in name:
                blocks = unturned(blocks, count)
        if kind == "Q8_0":
            blocks = narrowed(blocks, bits)
        piece[f"{kind}:{name}"] = planes_of(torch.from_numpy(np.ascontiguousarray(blocks)), kind)
        if sum(one.numel() * one.element_size() for one in piece.values()) >= PIECE:
            number, piece = _written(piece, target, number)
    if piece:
        _written(piece, target, number)


def _written(piece: dict[str, Tensor], target: Path, number: int) -> tuple[int, dict[str, Tensor]]:
    path = target / f"piece-{number}.safetensors.xz"
    path.write_bytes(lzma.compress(save(piece), filters=XZ))
    print(f"{path}: {path.stat().st_size:,} bytes", flush=True)
    return number + 1, {}


def name_of(name: str) -> str:
    """What transformers calls a tensor of a GGUF file.

    Examples:
        >>> name_of("blk.3.attn_q.weight")
        'model.layers.3.self_attn.q_proj.weight'
    """
    stem, kind = name.rsplit(".", 1)
    if stem in OTHERS:
        return f"{OTHERS[stem]}.{kind}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.{kind}"


def unturned(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of queries or keys in transformers' order: GGUF has the two halves of a rotation side by side."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def narrowed(rows: NDArray[Any], bits: int) -> NDArray[Any]:
    """Blocks of Q8_0 (rows, bytes) whose weights have so many bits, in as many bytes."""
    step = 2 ** (8 - bits)
    blocks = rows.reshape(-1, SIZES["Q8_0"])
    scale = blocks[:, :SCALE].copy().view(np.float16) * np.float16(step)
    weights = np.rint(blocks[:, SCALE:].copy().view(np.int8) / step).astype(np.int8)
    return np.concatenate((scale.view(np.uint8), weights.view(np.uint8)), axis=1).reshape(rows.shape)


def planes_of(blocks: Tensor, kind: str) -> Tensor:
    """The first byte of all blocks, (rows, blocks), then the second, and so on: (bytes, rows, blocks)."""
    if kind == "F32":
        return blocks
    return blocks.reshape(blocks.shape[0], -1, SIZES[kind]).permute(2, 0, 1).contiguous()


def blocks_of(planes: Tensor, kind: str) -> Tensor:
    """What `planes_of` was given, (rows, bytes)."""
    return planes if kind == "F32" else planes.permute(1, 2, 0).flatten(1)


def weights_of(blocks: Tensor, kind: str) -> Tensor:
    """The weights that blocks stand for, in float32.

    Args:
        blocks: (rows, bytes), uint8; float32 is what it is.
        kind: "Q4_1", 20 bytes for 32 weights: scale, least, and 4 bits each. "Q8_0", 34 bytes: scale and 8 bits each.
    """
    if kind == "F32":
        return blocks
    raw = blocks.numpy().reshape(blocks.shape[0], -1, SIZES[kind])
    scale = raw[..., :SCALE].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return torch.from_numpy((scale * raw[..., SCALE:].copy().view(np.int8)).reshape(len(raw), -1))
    least = raw[..., 2:4].copy().view(np.float16).astype(np.float32)
    packed = raw[..., 4:]
    steps = np.concatenate((packed & 15, packed >> 4), axis=-1).astype(np.float32)
    return torch.from_numpy((scale * steps + least).reshape(len(raw), -1))


def join(pieces: Path, target: Path) -> None:
    """Write a folder that `from_pretrained` reads."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(pieces.glob("piece-*.safetensors.xz")):
        for name, planes in load(lzma.decompress(path.read_bytes())).items():
            kind, _, plain = name.partition(":")
            tensors[plain] = weights_of(blocks_of(planes, kind), kind)
    target.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(pieces / name, target / name)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    print(f"{target}: {sum(one.numel() for one in tensors.values()):,} weights", flush=True)


if __name__ == "__main__":
    main()

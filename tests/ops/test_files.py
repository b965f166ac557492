"""States in files: what is written is read again, by others too; what is no state is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import affinear as af
from affinear.ops import rotary_1d


def a_state(dtype: torch.dtype = torch.float32, rotary: bool = False, length: int = 20) -> af.State:
    key, value = torch.randn(2, 2, length, 3, 4, dtype=dtype).unbind()
    return af.summarize(key, value, "nala", rotary=rotary_1d(length, 4) if rotary else None)


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_state_comes_back_bit_by_bit(tmp_path: Path, dtype: torch.dtype, rotary: bool):
    state = a_state(dtype, rotary)
    again = af.State.load(state.save(tmp_path / "state.safetensors"))
    assert again.mechanism == state.mechanism
    names = ["count", "key_mean", "value_mean", "covariance", *["rotated_key_mean"] * rotary]
    assert all(torch.equal(getattr(again, name), getattr(state, name)) for name in names)
    assert (again.rotated_key_mean is None) == (not rotary)
    assert list(tmp_path.iterdir()) == [tmp_path / "state.safetensors"]


def test_the_file_is_safetensors(tmp_path: Path):
    state = a_state(rotary=True)
    tensors = load_file(state.save(tmp_path / "state.safetensors"))
    assert torch.equal(tensors["covariance"], state.covariance)
    assert torch.equal(tensors["count"], state.count)
    assert len(tensors) == 5


def test_states_of_files_merge_to_that_of_all(tmp_path: Path):
    key, value = torch.randn(2, 1, 90, 2, 4, dtype=torch.float64).unbind()
    parts = zip(key.split([50, 0, 40], dim=1), value.split([50, 0, 40], dim=1), strict=True)
    files = [af.summarize(k, v).save(tmp_path / f"{i}.safetensors") for i, (k, v) in enumerate(parts)]
    merged = sum(map(af.State.load, files))
    assert isinstance(merged, af.State)
    torch.testing.assert_close(merged.covariance, af.summarize(key, value).covariance)


def test_a_state_of_an_empty_batch_comes_back(tmp_path: Path):
    state = a_state().map(lambda x: x[:0])
    assert af.State.load(state.save(tmp_path / "state")).covariance.shape == (0, 3, 8, 4)


def test_folders_and_files_that_are_not_there_are_named(tmp_path: Path):
    path = tmp_path / "none" / "state"
    said = f"path: expected a file in a folder that exists, got {path}; make {path.parent} first or choose another"
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(said)}$"):
        a_state().save(path)
    said = (
        f"path: expected a file that State.save wrote, got {path}, and there is no folder {path.parent}; save a state"
    )
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(said)}"):
        af.State.load(str(path))
    with pytest.raises(
        FileNotFoundError, match=r"^path: .*, got .*state, and there is no such file; save a state there"
    ):
        af.State.load(tmp_path / "state")
    a_state().save(tmp_path / "file")
    said = f"got {tmp_path / 'file' / 'state'}, and {tmp_path / 'file'} is none"
    with pytest.raises(NotADirectoryError, match=f"^path: expected a file in a folder, {re.escape(said)}$"):
        a_state().save(tmp_path / "file" / "state")


def test_nothing_is_overwritten(tmp_path: Path):
    a_state().save(tmp_path / "state")
    with pytest.raises(ValueError, match=r"^path: expected a file that does not exist yet, got .*state; remove it"):
        a_state().save(tmp_path / "state")


def test_a_mechanism_nobody_knows_is_refused(tmp_path: Path):
    own = dataclasses.replace(af.mechanisms()["mala"], name="a map of my own")
    state = dataclasses.replace(a_state(), mechanism=own)
    with pytest.raises(ValueError, match=r"^mechanism: expected a registered one.*'a map of my own'.*register"):
        state.save(tmp_path / "state")
    a_state().save(tmp_path / "state")
    renamed = (tmp_path / "state").read_bytes().replace(b'"nala"', b'"gone"')
    (tmp_path / "state").write_bytes(renamed)
    with pytest.raises(ValueError, match=r"expected a state of a registered mechanism, got 'gone'"):
        af.State.load(tmp_path / "state")


def damage(raw: bytes, how: str) -> bytes:
    """A file that once was a state."""
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    if how == "cut short":
        return raw[:-1]
    if how == "empty":
        return b""
    if how == "something else":
        return b"PK\x03\x04" + raw
    if how == "another format":
        header["__metadata__"]["format"] = "network"
    elif how == "no covariance":
        del header["covariance"]
    elif how == "another shape":
        header["key_mean"]["shape"] = [3, 2, 8]
    elif how == "another tensor":
        header["code"] = header["count"]
    elif how == "beyond the end":
        header["count"]["data_offsets"] = [10**9, 10**9 + 48]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + raw[8 + size :]


@pytest.mark.parametrize(
    "how",
    [
        "cut short",
        "empty",
        "something else",
        "another format",
        "no covariance",
        "another shape",
        "another tensor",
        "beyond the end",
    ],
)
def test_what_is_no_state_is_refused(tmp_path: Path, how: str):
    path = a_state().save(tmp_path / "state")
    path.write_bytes(damage(path.read_bytes(), how))
    with pytest.raises(ValueError, match=r"^path: expected a file that State\.save wrote, got .*state \("):
        af.State.load(path)

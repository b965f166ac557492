"""A file is put in place whole, and nothing is replaced unless asked."""

from pathlib import Path

import pytest

from affinear.lens.files import Placed, place


def test_a_free_name_is_used_as_it_is(tmp_path: Path):
    assert place(b"new", tmp_path / "a.png") == Placed(tmp_path / "a.png", written=True)
    assert (tmp_path / "a.png").read_bytes() == b"new"


def test_a_name_in_use_leads_to_the_next_free_one(tmp_path: Path):
    for number, content in enumerate((b"one", b"two", b"three"), start=1):
        name = "a.png" if number == 1 else f"a-{number}.png"
        assert place(content, tmp_path / "a.png").path == tmp_path / name
    assert (tmp_path / "a.png").read_bytes() == b"one"


def test_repeating_adds_nothing(tmp_path: Path):
    place(b"one", tmp_path / "a.png")
    place(b"two", tmp_path / "a.png")
    assert place(b"two", tmp_path / "a.png") == Placed(tmp_path / "a-2.png", written=False)
    assert len(list(tmp_path.iterdir())) == 2


def test_force_replaces(tmp_path: Path):
    place(b"one", tmp_path / "a.png")
    assert place(b"two", tmp_path / "a.png", force=True) == Placed(tmp_path / "a.png", written=True)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"two"]


def test_a_failure_leaves_nothing_behind(tmp_path: Path):
    (tmp_path / "a.png").mkdir()
    with pytest.raises(OSError, match="directory"):
        place(b"one", tmp_path / "a.png", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


def test_a_missing_folder_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        place(b"one", tmp_path / "nowhere" / "a.png")

"""What is no data set is told what was looked for and what was found."""

from pathlib import Path

import pytest

from affinear.tasks.classify.data import open_data


def test_an_unknown_folder_lists_what_was_looked_for_and_what_is_there(tmp_path: Path):
    for number in range(15):
        (tmp_path / f"file{number:02}.txt").touch()
    (tmp_path / "a folder").mkdir()
    with pytest.raises(ValueError, match="no data set that is known") as caught:
        open_data(str(tmp_path))
    for part in ("CIFAR-10", "CIFAR-100", "idx files", "train/CLASS", "Found: a folder/, file00.txt", "and 4 more"):
        assert part in str(caught.value)


def test_an_empty_folder_is_said_to_be_empty(tmp_path: Path):
    with pytest.raises(ValueError, match=r"Found: nothing$"):
        open_data(str(tmp_path))


@pytest.mark.parametrize(("name", "hint"), [("a-000.tar", "write wds/"), ("a.parquet", "write hfds/")])
def test_files_of_a_reader_lead_to_its_name(tmp_path: Path, name: str, hint: str):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=hint):
        open_data(str(tmp_path))


@pytest.mark.parametrize("prefix", ["", "hfds/", "wds/"])
def test_what_is_not_there_is_named_and_not_fetched(tmp_path: Path, prefix: str):
    with pytest.raises(ValueError, match=r"there is nothing of that name; nothing is fetched"):
        open_data(f"{prefix}{tmp_path / 'nothing'}")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"it is a file"):
        open_data(f"{prefix}{tmp_path / 'file'}")

"""What `predict` is asked about becomes tokens, or is told in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from affinear.tasks.ranges.asking import rows_of


@pytest.mark.parametrize("kind", ["listops", "text", "image"])
@pytest.mark.parametrize("source", ["", "  "])
def test_nothing_is_told(kind: str, source: str):
    with pytest.raises(ValueError, match=r"^source: expected .*the name of a file, got nothing$"):
        rows_of(source, kind, 1024)


@pytest.mark.parametrize("source", ["[MAX 4 [MIN 7 9 ] 0", "[MAX 4 ] ]"])
def test_a_list_that_is_not_closed_is_told(source: str):
    with pytest.raises(ValueError, match=r"expected as many \] as \[, got"):
        rows_of(source, "listops", 100)


def test_an_expression_is_the_same_from_a_file(tmp_path: Path):
    path = tmp_path / "one.txt"
    path.write_text("[MAX 4 [MIN 7 9 ] 0 ]\n")
    (written,), (read,) = rows_of("[MAX 4 [MIN 7 9 ] 0 ]", "listops", 100), rows_of(str(path), "listops", 100)
    assert written.tolist() == read.tolist()
    assert len(written) == 8


def test_a_file_of_nothing_is_told(tmp_path: Path):
    path = tmp_path / "none.txt"
    path.touch()
    with pytest.raises(ValueError, match="the file is empty"):
        rows_of(str(path), "text", 100)

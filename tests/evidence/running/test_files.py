"""Files of experiments are there whole or not at all."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Told:
    name: str


def test_what_json_does_not_know_is_kept_as_fields_or_as_text(script: Any, tmp_path: Path):
    path = tmp_path / "folder" / "found.json"
    script("running.files").keep(path, {"plan": Told("small"), "path": Path("here")})
    assert json.loads(path.read_text()) == {"plan": {"name": "small"}, "path": "here"}
    assert [one.name for one in path.parent.iterdir()] == ["found.json"]


def test_a_file_that_cannot_be_written_leaves_the_old_one(script: Any, tmp_path: Path):
    files, path = script("running.files"), tmp_path / "found.json"
    files.keep(path, [1])
    with pytest.raises(UnicodeEncodeError):
        files.write(path, "\ud800")
    assert json.loads(path.read_text()) == [1]

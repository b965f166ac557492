"""Pages of what was not measured yet are pages, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def test_nothing_measured_is_a_page_that_says_so(written: Callable[..., str], tmp_path: Path):
    for page, said in (
        ("speech", "No network was trained yet"),
        ("generation", "No network was trained yet"),
        ("upscaling", "No network was trained yet"),
    ):
        (tmp_path / page).mkdir()
        assert said in written(page, tmp_path / page, tmp_path / "pages" / page)

"""Words that pages share say what their examples show."""

from __future__ import annotations

import doctest
from typing import Any

import pytest


@pytest.mark.parametrize("name", ["pages.words", "pages.kinds"])
def test_examples_hold(script: Any, name: str):
    found = doctest.testmod(script(name))
    assert found.attempted > 0
    assert found.failed == 0

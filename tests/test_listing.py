"""What `affinear models` shows is what the networks are, and is shown without making them."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from affinear.listing import elsewhere, entries
from affinear.models import catalogue

HELP = "Run scripts/count_networks.py."


def test_every_network_of_the_catalogue_is_listed_in_its_order():
    for others in (False, True):
        assert [entry.name for entry in entries(others=others)] == catalogue.names(others=others), HELP


def test_networks_of_other_tasks_are_named():
    from affinear.models import dit, sequence, upscaler
    from affinear.models.speech import conformer
    from affinear.tasks.language import shapes

    known = {
        "language": set(shapes.SHAPES),
        "ranges": set(sequence.SIZES),
        "speech": {name for name in vars(conformer) if name.startswith("conformer_")},
        "generate": set(dit.SIZES),
        "upscale": set(upscaler.NETWORKS),
    }
    assert {task: set(names) for task, names in elsewhere().items()} == known


def test_patterns_are_those_of_timm():
    for pattern in ("mavit*", "*_linear", "inline_*_tiny", "deit*", "nothing"):
        assert [entry.name for entry in entries(pattern, True)] == catalogue.names(pattern, True)


def test_what_is_kept_is_what_is_counted(seed: int):
    small = [entry for entry in entries(others=True) if entry.parameters < 15_000_000]
    for kept in random.Random(seed).sample(small, 2):
        assert list(catalogue.entries(kept.name, others=True)) == [kept], HELP


@pytest.mark.exhaustive
def test_all_that_is_kept_is_what_is_counted():
    assert list(catalogue.entries(others=True)) == entries(others=True), HELP


@pytest.mark.parametrize(
    "words", ["--help", "models", "models mavit* --json", "train --help", "bench --help", "--version"]
)
def test_help_and_lists_come_without_torch(words: str):
    code = f"""
import sys
sys.argv = ["affinear", *{words.split()}]
from affinear.cli import main
try:
    main()
finally:
    print("torch" in sys.modules, "timm" in sys.modules, "matplotlib" in sys.modules)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "False False False"
    assert len(shown.splitlines()) > 1

"""The report of a comparison: whole in itself, with every number, on paper that may be light or dark."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from affinear.compare.cells import Outcome
from affinear.compare.experiment import Comparison, Results
from affinear.compare.findings import Summary
from affinear.compare.report import html
from affinear.compare.screen import legend, looked_into, row, table
from affinear.lens.glance import Attention, Map
from affinear.tasks.classify import TASK, ClassifySettings
from affinear.tasks.images.labelled.images import Images, in_memory
from affinear.tasks.images.labelled.some import chosen
from affinear.train import Recipe, Setup
from affinear.train.records import Record

NAMES = ("softmax", "linear", "mala", "mala+rotary")
VOID = {"meta", "img"}  # written without an end


class Page(HTMLParser):
    """Tags of a page in order, checked to be closed, its text, and all that it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.tags, self.text, self.sources = list[str](), list[str](), "", list[str]()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def plan_of(seeds: int) -> Comparison:
    def half(count: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng()
        return generator.integers(0, 255, (count, 1, 8, 8), np.uint8), generator.integers(0, 2, count)

    images = in_memory("two <kinds>", half(40), half(20), ("a & b", "c"))
    setup = Setup(TASK, Recipe(epochs=3), ClassifySettings(image_size=(8, 8)))
    return Comparison("affinear_trunk_micro", "digits", images, NAMES, tuple(range(seeds)), setup, Path("nowhere"))


def outcome_of(plan: Comparison, name: str, seed: int) -> Outcome:
    generator = np.random.default_rng()
    curve = tuple(
        Record(e, 10 * e, 2.0 / e, 1e-3, 1.0, 50.0, {"top1": float(generator.uniform(0.5, 0.9))}) for e in (1, 2, 3)
    )
    assert isinstance(plan.opened, Images)
    maps = tuple(
        Map(number, f"blocks.{layer}.attn", 5, (4, 4), tuple(generator.normal(1, 2, 16).tolist()))
        for number, _ in chosen(plan.opened.test, 4)
        for layer in (0, 1, 2)
    )
    value = (curve[-1].test or {})["top1"]
    return Outcome(name, seed, "", value, 1000, 50.0, 2**20, 3.0, curve, Attention(-0.5, 0.25, 1e-6, maps))


def results_of(seeds: int = 2) -> Results:
    plan = plan_of(seeds)
    return Results(plan, tuple(outcome_of(plan, name, seed) for name in NAMES for seed in plan.seeds))


def test_the_page_stands_alone_and_is_well_formed():
    text = html(results_of())
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert page.sources
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not re.search(r"https?://|<script|@import|url\((?!#)", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_the_page_has_every_variant_curve_map_and_sentence():
    results = results_of()
    page = Page(html(results))
    for name in NAMES:
        assert page.text.count(name) > 5
    for outcome in results.outcomes:
        assert f"{100 * outcome.value:.1f} %" in page.text
    assert page.tags.count("img") == 4 * (1 + 3 * len(NAMES))
    assert page.tags.count("svg") == len(NAMES) + 3
    assert page.tags.count("circle") == len(results.outcomes)
    for heading in ("What can be concluded", "What cannot be concluded", "The table", "Learning", "What one patch"):
        assert heading in page.text
    assert "two <kinds>" in page.text
    assert "a & b" in page.text or "c" in page.text
    assert "two seeds" in page.text.lower()


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_page_of_a_comparison_that_is_not_finished(kept: int):
    whole = results_of()
    page = Page(html(replace(whole, outcomes=whole.outcomes[:kept], interrupted=True)))
    assert f"{kept} of 8: not finished, the same command goes on" in page.text


def test_failures_and_networks_without_attention_are_shown():
    whole = results_of(1)
    plain = replace(whole.outcomes[0], attention=Attention())
    page = Page(html(replace(whole, outcomes=(plain, Outcome("linear", 0, error="it <broke>")))))
    assert "failed" in page.text
    assert "it <broke>" in page.text
    assert "img" not in page.tags


def test_a_seed_alone_is_called_what_it_is():
    page = Page(html(results_of(1)))
    assert "No difference is decided." in page.text
    assert "One seed has no spread" in page.text


def test_columns_of_attention_stand_where_something_is_known_of_it():
    known = Summary("mala", {0: 50.0}, 50.0, None, 9, None, 0.217, None, None, -0.5, 0.1, 1e-7, {})
    unknown = replace(known, norm_correlation=None, negative_share=None, row_sum_error=None)
    assert [len(table(given, TASK).columns) for given in ([known, unknown], [unknown])] == [9, 6]
    assert "entropy" not in legend(TASK, attention=looked_into([unknown]))
    assert "entropy" in legend(TASK, attention=looked_into([known]))
    assert row(known, TASK)[4] == "0.22"  # images/s of a slow network are not none

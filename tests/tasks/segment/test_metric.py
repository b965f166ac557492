"""Overlaps are counted over the whole data set, as its definition says."""

from __future__ import annotations

import math

import torch

from affinear.tasks.segment.metric import confusion, numbers_of, overlaps, score_of


def test_counts_agree_with_sets_of_pixels():
    labels, found = torch.randint(-1, 4, (3, 20, 30)), torch.randint(0, 4, (3, 20, 30))
    counts = confusion(labels, found, 4)
    known = labels != -1
    expected: list[float] = []
    for i in range(4):
        truth, said = (labels == i), (found == i) & known
        expected.append(((truth & said).sum() / (truth | said).sum()).item())
    torch.testing.assert_close(overlaps(counts), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    numbers = numbers_of(counts)
    assert math.isclose(numbers["miou"], sum(expected) / 4, rel_tol=1e-6)
    assert math.isclose(numbers["aacc"], ((labels == found) & known).sum().item() / known.sum().item())


def test_mean_over_the_set_is_not_the_mean_over_photos():
    first = confusion(torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 0, 0]), 2)
    second = confusion(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 1, 1, 1]), 2)
    together = numbers_of(first + second)["miou"]
    assert math.isclose(together, (4 / 5 + 3 / 4) / 2)
    assert not math.isclose(together, (numbers_of(first)["miou"] + numbers_of(second)["miou"]) / 2)


def test_a_class_that_is_nowhere_does_not_count():
    counts = confusion(torch.tensor([0, 0, 1]), torch.tensor([0, 0, 0]), 4)
    numbers = numbers_of(counts)
    assert math.isclose(numbers["miou"], (2 / 3 + 0) / 2)
    assert math.isclose(numbers["macc"], 0.5)
    score = score_of(counts, torch.tensor([1, 1, 0, 0]), 1, ["a", "b", "c", "d"], [])
    assert [(part.name, part.count) for part in score.parts] == [("a", 1), ("b", 1)]
    assert score.parts[0].numbers["miou"] == 2 / 3


def test_a_class_that_is_wrongly_found_counts():
    assert numbers_of(confusion(torch.tensor([0, 0]), torch.tensor([0, 1]), 2))["miou"] == 0.25

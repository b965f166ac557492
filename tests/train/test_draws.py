"""What is drawn follows from seed and epoch."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from affinear.train.draws import NOTHING, Batches, Draw, Draws, InOrder, mix, uniform


def drawn(count: int, seed: int, epoch: int, repeats: int = 1) -> list[Draw]:
    draws = Draws(count, seed, repeats)
    draws.set_epoch(epoch)
    return list(draws)


def test_every_image_comes_once_in_an_order_of_its_own_for_each_epoch_and_seed(seed: int):
    orders = [tuple(draw.index for draw in drawn(500, *key)) for key in ((seed, 0), (seed, 1), (seed + 1, 0))]
    assert all(sorted(order) == list(range(500)) for order in orders)
    assert len(set(orders)) == 3


def test_a_repetition_is_exact(seed: int):
    assert drawn(5000, seed, 7) == drawn(5000, seed, 7)


def test_seeds_differ_within_and_between_epochs(seed: int):
    seeds = [draw.seed for epoch in range(4) for draw in drawn(3000, seed, epoch)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= one < 2**63 for one in seeds)


@pytest.mark.parametrize("seed_", [0, -1, 2**64 + 5])
def test_any_whole_number_is_a_seed(seed_: int):
    assert len(drawn(10, seed_, 3)) == 10


def test_repeats_come_in_a_row_with_seeds_of_their_own(seed: int):
    found = drawn(100, seed, 2, repeats=3)
    times = Counter(draw.index for draw in found)
    assert len(found) == 100
    assert sorted(times.values()) == [1] + [3] * 33
    assert found[0].index == found[1].index == found[2].index
    assert len({draw.seed for draw in found}) == 100


def test_more_repeats_than_images_are_one_image(seed: int):
    assert len({draw.index for draw in drawn(10, seed, 0, repeats=2**80)}) == 1


def test_batches_are_whole_and_follow_the_epoch(seed: int):
    batches = Batches(Draws(50, seed), 8, drop_last=True)
    first = list(batches)
    assert [len(batch) for batch in first] == [8] * 6
    assert len(batches) == 6
    batches.set_epoch(1)
    assert list(batches) != first
    batches.set_epoch(0)
    assert list(batches) == first


def test_in_order_fills_up_with_nothing():
    found: Any = list(Batches(InOrder(5, 6), 3, drop_last=False))
    assert [[draw.index for draw in batch] for batch in found] == [[0, 1, 2], [3, 4, NOTHING]]


def test_words_are_those_of_splitmix64():
    # The first three outputs of the published generator, started at 0, whose state grows by the golden step.
    states = np.array([k * 0x9E3779B97F4A7C15 % 2**64 for k in (1, 2, 3)], np.uint64)
    assert [hex(word) for word in mix(states).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_uniform_numbers_are_spread_evenly(seed: int):
    seeds = np.arange(20_000, dtype=np.uint64) + np.uint64(seed)
    for number in range(4):
        found = uniform(seeds, number)
        assert 0 <= found.min() <= found.max() < 1
        counts = np.histogram(found, 10, (0, 1))[0]
        assert abs(counts - 2000).max() < 300  # seven standard deviations
    assert abs(np.corrcoef(uniform(seeds, 0), uniform(seeds, 1))[0, 1]) < 0.05

"""Batches by duration, and SpecAugment."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from affinear.tasks.speech.augment import Masks, mask
from affinear.tasks.speech.planning import ALIKE, ByDuration, Turn
from affinear.train.draws import NOTHING


def batches_of(plan: ByDuration) -> list[list[Turn]]:
    draws = [draw for draw in plan if isinstance(draw, Turn)]
    return [draws[i : i + plan.places] for i in range(0, len(draws), plan.places)]


def test_every_recording_comes_once_an_epoch_within_seconds_and_places():
    random = np.random.default_rng()
    seconds = random.uniform(0.5, 30, 400).tolist()
    chosen = sorted(random.choice(400, 300, replace=False).tolist())
    plan = ByDuration(seconds, chosen, places=12, most=60.0, seed=int(random.integers(2**31)))
    orders: list[list[int]] = []
    for epoch in range(2):
        plan.set_epoch(epoch)
        batches = batches_of(plan)
        assert len(batches) == plan.batches
        assert len(plan) == 12 * plan.batches
        orders.append([draw.index for batch in batches for draw in batch if draw.index != NOTHING])
        assert sorted(orders[-1]) == chosen
        for batch in batches:
            real = [seconds[draw.index] for draw in batch if draw.index != NOTHING]
            assert len(real) * max(real) <= max(60.0, max(real))
            assert min(real) >= ALIKE * max(real) - 1e-9
            np.testing.assert_allclose(sum(draw.share for draw in batch), 12)
            halves = Counter(i < 6 for i, draw in enumerate(batch) if draw.index != NOTHING)
            assert abs(halves[True] - halves[False]) <= 1
    assert orders[0] != orders[1]
    plan.set_epoch(0)
    assert [draw.index for draw in plan if draw.index != NOTHING] == orders[0]


def test_stripes_are_where_they_may_be_and_as_wide_as_they_may():
    features, frames = torch.ones(64, 200, 40), torch.randint(50, 201, (64,))
    out = mask(features, frames, Masks(bands=1, band_width=9, times=0, time_share=0.0))
    gone = (out == 0).all(dim=1)
    assert gone.sum(dim=1).max() <= 9
    assert gone.sum(dim=1).unique().numel() > 3  # widths are drawn for each
    assert ((out == 0).any(dim=1) == gone).all()
    out = mask(features, frames, Masks(bands=0, band_width=0, times=1, time_share=0.1))
    gone = (out == 0).all(dim=2)
    assert (gone.sum(dim=1) <= 0.1 * frames).all()
    assert not (gone & (torch.arange(200) >= frames[:, None])).any()
    assert torch.equal(mask(features, frames, Masks(0, 0, 0, 0.0)), features)

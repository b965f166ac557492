"""Scores that are kept come back, recording by recording, as fine as they have to be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def test_scores_come_back_but_for_what_is_very_unlikely(script: Any, tmp_path: Path):
    spoken = script("running.spoken")
    counts = torch.randint(1, 30, (7,)).tolist()
    scores = [(5 * torch.randn(count, 39)).log_softmax(dim=-1).bfloat16() for count in counts]
    spoken.keep_scores(tmp_path / "cells" / "mala-0.npz", scores)
    found = spoken.kept_scores(tmp_path / "cells" / "mala-0.npz")
    assert [len(one) for one in found] == counts
    for one, kept in zip(scores, found, strict=True):
        wanted = one.float().clamp(min=-255 * spoken.FINE)
        torch.testing.assert_close(kept, wanted, atol=spoken.FINE / 2 + 1e-5, rtol=0)
    assert [file.name for file in (tmp_path / "cells").iterdir()] == ["mala-0.npz"]

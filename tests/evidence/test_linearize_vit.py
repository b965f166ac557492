"""The evidence of linearized ViTs says no more than what it measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def vit(script: Any) -> Any:
    return script("linearize_vit")


def timed(pixels: int, ours: float, theirs: float) -> dict[str, Any]:
    tokens = (pixels // 16) ** 2 + 1
    return {
        "kind": "speed",
        "mechanism": "mala",
        "pixels": pixels,
        "tokens": tokens,
        "eager": ours,
        "softmax_eager": theirs,
    }


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([timed(224, 90, 100), timed(512, 12, 10)], "faster at 512 px (1,025 tokens) and above, not at 224 px"),
        (
            [timed(224, 101, 100), timed(512, 12, 10)],
            "faster at 224 px (197 tokens) and above, the least that was measured",
        ),
        ([timed(224, 101, 100), timed(512, 9, 10)], "not faster at any size up to 512 px (1,025 tokens)"),
        ([timed(224, 100, 100)], "not faster at any size up to 224 px (197 tokens)"),
        ([], "not measured"),
    ],
)
def test_a_student_is_called_faster_only_where_it_is(vit: Any, rows: list[dict[str, Any]], said: str):
    assert vit.crossing(rows, "eager") == said
    assert vit.crossing(rows, "graph") == "not measured"


def test_a_student_is_held_to_the_teacher_of_its_own_seed(vit: Any, tmp_path: Path):
    for seed, (teacher, student) in enumerate([(0.90, 0.89), (0.80, 0.77)]):
        rows = vit.Rows(tmp_path / f"rows-{seed}.jsonl")
        rows.add(kind="accuracy", mechanism="softmax", row="teacher", seed=seed, top1=teacher)
        rows.add(kind="accuracy", mechanism="mala", row="whole", seed=seed, top1=student)
        assert vit.Rows(rows.path).has(mechanism="mala", row="whole")  # as another call finds it
        assert not rows.has(mechanism="mala", row="layers")
    told = vit.write(tmp_path)
    assert "| mala | whole | 2 | 83.00 ± 8.49 | 2.00 ± 1.41 |" in told
    assert (tmp_path / "report.md").read_text() == told

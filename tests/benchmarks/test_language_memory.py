"""Memory of training is counted by the operators of a GPU, and grows as it should."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import affinear as af

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield __import__("language_memory")
    for name in ("language_memory", "language_speed", "live_bytes"):
        sys.modules.pop(name, None)


def test_attention_is_the_operator_of_the_kernels_and_keeps_what_that_keeps(script: Any) -> None:
    length = 1024 * int(torch.randint(2, 6, ()))
    query, key, value = (torch.empty(1, length, 2, 64, device="meta", requires_grad=True) for _ in range(3))
    kept = list[torch.Tensor]()
    with script.as_on_a_gpu([]), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = af.attention(query, key, value, "mala", causal=True)
        out.sum().backward()
    assert "_Causal" in type(out.grad_fn).__name__
    states = [x.shape[0] for x in kept if x.shape[1:] == (2, 64, 64)]
    assert states == [1, length // 1024]  # the last, and those before each segment
    assert query.grad is not None
    assert query.grad.shape == query.shape


def test_a_norm_keeps_its_input_and_a_number_for_each_row(script: Any) -> None:
    rows = int(torch.randint(1, 100, ()))
    x = torch.empty(rows, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    kept = list[torch.Tensor]()
    with script.as_on_a_gpu([]), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = F.rms_norm(x, (64,), weight, 1e-6)
    assert sorted(tensor.nbytes for tensor in kept) == sorted([2 * 64, 4 * rows, 2 * 64 * rows])
    out.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.shape, weight.grad.shape) == (x.shape, weight.shape)


@pytest.mark.parametrize("who", ["mala", "llama chunked"])
def test_memory_grows_with_tokens_and_not_with_their_square(script: Any, who: str) -> None:
    peaks = [script.count(script.Cell("memory", who, 1, 2**n), True)["peak_gib"] for n in (14, 15, 16)]
    assert peaks[2] - peaks[1] == pytest.approx(2 * (peaks[1] - peaks[0]), rel=0.05)


def test_checkpoints_keep_one_text_of_a_width_for_each_layer(script: Any) -> None:
    one, whole = (script.count(script.Cell(kind, "mala", 1, 4096), True) for kind in ("memory", "train"))
    assert one["kept_gib"] < whole["kept_gib"] / 2
    assert one["peak_gib"] < whole["peak_gib"]
    assert one["adamw_gib"] == 2 * one["weights_gib"]


def test_every_row_is_written(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(out), "--probe"])
    assert script.main() == 0
    rows = json.loads(out.read_text())["rows"]
    assert [script.Cell(row["kind"], row["who"], row["batch"], row["length"]) for row in rows] == script.cells(True)
    assert all(row["peak_gib"] > row["kept_gib"] > 0 for row in rows)

"""The benchmark of language models measures what it says, and goes on where it was stopped."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "language_speed.py"


@pytest.fixture(scope="module")
def script(module_at: Callable[[Path], Any]) -> Any:
    return module_at(SCRIPT)


@pytest.mark.parametrize("who", ["mala", "mala graph", "llama", "llama static", "llama graph"])
def test_a_token_is_timed(script: Any, who: str):
    found = script.attempt(script.Bench(torch.device("cpu"), True, 0.01), script.Cell("decode", who, 2, 16))
    assert "error" not in found
    assert found["ms"] > 0


@pytest.mark.parametrize(("kind", "who"), [("train", "nala"), ("train", "llama"), ("memory", "llama chunked")])
def test_a_step_is_timed(script: Any, kind: str, who: str):
    found = script.attempt(script.Bench(torch.device("cpu"), True, 0.01), script.Cell(kind, who, 1, 16))
    assert "error" not in found
    assert found["ms"] > 0


def test_standing_keys_answer_as_growing_ones(script: Any):
    bench = script.Bench(torch.device("cpu"), True, 0.01)
    model, other_model = bench.llama().float().eval(), bench.llama("unmasked").float().eval()
    other_model.load_state_dict(model.state_dict())
    keys, values, token = torch.randn(2, 2, 9, 32), torch.randn(2, 2, 9, 32), torch.randint(512, (2, 1))
    growing, standing = hf.DynamicCache(), hf.DynamicCache()
    standing.layers = [script.Standing() for _ in range(2)]
    for layer in range(2):
        growing.update(keys, values, layer)
        longer, other = (torch.cat([x, torch.randn(2, 2, 1, 32)], dim=2) for x in (keys, values))
        standing.update(longer, other, layer)
    places = torch.full((2, 1), 9)
    wanted = model(token, past_key_values=growing, position_ids=places).logits
    found = other_model(token, past_key_values=standing, position_ids=places).logits
    torch.testing.assert_close(found, wanted)
    assert standing.get_seq_length() == 10


def test_the_rivals_have_our_shape(script: Any):
    bench = script.Bench(torch.device("cpu"), True, 0.01)
    ours, llama = bench.ours("mala"), bench.llama()
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in llama.parameters())


def test_a_run_goes_on_where_it_was_stopped(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(script, "cells", lambda probe: [script.Cell("train", "mala", 1, n) for n in (8, 16)])
    seen: list[Any] = []
    monkeypatch.setattr(script, "attempt", lambda bench, cell: seen.append(cell) or {"ms": 1.0})
    out = tmp_path / "out.json"
    for minutes in ("-1", "1", "1"):
        monkeypatch.setattr(sys, "argv", ["x", "--out", str(out), "--probe", "--minutes", minutes, "--device", "cpu"])
        script.main()
    assert [cell.length for cell in seen] == [8, 16]
    assert [row["length"] for row in json.loads(out.read_text())["rows"]] == [8, 16]
    assert "minutes are over" in capsys.readouterr().out


def test_rows_of_an_earlier_run_are_not_measured_again(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(script, "cells", lambda probe: [script.Cell("train", "mala", 1, n) for n in (8, 16)])
    monkeypatch.setattr(script, "attempt", lambda bench, cell: {"ms": 1.0})
    out, before = tmp_path / "out.json", tmp_path / "before.json"
    before.write_text(json.dumps({"rows": [{"kind": "train", "who": "mala", "batch": 1, "length": 8, "ms": 2.0}]}))
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(out), "--beside", str(before), "--probe", "--device", "cpu"])
    script.main()
    assert [row["length"] for row in json.loads(out.read_text())["rows"]] == [16]


def test_cells_of_so_many_sequences_can_be_asked_for_alone(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(script, "cells", lambda probe: [script.Cell("decode", "mala", n, 8) for n in (64, 1)])
    monkeypatch.setattr(script, "attempt", lambda bench, cell: {"ms": 1.0})
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(out), "--batch", "1", "--probe", "--device", "cpu"])
    script.main()
    assert [row["batch"] for row in json.loads(out.read_text())["rows"]] == [1]


def test_all_is_tried_on_few_tokens_before_the_file_is_there(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    wanted = [script.Cell("train", "mala", 16, 8), script.Cell("memory", "mala", 1, 131072)]
    wanted += [script.Cell("decode", "llama", 1, 16384)]
    seen, free = list[Any](), tmp_path / "free"

    def attempt(bench: Any, cell: Any) -> dict[str, Any]:
        seen.append(cell)
        if len(seen) == len(wanted):
            threading.Timer(0.2, free.touch).start()
        return {"ms": 1.0, "took_s": 0.1}

    monkeypatch.setattr(script, "cells", lambda probe: wanted)
    monkeypatch.setattr(script, "attempt", attempt)
    told = ["x", "--out", str(tmp_path / "out.json"), "--wait", str(free), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", told)
    script.main()
    assert [(cell.batch, cell.length) for cell in seen[:3]] == [(2, 8), (1, 4096), (1, 16384)]
    assert seen[3:] == wanted
    assert free.exists()


LOST: type[RuntimeError] = getattr(torch, "AcceleratorError", RuntimeError)  # since torch 2.8


def test_a_lost_gpu_is_a_row_and_no_exception(script: Any, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise LOST("an illegal memory access\nand what to do about it")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    bench = SimpleNamespace(device=torch.device("cuda"), measure=refuse)
    found = script.attempt(bench, script.Cell("train", "mala", 1, 8))
    assert (found["error"], found["lost"]) == ("the GPU was lost: an illegal memory access", 1)
    bench.measure = lambda cell: {"ms": 1.0}
    assert "ms" not in script.attempt(bench, script.Cell("train", "mala", 1, 8))


@pytest.mark.parametrize("waiting", [True, False])
def test_a_lost_gpu_ends_the_process_and_the_same_command_goes_on(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: bool
):
    monkeypatch.setattr(script, "cells", lambda probe: [script.Cell("train", "mala", 1, n) for n in (8, 16, 32)])
    losing, seen, out, free = {8: 1, 16: 9}, list[int](), tmp_path / "out.json", tmp_path / "free"

    def attempt(bench: Any, cell: Any) -> dict[str, Any]:
        seen.append(cell.length)
        losing[cell.length] = losing.get(cell.length, 0) - 1
        return {"error": "lost", "lost": 1, "took_s": 1} if losing[cell.length] >= 0 else {"ms": 1.0, "took_s": 1}

    def wait(seconds: float) -> None:
        free.touch()

    monkeypatch.setattr(script, "attempt", attempt)
    monkeypatch.setattr(script.time, "sleep", wait)
    told = ["x", "--out", str(out), "--probe", "--device", "cpu", *(["--wait", str(free)] if waiting else [])]
    monkeypatch.setattr(sys, "argv", told)
    codes = [script.main() for _ in range(4)]
    assert codes == [1, 1, 1, 0]
    rows = {row["length"]: row for row in json.loads(out.read_text())["rows"]}
    assert len(rows) == 3
    assert [rows[length].get("ms") for length in (8, 16, 32)] == [1.0, None, 1.0]
    assert rows[16]["lost"] == 2
    assert "lost" not in rows[8]
    assert seen[:2] == [8, 16]


@pytest.mark.parametrize("probe", [True, False])
def test_no_row_is_measured_twice(script: Any, probe: bool):
    every = list(script.cells(probe))
    assert len(every) == len(set(every))

"""A whole run: what is asked for is planned, every table comes out, and Ctrl-C keeps what was measured."""

import json
from typing import Any

import pytest
import torch

from affinear.bench import contenders, machine, ops, tables
from affinear.bench.cases import Case, Shape
from affinear.bench.contenders import Contender
from affinear.bench.measure import Clock
from affinear.bench.plan import TABLES, gpu_plan
from affinear.bench.rows import Report

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def quick_report() -> Report:
    plan = ops.prepare(hurry=True, seconds=0.002)
    report = ops.begin(plan)
    ops.run(plan, report)
    return report


def test_every_table_comes_out_and_reads_back(quick_report: Report):
    assert list(dict.fromkeys(row.table for row in quick_report.rows)) == list(TABLES)
    assert [row for row in quick_report.rows if row.status != "ok"] == []
    assert {row.mechanism for row in quick_report.rows if row.table == "mechanisms"} == {
        "mala",
        "nala",
        "inline",
        "linear",
    }
    assert {row.rotary for row in quick_report.rows if row.table == "rotary"} == {True, False}
    assert quick_report.copy_gb_per_s is not None
    assert quick_report.copy_gb_per_s > 0
    assert Report.from_json(ops.as_json(quick_report).decode()) == quick_report


def test_the_machine_is_described(quick_report: Report):
    content = json.loads(ops.as_json(quick_report))["machine"]
    for name in ("date", "command", "gpu", "driver", "cpu", "python", "torch", "triton", "affinear", "commit"):
        assert name in content
    assert content["torch"] == torch.__version__


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch):
    plan = ops.prepare(hurry=True, seconds=0.002, only="non-causal,causal")
    calls: list[str] = []

    def two_rows_and_then(table: str, plan, told):
        for number, row in enumerate(original(table, plan, told)):
            calls.append(table)
            if number == 2:
                raise KeyboardInterrupt
            yield row

    original = tables.rows
    monkeypatch.setattr(tables, "rows", two_rows_and_then)
    report, finished = ops.begin(plan), []
    ops.run(plan, report, finished=finished.append)
    assert report.interrupted
    assert len(report.rows) == 2
    assert finished == [ops.COPY, "non-causal"]
    assert {*calls} == {"non-causal"}
    assert Report.from_json(ops.as_json(report).decode()).interrupted


def test_a_wrong_rival_and_a_failing_one_are_rows_among_the_others(monkeypatch: pytest.MonkeyPatch):
    def everybody(case: Case, device: torch.device, *, slow_starters: bool = False) -> list[Contender]:
        def failing(q, k, v):
            raise ValueError("mechanism: not mine")

        wrong = Contender("wrong one", lambda q, k, v: v + 0 * (q + k))
        return [wrong, Contender("failing one", failing), *contenders.library(case, device)]

    monkeypatch.setattr(tables, "contenders", everybody)
    plan = ops.prepare(hurry=True, seconds=0.002, only="non-causal")
    report = ops.begin(plan)
    ops.run(plan, report)
    found = {(row.contender, row.status, row.ms is None) for row in report.rows}
    assert found == {("wrong one", "wrong", True), ("failing one", "failed", True), ("affinear torch", "ok", False)}


def test_own_shapes_are_measured_in_their_own_table():
    plan = ops.prepare(["1,2,30,8", "1,1,9,8"])
    assert plan.tables == ("non-causal",)
    assert plan.full == (Shape(1, 2, 30, 8), Shape(1, 1, 9, 8))
    plan = ops.prepare(["1,2,30,8"], causal=True)
    assert (plan.tables, plan.causal) == (("causal",), (Shape(1, 2, 30, 8),))
    plan = ops.prepare(["1,2,30,8"], only="rotary,mechanisms")
    assert plan.tables == ("rotary", "mechanisms")
    assert plan.rotary == plan.mechanisms == (Shape(1, 2, 30, 8),)


def test_tables_are_chosen_by_name_and_kept_in_order():
    assert ops.prepare(only="decode, causal").tables == ("causal", "decode")
    assert ops.prepare(causal=True).tables == ("causal",)
    assert ops.prepare().tables == TABLES


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"only": "causal,none"}, "only: expected one of non-causal, causal, .*, got 'none'"),
        ({"mechanism": "softmux"}, "mechanism: expected one of .*, got 'softmux'"),
        ({"dtype": "int8"}, "dtype: expected one of bfloat16, float16, float32, got 'int8'"),
        ({"shapes": ["1,2"]}, "shape: expected four positive numbers B,H,N,D, got '1,2'"),
    ],
)
def test_a_name_that_is_none_is_refused(asked: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        ops.prepare(**asked)


def test_the_gpu_has_the_shapes_of_the_bars():
    plan = gpu_plan(Clock(CPU, 1.0))
    assert [str(shape) for shape in plan.full] == [
        "64,1,16384,64",
        "1,16,131072,64",
        "2,16,65536,96",
        "4,16,16384,128",
        "128,1,3136,64",
        "128,2,784,64",
        "128,3,196,64",
    ]
    assert [str(shape) for shape in plan.causal] == ["8,16,4096,64", "4,16,16384,128"]
    assert (plan.lengths[0], plan.lengths[-1]) == (64, 2**20)
    assert plan.dtype == torch.bfloat16


def test_those_who_take_part():
    case = Case(Shape(1, 1, 8, 4), torch.float32)
    names = [one.name for one in contenders.contenders(case, CPU, slow_starters=True)]
    assert names == ["affinear torch", "compiled torch", "SDPA"]


def test_a_copy_counts_every_byte_twice():
    speed, times = machine.copy_bandwidth(CPU, 0.002, 2**20)
    assert speed == pytest.approx(2 * 2**20 / (1e-3 * times.median) / 1e9)

"""Networks at work: what is asked for is planned, every network gets a row or a reason, and Ctrl-C keeps the rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from rich.console import Console

from affinear.bench import models, models_report, timing
from affinear.bench.models_plan import COMPARED_WITH, GPU_MODELS, Cell, baseline_of
from affinear.bench.models_report import ModelReport, ModelRow
from affinear.bench.timing import collect
from affinear.models import dit
from affinear.models.speech import conformer

CPU, GPU = torch.device("cpu"), torch.device("cuda")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OURS, BASELINE = "inline_deit_tiny", "deit_tiny_patch16_224"
SQUARE = models.Images(224, 224, 128)


def row(ms: float | None = None, **changed: Any) -> ModelRow:
    fields: dict[str, Any] = {
        "model": "mavit_tiny",
        "baseline": "deit_small_patch16_224",
        "images": SQUARE,
        "direction": "inference",
        "way": "compiled",
        "step": None if ms is None else collect([ms]),
        "error": "" if ms is not None else "Out of memory with a batch of 128; a smaller one may fit.",
    }
    return ModelRow(**fields | changed)


def made_up(*rows: ModelRow, gpu: str | None = "NVIDIA H200", dtype: str = "bfloat16") -> ModelReport:
    settings = {"dtype": dtype, "channels_last": True}
    return ModelReport({"gpu": gpu, "cpu": "a processor"}, {"torch": "0", "timm": "0"}, settings, list(rows))


def printed(*parts: object) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return captured.get()


class Small(torch.nn.Module):
    """Stands in for a network where only what happens around it counts."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.head, self.scale = torch.nn.Linear(3, 1000), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.head(x.mean((2, 3)))


def measured(create: Callable[[str, models.Images], torch.nn.Module], **asked: Any) -> ModelReport:
    usual: dict[str, Any] = {"models": [OURS], "sizes": ["32x32"], "quick": True, "seconds": 0.001}
    plan, report = models.prepare(**usual | asked), made_up(gpu=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "create", create)
        models.run(plan, report)
    return report


@pytest.fixture(autouse=True, scope="module")
def processor() -> Iterator[None]:
    """Where nothing else is said, there is no GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield


@pytest.fixture(scope="module")
def quick_report() -> ModelReport:
    plan = models.prepare(quick=True, seconds=0.002)
    report = models.begin(plan)
    models.run(plan, report)
    return report


# --- the plan


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            {"models": ["mavit_tinny"]},
            "model: expected a name .* registers, got 'mavit_tinny'; try mavit_tiny",
        ),
        ({"models": ["???"]}, r"model: expected .*, got '\?\?\?'; timm.list_models"),
        ({"sizes": ["big"]}, "size: expected a side such as 224, or HxW, .*, got 'big'"),
        ({"sizes": ["0x32"]}, "size: expected a side such as 224, or HxW, .*, got '0x32'"),
        ({"batch": [0]}, "batch: expected a positive number, got 0"),
        ({"sizes": ["32x32"], "batch": [1, 2]}, "batch: expected one number, or 1, one for each size, got 2"),
        ({"dtype": "int8"}, "dtype: expected one of bfloat16, float32, got 'int8'"),
        ({"only": "training,graph"}, "only: expected one of inference, .*, compiled, graphed, got 'graph'"),
        ({"only": "compiled", "compiled": False}, "only: expected no 'compiled' or 'graphed' where compiled is False"),
        ({"only": "graphed"}, "only: expected no 'graphed' without a GPU, got it; take 'compiled'"),
        ({"seconds": -1.0}, "seconds: expected a positive number, got -1.0"),
    ],
)
def test_what_cannot_be_measured_is_refused(asked: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        models.prepare(**asked)


def test_a_processor_has_small_batches_and_does_not_compile():
    plan = models.prepare()
    assert [str(images) for images in plan.sizes] == ["2 images of 224x224", "1 images of 512x2048"]
    assert (plan.ways, plan.directions) == (("eager",), ("inference", "training"))
    assert (plan.dtype, plan.channels_last) == (torch.float32, False)
    assert models.prepare(compiled=True).ways == ("eager", "compiled")


def test_a_gpu_has_the_batches_of_the_bars_and_every_family(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan = models.prepare()
    assert (plan.clock.device, plan.models) == (GPU, GPU_MODELS)
    assert plan.sizes == (SQUARE, models.Images(512, 2048, 4))
    assert (plan.ways, plan.directions) == (("eager", "compiled", "graphed"), ("inference", "training"))
    assert (plan.dtype, plan.channels_last) == (torch.bfloat16, True)
    assert models.prepare(quick=True).ways == ("eager",)


def test_modes_are_chosen_by_name():
    plan = models.prepare(only="compiled, inference")
    assert (plan.directions, plan.ways) == (("inference",), ("compiled",))


def test_one_batch_is_for_all_sizes_and_several_are_for_one_each():
    assert [images.batch for images in models.prepare(batch=[3]).sizes] == [3, 3]
    assert [images.batch for images in models.prepare(sizes=["8x8", "9x9"], batch=[3, 4]).sizes] == [3, 4]
    assert [images.batch for images in models.prepare(sizes=["224x224", "4096x4096"]).sizes] == [2, 1]


def test_every_classifier_of_ours_has_a_baseline_that_timm_has():
    modules = {name: timm.model_entrypoint(name).__module__ for name in timm.list_models()}
    ours = {name for name, module in modules.items() if module.startswith("affinear.models")}
    assert {name for name in ours - dit.SIZES.keys() - conformer.SIZES.keys() if baseline_of(name) is None} == set()
    assert {name for name in COMPARED_WITH.values() if not timm.is_model(name)} == set()


def test_networks_of_one_baseline_take_turns_with_it_once():
    plan = models.prepare(["mavit_tiny", OURS, "deit_small_patch16_224", "mavit_tiny_linear", "pvt_v2_b0"])
    assert plan.groups == (
        ("mavit_tiny", "deit_small_patch16_224", "mavit_tiny_linear"),
        (OURS, BASELINE),
        ("pvt_v2_b0",),
    )


# --- a run


def test_a_quick_run_has_a_row_for_network_and_baseline_in_both_directions(quick_report: ModelReport):
    rows = quick_report.rows
    assert [(row.model, row.direction, row.way) for row in rows] == [
        (OURS, "inference", "eager"),
        (BASELINE, "inference", "eager"),
        (OURS, "training", "eager"),
        (BASELINE, "training", "eager"),
    ]
    assert [row.error for row in rows] == [""] * 4
    assert [row.peak for row in rows] == [None] * 4
    assert all(row.parameters and row.first_call_s and row.images_per_s for row in rows)
    assert not quick_report.interrupted


def test_the_ratio_is_to_the_baseline_at_the_same_work(quick_report: ModelReport):
    inference, baseline, training, _ = quick_report.rows
    assert inference.images_per_s is not None
    assert baseline.images_per_s is not None
    assert quick_report.ratio(inference) == inference.images_per_s / baseline.images_per_s
    assert quick_report.ratio(training) != quick_report.ratio(inference)
    assert quick_report.ratio(baseline) is None


def test_the_file_reads_back_and_names_machine_and_versions(quick_report: ModelReport):
    written = models.as_json(quick_report)
    assert ModelReport.from_json(written) == quick_report
    assert models.as_json(ModelReport.from_json(written)) == written
    content = json.loads(written)
    assert list(content)[:4] == ["format", "machine", "versions", "settings"]
    assert content["versions"]["timm"] == timm.__version__
    assert content["settings"]["sizes"] == [{"height": 64, "width": 64, "batch": 2}]
    assert content["rows"][0]["ratio"] == quick_report.ratio(quick_report.rows[0])
    with pytest.raises(ValueError, match="format: expected 1, got 2"):
        ModelReport.from_json('{"format": 2}')


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (AssertionError("Input height (48) is odd."), "It cannot run: Input height (48) is odd (AssertionError)."),
        (ZeroDivisionError(), "It cannot run: ZeroDivisionError."),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB\nand so on"),
            "Out of memory with a batch of 2; a smaller one may fit.",
        ),
        (
            RuntimeError("backend failed:\nCUDA out of memory"),
            "Out of memory with a batch of 2; a smaller one may fit.",
        ),
    ],
)
def test_a_network_that_cannot_take_a_size_says_why_and_the_others_go_on(error: Exception, sentence: str):
    def create(name: str, images: models.Images) -> torch.nn.Module:
        if name == BASELINE and images.height == 48:
            raise error
        return Small()

    report = measured(create, sizes=["48x48", "32x32"], batch=[2], only="inference")
    assert [row.error for row in report.rows] == ["", sentence, "", ""]
    assert [row.step is None for row in report.rows] == [False, True, False, False]
    assert [report.ratio(row) is None for row in report.rows] == [True, True, False, True]
    assert sentence in printed(*models_report.summary(report))


def test_a_network_that_failed_is_not_tried_again():
    plan = models.prepare([OURS], quick=True)
    entrant, tries = models.Entrant(OURS, plan.cells[0], plan), list[int]()

    def fail() -> None:
        tries.append(1)
        raise RuntimeError("tired")

    for _ in range(3):
        entrant.attempt(fail)
    assert len(tries) == 1
    assert entrant.row().error == "It cannot run: tired (RuntimeError)."


def test_a_network_that_gives_no_numbers_has_no_times():
    report = measured(lambda name, images: Small(scale=float("nan")), only="inference")
    assert {row.error for row in report.rows} == {"It cannot run: its result is not finite (ArithmeticError)."}


def test_ctrl_c_keeps_the_rows_and_shows_them(monkeypatch: pytest.MonkeyPatch):
    def then_stop(cell: Cell, plan: models.ModelPlan, told: Callable[[str], None]) -> list[ModelRow]:
        if "mavit_tiny" in cell.names:
            raise KeyboardInterrupt
        return [row(1.0, model=name, images=cell.images) for name in cell.names]

    monkeypatch.setattr(models, "measure", then_stop)
    plan, report, seen = models.prepare([OURS, "mavit_tiny"], quick=True), made_up(gpu=None), list[str]()
    models.run(plan, report, finished=lambda images, direction: seen.append(direction))
    assert report.interrupted
    assert [row.model for row in report.rows] == [OURS, BASELINE]
    assert seen == ["inference"]
    assert ModelReport.from_json(models.as_json(report)).interrupted
    assert "Interrupted after 2 rows." in printed(*models_report.summary(report))


def test_networks_take_turns(monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []
    monkeypatch.setattr(models.Entrant, "start", lambda self: seen.append(f"start {self.name}"))
    monkeypatch.setattr(models.Entrant, "take_turn", lambda self: seen.append(self.name) or self.samples.append(1.0))
    plan = replace(models.prepare([OURS], quick=True, only="inference"), turns=3)
    models.measure(plan.cells[0], plan)
    assert seen == [f"start {OURS}", f"start {BASELINE}", *[OURS, BASELINE] * 3]


def test_somebody_watching_sees_progress_and_tables_and_every_row_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "create", lambda name, images: Small())
    plan = models.prepare([OURS], quick=True)
    report, kept = models.begin(plan), list[bytes]()
    page, margin = Console(width=200), Console(width=200)
    with page.capture() as shown, margin.capture() as beside:
        models.watch(plan, report, page, margin, kept.append)
    assert ModelReport.from_json(kept[-1]).rows == report.rows
    assert len(kept) == 4
    assert "Inference, 2 images of 64x64" in shown.get()
    assert "Training, 2 images of 64x64" in shown.get()
    lines = beside.get().splitlines()
    assert [line.partition("row ")[2][:6] for line in lines] == ["1 of 4", "2 of 4", "3 of 4", "4 of 4"]
    assert lines[0].endswith(f"{OURS}, inference, eager, 2 images of 64x64")
    assert "left" in lines[1]


def test_a_compiled_network_is_compiled_whole_for_one_size_by_a_compiler_that_remembers_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[dict[str, Any]] = []
    resets: list[int] = []
    monkeypatch.setattr(torch, "compile", lambda network, **how: asked.append(how) or network)
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(len(asked)))
    report = measured(lambda name, images: Small(), only="compiled")
    assert [row.error for row in report.rows] == [""] * 4
    assert asked == [{"fullgraph": True, "dynamic": False, "mode": "default"}] * 4
    assert resets == [0, 2, 2, 4]


def test_a_training_step_moves_the_weights_and_leaves_no_gradients():
    plan = models.prepare([OURS], ["32x32"], [2], quick=True, only="training")
    work = models.Work.prepare(OURS, plan.cells[0], plan)
    weight = next(work.network.parameters())
    before = weight.clone()
    (loss,) = work.step()
    assert loss.shape == ()
    assert not torch.equal(weight, before)
    assert weight.grad is None
    weights = sum(x.nbytes for x in work.network.parameters())
    assert 3 * weights < work.resident < 3.1 * weights  # AdamW keeps two numbers for each


def test_autocast_is_on_for_bfloat16_only():
    seen: list[tuple[bool, bool]] = []

    def network(images: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_inference_mode_enabled()))
        return images

    for dtype in (torch.bfloat16, torch.float32):
        models.inference_step(network, torch.zeros(1), dtype)()
    assert seen == [(True, True), (False, True)]


def test_a_gpu_is_timed_between_events(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = -1.0

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def step() -> tuple[torch.Tensor, ...]:
        now[0] += 1 + now[0]
        return ()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    assert models.sample(step, GPU, 3) == [1.0, 2.0, 4.0]


@gpu
def test_on_a_gpu_rows_have_peaks_and_training_takes_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    plan = models.prepare([OURS], quick=True)
    report = models.begin(plan)
    models.run(plan, report)
    assert [row.error for row in report.rows] == [""] * 4
    inference, _, training, _ = (row.peak or 0 for row in report.rows)
    assert 4 * (report.rows[0].parameters or 0) < inference < training


# --- what is said about it


def test_images_per_second_are_those_of_the_median_step_and_quartiles_turn_around():
    one = row(8.0, step=collect([4.0, 8.0, 16.0]), peak=5_000_000)
    assert one.images_per_s == 16_000
    assert one.spread == (128e3 / 12, 128e3 / 6)
    assert one.peak_mb == 5


def test_bars_are_met_or_missed_by_so_many_percent():
    fast, slow = row(10.0), row(40.0, direction="training")
    report = made_up(fast, row(10.0, way="eager"), slow, row(1.0, model="mavit_small"))
    met, missed = models.verdicts(report)
    assert (met.row, met.bar, met.measured, met.met) == (0, 10200.0, 12800.0, True)
    assert met.percent == pytest.approx(100 * 2600 / 10200)
    assert (missed.row, missed.bar, missed.measured, missed.met) == (2, 3750.0, 3200.0, False)
    assert missed.percent == pytest.approx(-100 * 550 / 3750)
    assert missed.said == "at least 3,750 images/s: missed by 14.7 %, measured 3,200"
    said = printed(*models_report.summary(report))
    assert "mavit_tiny, inference, compiled, 128 images of 224x224: at least 10,200 images/s: met by 25.5 %" in said
    assert json.loads(models.as_json(report))["bars"][1]["met"] is False


def test_a_row_without_a_time_misses_its_bar():
    (verdict,) = models.verdicts(made_up(row()))
    assert (verdict.met, verdict.percent) == (False, None)
    assert verdict.said == "at least 10,200 images/s: missed, it could not be measured"


def test_bars_hold_for_one_card_one_dtype_and_one_batch():
    assert models.verdicts(made_up(row(1.0), gpu="NVIDIA A100")) == []
    assert models.verdicts(made_up(row(1.0), gpu=None)) == []
    assert models.verdicts(made_up(row(1.0), dtype="float32")) == []
    assert models.verdicts(made_up(row(1.0, images=replace(SQUARE, batch=64)))) == []


def test_there_is_a_table_for_every_size_and_direction():
    wide = models.Images(512, 2048, 4)
    report = made_up(row(1.0), row(1.0, direction="training"), row(2.0, images=wide))
    titles = [str(grid.title) for grid in models.table(report)]
    assert titles == [
        "Inference, 128 images of 224x224",
        "Training, 128 images of 224x224",
        "Inference, 4 images of 512x2048",
    ]
    assert [grid.title for grid in models.table(report, wide, "inference")] == [titles[2]]


def test_a_line_has_rate_time_peak_size_and_ratio():
    baseline = row(16.0, model="deit_small_patch16_224", baseline=None)
    line = row(10.0, peak=2_345_000_000, parameters=16_400_000, first_call_s=31.4)
    said = printed(*models.table(made_up(line, baseline)))
    for cell in ("12,800", "10.0", "2,345", "16.4 M", "31.4 s", "1.60 x", "bar met by 25.5 %"):
        assert cell in said


def test_networks_of_one_baseline_stand_between_lines():
    def named(model: str, baseline: str | None, way: str = "eager") -> ModelRow:
        return row(1.0, model=model, baseline=baseline, way=way)

    pairs = [named("a", "b"), named("b", None), named("c", "b"), named("d", "e"), named("e", None)]
    (grid,) = models.table(made_up(*pairs, named("a", "b", "compiled")))
    assert [line.end_section for line in grid.rows] == [False, False, True, False, True, False]

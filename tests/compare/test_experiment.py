"""A comparison: equal but for the attention, continued after any interruption, and honest about its seeds."""

from __future__ import annotations

import json
import signal
import sys
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import timm
from typer.testing import CliRunner

from affinear import cli
from affinear.compare import cells, experiment
from affinear.compare.cells import CELL, Cell, Outcome, run_cell
from affinear.compare.experiment import Comparison, parse_seeds, prepare, run
from affinear.compare.findings import Finding, conclude, findings, student, summarise
from affinear.compare.screen import Lines, Live, row
from affinear.compare.workers import run_cells
from affinear.tasks.classify import TASK
from affinear.train import Interrupted, Measure
from affinear.train.records import Record

QUICK = ("--mechanisms", "linear", "--set", "batch_size=48", "--limit", "96", "--quick", "--jobs", "0")
TINY: dict[str, Any] = {"limit": 96, "jobs": 0, "epochs": 1, "batch_size": 48}


def tiny(output: Path, *mechanisms: str, **changes: Any) -> Comparison:
    return prepare("digits", mechanisms=mechanisms or ["softmax", "mala+rotary"], output=output, **{**TINY, **changes})


def command(*arguments: str | Path) -> Any:
    return CliRunner().invoke(cli.build_app(), ["compare", *map(str, arguments)])


def count(plan: Comparison) -> int:
    network = timm.create_model(plan.model, **plan.cell("linear", 0).model_args)
    return sum(weight.numel() for weight in network.parameters())


def outcome(name: str, seed: int, value: float) -> Outcome:
    return Outcome(name, seed, value=value, parameters=5)


def judged(cells: list[Outcome], names: list[str], samples: int, metric: Measure = TASK.metric) -> list[Finding]:
    return findings(summarise(cells, names, metric), metric, samples)


def test_a_comparison_has_numbers_of_every_cell_and_does_not_train_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plan = tiny(tmp_path, "softmax", "softmax_normed", "mala+rotary", seeds=1)
    results = run(plan)
    told = json.loads((tmp_path / "results.json").read_text())
    assert [cell["variant"] for cell in told["cells"]] == list(plan.variants)
    by_name = {one.variant: one for one in results.outcomes}
    for name, one in by_name.items():
        assert not one.error
        assert 0 <= one.value <= 1
        assert len(one.curve) == 1
        assert one.per_second > 0
        assert one.step_memory > 12 * one.parameters  # weights, and two numbers of the optimizer for each
        assert len(one.attention.maps) == 4 * 3
        assert all(len(drawn.weights) == 16 and drawn.grid == (4, 4) for drawn in one.attention.maps)
        if name != "mala+rotary":
            assert one.attention.negative_share == 0
        assert one.attention.row_sum_error is not None
        assert one.attention.row_sum_error < 1e-3
    assert by_name["softmax_normed"].attention.norm_correlation is None
    assert by_name["softmax"].attention.norm_correlation is not None
    assert by_name["mala+rotary"].attention.negative_share != 0
    assert len({one.parameters for one in by_name.values()}) == 1
    assert "mala+rotary" in (tmp_path / "report.html").read_text()

    def never(*given: Any, **options: Any) -> Outcome:
        raise AssertionError("a cell that is through was trained again")

    monkeypatch.setattr(experiment, "run_cell", never)
    by_title = {one.variant: one for one in run(plan).outcomes}
    assert by_title == by_name
    assert run(tiny(tmp_path, "mala+rotary", seeds=1)).outcomes == (by_name["mala+rotary"],)


def test_an_interrupted_cell_goes_on_and_ends_as_if_nothing_had_happened(tmp_path: Path):
    whole, halves = (tiny(tmp_path / name, "mala", seeds=[3], epochs=2) for name in ("whole", "halves"))
    expected = run(whole).outcomes[0]

    def interrupt(record: Record) -> None:
        raise Interrupted("stopped", signal.SIGINT)

    experiment.enter(halves)
    with pytest.raises(Interrupted):
        run_cell(halves.cells[0], interrupt, halves.opened)
    assert not (halves.cells[0].folder / CELL).exists()
    found = run(halves).outcomes[0]
    assert (found.value, found.attention) == (expected.value, expected.attention)
    assert [record.train_loss for record in found.curve] == [record.train_loss for record in expected.curve]


def test_variants_with_one_attention_are_one_network(tmp_path: Path):
    """`mala_released` without rotary positions is `mala` but for 1e-6: same weights, same batches, same losses."""
    first, second = run(tiny(tmp_path, "mala", "mala_released", seeds=1)).outcomes
    assert first.curve[0].train_loss == pytest.approx(second.curve[0].train_loss, abs=1e-3)


def test_a_cell_that_fails_leaves_the_others_and_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train = cells.train

    def fail(given: Any, **options: Any) -> Any:
        if given.model_args["mechanism"] == "linear":
            raise ArithmeticError("The loss of step 2 is not finite\nand more")
        return train(given, **options)

    monkeypatch.setattr(cells, "train", fail)
    plan = tiny(tmp_path, "linear", "softmax", seeds=1)
    results = run(plan)
    assert [one.error for one in results.outcomes] == ["The loss of step 2 is not finite", ""]
    told = experiment.conclusions(results)
    assert row(told.summaries[0], TASK)[1] == "failed"
    assert "linear, seed 0 failed: The loss of step 2 is not finite" in told.limits
    monkeypatch.undo()
    assert not any(one.error for one in run(plan).outcomes)


def test_a_folder_of_something_else_is_refused_with_the_differences(tmp_path: Path):
    experiment.enter(tiny(tmp_path / "a"))
    experiment.enter(tiny(tmp_path / "a", "nala", seeds=5))  # more of the same comparison
    with pytest.raises(
        ValueError, match=r"another comparison: limit is 96 there and 50 now.*epochs is 1 there and 4 now"
    ):
        experiment.enter(tiny(tmp_path / "a", limit=50, epochs=4))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds other files and no comparison"):
        experiment.enter(tiny(tmp_path / "b"))
    (tmp_path / "a" / experiment.PLAN).write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        experiment.enter(tiny(tmp_path / "a"))


def test_networks_that_are_no_trunk_keep_their_positions(tmp_path: Path):
    assert prepare(model="inline_deit_tiny", **TINY).variants == ("softmax", "linear", "inline", "nala", "mala")
    assert prepare(model="resnet10t", **TINY).variants == ("own",)
    with pytest.raises(ValueError, match="its positions are its own"):
        prepare(model="inline_deit_tiny", mechanisms=["mala+rotary"], **TINY)
    with pytest.raises(ValueError, match="can be trained as it is only"):
        prepare(model="resnet10t", mechanisms=["mala"], **TINY)


def test_networks_are_made_with_what_is_asked_for(tmp_path: Path):
    result = command(*QUICK, "--output", tmp_path, "--model-arg", "depth=1", "--model-arg", "init-std=0.02")
    assert result.exit_code == 0, result.output
    one = Outcome.read(tmp_path / experiment.CELLS / "linear-seed0" / CELL)
    assert one is not None
    assert one.parameters == count(prepare("digits", model_args={"depth": 1}, **TINY))
    assert one.parameters < count(prepare("digits", **TINY))
    assert "affinear_trunk_micro, depth=1, init_std=0.02" in (tmp_path / experiment.REPORT).read_text()
    with pytest.raises(ValueError, match=r"another comparison: model_args is .*depth"):
        experiment.enter(tiny(tmp_path, epochs=experiment.QUICK_EPOCHS))


TRUNKS = "affinear_trunk_micro,affinear_trunk_cifar"


def test_whole_networks_are_compared_as_they_are(tmp_path: Path):
    size = ("--model-arg", "depth=1", "--model-arg", "embed_dim=32", "--model-arg", "num_heads=2")
    options = ("--set", "batch_size=48", "--limit", "96", "--quick", "--jobs", "0", "--output", tmp_path, *size)
    result = command("--model", TRUNKS, *options)
    assert result.exit_code == 0, result.output
    assert "GMACs" in result.output
    assert "below" not in result.output
    told = json.loads((tmp_path / "results.json").read_text())
    assert told["comparison"]["variants"] == TRUNKS.split(",")
    first, second = told["cells"]
    assert first["parameters"] != second["parameters"]
    assert 0 < first["macs"] < second["macs"]  # micro's images are of one size with the other's, its MLP is smaller
    page = (tmp_path / experiment.REPORT).read_text()
    assert "<h1>Networks compared on" in page
    assert "GMACs" in page
    # More networks may join, and one that is there already is not trained again.
    more = prepare(
        "digits", f"{TRUNKS},inline_deit_tiny", seeds=1, output=tmp_path, limit=96, jobs=0, epochs=2, batch_size=48,
        model_args={"depth": 1, "embed_dim": 32, "num_heads": 2},
    )  # fmt: skip
    experiment.enter(more)
    assert [Outcome.read(cell.folder / CELL) is not None for cell in more.cells] == [True, True, False]


def test_whole_networks_see_images_of_one_size_that_all_can_take():
    plan = prepare(model="mavit_tiny,secvit_tiny,resnet10t", **TINY)
    assert plan.variants == plan.networks == ("mavit_tiny", "secvit_tiny", "resnet10t")
    settings: Any = plan.setup.settings
    assert settings.image_size == (32, 32)
    assert settings.mean is not None
    assert all(cell.setup.settings == settings for cell in plan.cells)
    assert [cell.model for cell in plan.cells[:3]] == list(plan.networks)
    with pytest.raises(
        ValueError, match=r"model: secvit_tiny does not take images of 40 x 40 pixels .*; set image_size"
    ):
        prepare(model="mavit_tiny,secvit_tiny", image_size=(40, 40), **TINY)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": TRUNKS, "mechanisms": ["mala"]}, "mechanisms: expected none beside several networks, .* got mala"),
        ({"model": f"{TRUNKS},mavit_tini"}, "mavit_tiny"),
        ({"model": f"{TRUNKS},"}, "model"),
        ({"model": TRUNKS, "model_args": {"dept": 6}}, "dept"),
        ({"mechanisms": ["mela"]}, "mechanism: expected one of"),
        ({"mechanisms": ["softmax", "mela"]}, "mechanism: expected one of"),
        ({"mechanisms": [""]}, "mechanisms: expected names"),
        ({"seeds": 0}, "seeds: expected"),
        ({"seeds": 99999999999999999999}, "seeds: expected from 1 to 10000, got 99999999999999999999"),
        ({"seeds": [2**63]}, "seeds: expected up to 10000 seeds from 0"),
        ({"epochs": "x"}, "epochs: expected a whole number of at least 1, got 'x'"),
        ({"model_args": {"num_heads": 0}}, "affinear_trunk_micro cannot be made with .*num_heads=0"),
        ({"model": "affinear_trunk_mikro"}, "affinear_trunk_micro"),
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"limit": 0}, "limit: expected at least one"),
        ({"data": "nowhere"}, "data: expected digits"),
        ({"model_args": {"dept": 6}}, "dept"),
        ({"model_args": {"mechanism": "mala"}}, "mechanism is what is compared"),
    ],
)
def test_bad_input_gets_a_sentence_before_any_work(given: dict[str, Any], sentence: str):
    with pytest.raises(ValueError, match=sentence):
        prepare(**{**TINY, **given})


def test_seeds_are_a_number_or_a_list():
    assert parse_seeds("3") == 3
    assert parse_seeds("0, 4") == [0, 4]
    for text in ("", "a", "1,b", "-1", ",1"):
        with pytest.raises(ValueError, match="seeds: expected how many"):
            parse_seeds(text)


def test_seeds_that_disagree_decide_nothing_and_seeds_that_agree_do():
    cells = [outcome("mala", s, t) for s, t in enumerate((0.90, 0.91, 0.92))]
    cells += [outcome("linear", s, t) for s, t in enumerate((0.915, 0.90, 0.92))]
    cells += [outcome("softmax", s, t) for s, t in enumerate((0.80, 0.81, 0.82))]
    found = {(one.first, one.second): one for one in judged(cells, ["softmax", "linear", "mala"], 10_000)}
    same, better = found["mala", "linear"], found["mala", "softmax"]
    assert not same.decided
    assert "three seeds cannot decide" in same.sentence
    assert better.decided
    assert better.difference == pytest.approx(10)
    assert better.sentence.startswith("mala is better than softmax by 10.0 points")
    few = judged(cells, ["softmax", "mala"], 20)[0]
    assert not few.decided  # the same accuracies over twenty images


def test_where_less_is_better_less_wins():
    words = Measure("wer", "WER", higher_is_better=False, form=".2f")
    cells = [outcome("mala", s, t) for s, t in enumerate((5.0, 5.1, 5.2))]
    cells += [outcome("linear", s, t) for s, t in enumerate((9.0, 9.1, 9.2))]
    found = judged(cells, ["linear", "mala"], 10, words)[0]
    assert found.decided
    assert found.sentence.startswith("mala is better than linear by 4.00 WER;")


def test_two_seeds_that_agree_by_chance_do_not_decide():
    cells = [
        outcome("mala", 0, 0.95),
        outcome("mala", 1, 0.95),
        outcome("linear", 0, 0.947),
        outcome("linear", 1, 0.947),
    ]
    found = judged(cells, ["linear", "mala"], 360)[0]
    assert found.spread == 0
    assert not found.decided


def test_one_seed_says_so():
    told = conclude([outcome("mala", 0, 0.9), outcome("linear", 0, 0.5)], ["mala", "linear"], TASK, 100)
    assert told.summaries[0].spread is None
    assert not told.findings[0].decided
    assert "one seed" in told.findings[0].sentence
    assert any("One seed has no spread" in sentence for sentence in told.limits)
    assert student(2) == 12.71
    assert student(100) == 2.0


def test_the_screens_say_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from rich.console import Console

    plan = tiny(tmp_path)
    record = Record(1, 2, 1.0, 1e-3, 1.0, 10.0, {"top1": 0.5})
    for screen in (Lines(), Live(Console(file=sys.stderr, force_terminal=True))):
        screen.begin(plan.variants, plan.seeds, 2, [], TASK.metric)
        screen.started(plan.cells[0])
        screen.epoch(plan.cells[0], record)
        assert "0 of 4 cells, about" in screen.progress()
        if isinstance(screen, Live):
            assert screen.table().row_count == 2
        screen.finished(outcome("softmax", 0, 0.5))
        screen.finished(Outcome("mala+rotary", 0, error="it broke"))
        screen.end()
    said = capsys.readouterr().err
    assert "softmax, seed 0: 50.0 %" in said
    assert "failed: it broke" in said


def test_the_command_prints_the_table_and_the_report(tmp_path: Path):
    result = command("--output", tmp_path / "a", *QUICK)
    assert result.exit_code == 0, result.output
    assert "linear" in result.output
    assert "One seed has no spread" in result.output
    assert f"Report: {tmp_path / 'a' / 'report.html'}" in result.output.replace("\n", "")
    again = command("--output", tmp_path / "a", *QUICK, "--set", "lr=0.1")
    assert again.exit_code == 1
    assert "recipe.lr is 0.004 there and 0.1 now" in again.output


def test_the_command_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(*given: Any) -> Outcome:
        raise Interrupted("stopped", signal.SIGINT)

    monkeypatch.setattr(experiment, "run_cell", stop)
    result = command("--output", tmp_path / "a", *QUICK)
    assert result.exit_code == 130
    told = "Stopped after 0 of 1 cells; of the others nothing is saved yet. The same command goes on."
    assert told in result.output.replace("\n", " ")


def test_a_bad_option_gets_one_line(tmp_path: Path):
    for options in (["--seeds", "x"], ["--mechanisms", "mela"], ["--data", str(tmp_path / "nowhere")]):
        result = command(*options)
        assert result.exit_code == 1
        assert result.output.count("\n") == 1


def test_processes_are_saved_when_stopped_and_a_dead_one_is_told(tmp_path: Path):
    plan = tiny(tmp_path, "linear", "mala", epochs=1000, seeds=1, jobs=2)
    outcomes: list[Outcome] = []

    def listen(cell: Cell, record: Record) -> None:
        # The first to speak is killed; once the other has spoken twice, Ctrl-C comes.
        if not killed:
            killed.append(cell.variant)
            process = next(one for one in active_children() if one.name == cell.title)
            process.kill()
        elif cell.variant not in killed and record.epoch > 1:
            raise KeyboardInterrupt

    killed: list[str] = []
    assert not run_cells(plan.cells, 2, lambda cell: None, listen, outcomes.append)
    assert [(one.variant, one.error.split(";")[0]) for one in outcomes] == [
        (killed[0], "its process ended with code -9")
    ]
    left = next(cell for cell in plan.cells if cell.variant != killed[0])
    assert list((left.folder / "run").glob("step-*"))
    assert not any(child.name.endswith("seed 0") for child in active_children())


def test_a_dry_run_tells_what_would_be_trained_and_writes_nothing(tmp_path: Path):
    words = ("--dry-run", "--mechanisms", "linear,mala_layer", "--seeds", "3", "--epochs", "7")
    result = command("--output", tmp_path / "a", *words)
    assert result.exit_code == 0, result.output
    for said in (
        "6: 2 variants, 3 seeds; 0 are through",
        "7 epochs in batches of 96",
        "linear",
        "M parameters",
        "GMACs",
    ):
        assert said in result.output
    assert not (tmp_path / "a").exists()

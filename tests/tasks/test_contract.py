"""What the engine promises holds for every task: one suite, over all that are registered.

A task joins with a file `tiny.py` in its folder of tests: MODEL, MODEL_ARGS, CHANGES, and the functions data, wrong and
sources, as those of classification have them. WITHOUT_CHANCE are changes that turn off what each process draws for
itself on the device, and SAME_IN_TWO = False says that two processes cannot train what one does: batch norms.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import signal
import socket
import traceback
import warnings
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from safetensors.torch import load_file
from typer.testing import CliRunner

from affinear import tasks
from affinear.cli import build_app
from affinear.train import Progress, Recipe, Result, Run, checkpoint, curves, train
from affinear.train.records import read_log
from affinear.train.task import Job

STEPS = 3
LENGTH: dict[str, Any] = {"steps": STEPS, "eval_steps": 2, "save_every": 1, "log_every": 1, "workers": 0}


class Tiny:
    """A task as small as it goes, with data of its own.

    Args:
        name: Of the task.
        folder: For the data.
    """

    def __init__(self, name: str, folder: Path) -> None:
        place = Path(__file__).parent / name / "tiny.py"
        assert place.is_file(), f"the task {name} has no {place}, which makes it small enough for this suite"
        spec = importlib.util.spec_from_file_location(f"tiny_{name}", place)
        assert spec is not None
        assert spec.loader is not None
        self.made: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.made)
        self.task, self.folder = tasks.find(name), folder
        (folder / "data").mkdir()
        self.spec: str = self.made.data(folder / "data")

    def run(self, output: Path, **changes: Any) -> Run:
        """Three steps, saved after each, evaluated after two and at the end."""
        setup = tasks.recipe_for(self.task, self.made.MODEL, **{**LENGTH, **self.made.CHANGES, **changes})
        return Run(self.made.MODEL, self.spec, output, setup, self.made.MODEL_ARGS)


@pytest.fixture(scope="module", params=tasks.names())
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw", lambda output, *given: (output / curves.NAME).write_bytes(b""))  # takes seconds
        yield Tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def whole(tiny: Tiny) -> Result:
    """A run that nothing happened to."""
    return train(tiny.run(tiny.folder / "whole"))


def in_children(works: list[Callable[[], Any]]) -> list[int]:
    """Do each work in a process of its own, at the same time, and say how they ended: negative for a signal."""
    children: list[int] = []
    for work in works:
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)  # threads of the parent are not there
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


class Bomb(Progress):
    """Kills its own process after some step."""

    def __init__(self, step: int) -> None:
        self.last = step

    def step(self, step: int, loss: float, amount: float) -> None:
        if step == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("seconds", "per_second")}


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    """All that a run ended with: weights, averages, the best and the last."""
    found = checkpoint.latest(output)
    assert found is not None
    files = [*found.glob("*.safetensors"), output / checkpoint.BEST, output / checkpoint.LAST]
    return {f"{path.name} {name}": tensor for path in files for name, tensor in load_file(path).items()}


def test_it_says_what_it_is(tiny: Tiny):
    task = tiny.task
    assert task.metric in task.measures
    assert len({measure.name for measure in task.measures}) == len(task.measures)
    assert task.about
    assert set(Recipe.names()).isdisjoint(task.settings.names())
    for kind in (task.settings, task.options):
        assert list(kind.checks) == list(kind.names())
        assert all(f"        {name}: " in (kind.__doc__ or "") for name in kind.names())
    for name, setup in task.recipes.items():
        assert setup.task is task
        assert tasks.read_setup(setup.to_json()) == setup, name
        assert tasks.recipe_for(task, tiny.made.MODEL, name).recipe.lr > 0
    with pytest.raises(ValueError, match="recipe: expected one of"):
        tasks.recipe_for(task, tiny.made.MODEL, "no such recipe")


MOMENTS = [
    pytest.param([1], id="once"),
    pytest.param(list(range(1, STEPS)), id="after each", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("moments", MOMENTS)
def test_three_steps_killed_and_resumed_end_with_the_same_bits(tiny: Tiny, whole: Result, moments: list[int]):
    torn = tiny.run(tiny.folder / f"torn {len(moments)}")
    for moment in moments:
        assert in_children([lambda: train(torn, progress=Bomb(moment))]) == [-signal.SIGKILL]  # noqa: B023
    result = train(torn)
    expected, found = weights_of(whole.weights.parent), weights_of(torn.output)
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert [timeless(line) for line in read_log(torn.output)] == [
        timeless(line) for line in read_log(whole.weights.parent)
    ]
    assert (result.score, result.best, result.best_step) == (whole.score, whole.best, whole.best_step)


def test_a_run_ends_with_a_score_in_its_own_numbers(tiny: Tiny, whole: Result):
    assert whole.metric == tiny.task.metric.name
    assert {measure.name for measure in tiny.task.measures} <= whole.score.keys()
    assert [record.step for record in whole.records] == [2, 3]
    assert all(record.test is not None and record.per_second > 0 for record in whole.records)


def test_two_processes_train_what_one_does(tiny: Tiny):
    """Without what each process draws for itself on the device, which is not the same for one as for two."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plain = getattr(tiny.made, "WITHOUT_CHANCE", {})

    importlib.import_module("torch._dynamo")  # which every process would load for itself

    def one_of_two(rank: int) -> None:
        warnings.simplefilter("ignore")  # torch's advice about strides, which is an error to pytest
        PartialState._reset_state()
        there = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in there.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "1"})
        train(tiny.run(tiny.folder / "two", **plain))
        torch.distributed.destroy_process_group()

    assert in_children([lambda: one_of_two(0), lambda: one_of_two(1)]) == [0, 0]
    alone = train(tiny.run(tiny.folder / "one", **plain))
    lines = {name: read_log(tiny.folder / name) for name in ("one", "two")}
    assert len(lines["one"]) == len(lines["two"])
    test = [line["test"] for line in lines["two"] if line["kind"] == "epoch"]
    assert set(test[-1]) == set(alone.score)
    same = getattr(tiny.made, "SAME_IN_TWO", True)  # not where batch norms see half of a batch
    for one, two in zip(lines["one"], lines["two"], strict=True):
        assert one["step"] == two["step"]
        if same and one["kind"] == "epoch":  # a step's line is of the first process alone
            assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
            # A similarity is a sum of terms about one; where they cancel, rounding of 1e-6 is all that is left.
            assert two["test"] == pytest.approx(one["test"], rel=1e-3, abs=1e-5)
    # What two processes have judged together is what the first of them has saved.
    metric, best = tiny.task.metric, None
    for line in lines["two"]:
        for told in (line.get("test"), line.get("averaged")):
            if told is not None and metric.better(told[metric.name], best):
                best = told[metric.name]
    found = tasks.evaluate(tiny.folder / "two", tiny.spec, batch_size=2)
    assert found[metric.name] == pytest.approx(best, rel=1e-4, abs=1e-6)


def test_it_is_evaluated_as_it_was_when_it_was_trained(tiny: Tiny, whole: Result):
    found = tasks.evaluate(whole.weights.parent, tiny.spec, batch_size=2)
    assert found[whole.metric] == pytest.approx(whole.best, rel=1e-4, abs=1e-6)
    assert found.count > 0
    assert json.dumps({**found.numbers, "parts": [dict(part.numbers) for part in found.parts]})


def test_it_answers_what_it_can_and_says_what_it_cannot(tiny: Tiny, whole: Result, tmp_path: Path):
    trained = tasks.load_trained(whole.weights)
    good, bad = tiny.made.sources(tmp_path)
    answers = list(tiny.task.predict(trained, [*bad, *good], tiny.task.options()))
    assert [answer.source for answer in answers] == [*bad, *good]
    for answer in answers[: len(bad)]:
        assert answer.error
        assert "\n" not in answer.error
    for answer in answers[len(bad) :]:
        assert answer.error is None
        assert answer.text
        assert json.dumps(dict(answer.content))


def test_the_command_line_writes_what_it_answers_and_nothing_twice(tiny: Tiny, whole: Result, tmp_path: Path):
    (tmp_path / "asked").mkdir()
    good, bad = tiny.made.sources(tmp_path / "asked")
    command = ["predict", *good, "--weights", str(whole.weights), "--output", str(tmp_path / "drawn")]
    for _ in range(2):  # the same again leaves what is there
        answered = CliRunner().invoke(build_app(), command)
        assert answered.exit_code == 0, answered.output
        assert all(Path(source).name in answered.stdout or source in answered.stdout for source in good)
        written = {path.name: path.read_bytes() for path in (tmp_path / "drawn").glob("*")}
        trained = tasks.load_trained(whole.weights)
        answers = tiny.task.predict(trained, good, tiny.task.options())
        assert written == {name: content for answer in answers for name, content in answer.files.items()}
    if bad:
        refused = CliRunner().invoke(build_app(), [*command[:1], bad[0], *command[-4:]])
        assert refused.exit_code == 1
        assert "Traceback" not in refused.output
        assert not bad[0] or f"{bad[0]}: {bad[0]}" not in refused.output
        as_json = CliRunner().invoke(build_app(), [*command[:1], bad[0], *good, *command[-4:], "--json"])
        told = json.loads(as_json.stdout)
        assert told[0]["error"]
        assert [one["source"] for one in told] == [bad[0], *good]


# Something of every kind that a setting can be.
VALUES: tuple[Any, ...] = (
    *(True, False, 2, 3, 8, 77, 4096, 0.5, (64, 64), (2.0,), (2.0, 4.0, 8.0, 16.0, 32.0)),
    *("bytes", "bpe", "letters", "corpus", "recording", "flow", "ddpm", "nala", "learned", "own", "drop"),
    *("upernet", "semantic_fpn", "cascade", "rcnn", "batch", "layer", "2fc", "4conv1fc"),
)


def test_what_weights_were_trained_for_cannot_be_set_when_they_are_used(tiny: Tiny, whole: Result):
    settings = tasks.load_trained(whole.weights).job.settings
    for name in settings.bound:
        was = getattr(settings, name)
        others = [value for value in VALUES if value != was and settings.checks[name].good(value)]
        assert others, name
        with pytest.raises(ValueError, match=f"^{name}: expected .*, as the weights of .* were trained with"):
            tasks.load_trained(whole.weights, **{name: others[0]})
        assert tasks.load_trained(whole.weights, **{name: was}).job.settings == settings


class Page(HTMLParser):
    """A page, checked to be closed and to load nothing."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.text = list[str](), ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert all((value or "").startswith("data:") for name, value in attrs if name in ("src", "href"))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        self.text += data


def test_its_report_is_whole_and_loads_nothing(tiny: Tiny, whole: Result):
    text = whole.weights.with_name("report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert tiny.task.metric.title in page.text
    assert tiny.task.metric.shown(whole.score[whole.metric]) in page.text
    assert text.count("<h2>") > 1, "a task shows something beside the curves"
    assert not re.search(r"https?://|<script|@import", text)


def test_wrong_data_is_refused_in_a_sentence(tiny: Tiny, tmp_path: Path):
    (tmp_path / "wrong").mkdir()
    for spec in (tiny.made.wrong(tmp_path / "wrong"), str(tmp_path / "nowhere")):
        with pytest.raises(ValueError, match=r"^data: |wrong|nowhere") as refused:
            tiny.task.open(spec, tiny.task.settings())
        assert "\n" not in str(refused.value)


def test_other_data_does_not_continue_a_run(tiny: Tiny, whole: Result, tmp_path: Path):
    (tmp_path / "data").mkdir()
    settings = tiny.run(tmp_path).setup.settings
    one, other = tiny.task.open(tiny.spec, settings), tiny.task.open(tiny.made.data(tmp_path / "data"), settings)
    assert one.fingerprint == tiny.task.open(tiny.spec, settings).fingerprint
    assert one.fingerprint != other.fingerprint
    assert min(one.sizes) > 0


def test_samples_of_a_bad_batch_have_names_and_a_network_needs_no_data(tiny: Tiny, whole: Result):
    trained = tasks.load_trained(whole.weights)
    data = tiny.task.open(tiny.spec, trained.job.settings)
    work = tiny.task.work(trained.job, data, torch.device("cpu"))
    names = work.names([0, 1])
    assert len(names) == len(set(names)) == 2
    again = Job(trained.job.model, trained.job.model_args, trained.job.recipe, trained.job.settings, trained.job.facts)
    assert tiny.task.network(again).state_dict().keys() == trained.network.state_dict().keys()
    with pytest.raises(ValueError, match="room"):
        tiny.task.network(again, room=10)


def test_the_command_line_plans_it_and_measures_it(tiny: Tiny, whole: Result, tmp_path: Path):
    spelled = {**LENGTH, **tiny.made.CHANGES}
    settings = [
        f"--set={name}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in spelled.items()
    ]
    args = [
        f"--model-arg={k}={','.join(map(str, v)) if isinstance(v, tuple) else v}"
        for k, v in tiny.made.MODEL_ARGS.items()
    ]
    command = ["train", tiny.made.MODEL, "--task", tiny.task.name, "--data", tiny.spec, "--output", str(tmp_path / "a")]
    planned = CliRunner().invoke(build_app(), [*command, *settings, *args, "--dry-run"])
    assert planned.exit_code == 0, planned.output
    assert "memory" in planned.stdout
    assert not (tmp_path / "a").exists()
    measured = CliRunner().invoke(
        build_app(), ["eval", str(whole.weights), "--data", tiny.spec, "--workers", "0", "--json"]
    )
    assert measured.exit_code == 0, measured.output
    assert json.loads(measured.stdout)[whole.metric] == pytest.approx(whole.best, rel=1e-4, abs=1e-6)

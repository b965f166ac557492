"""Mechanisms of the user's own on the command line, in every process, and only where the user names them."""

from __future__ import annotations

import json
import secrets
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import affinear as af
from affinear import cli, plugins
from affinear.compare import prepare, run
from affinear.train.about import about


@pytest.fixture
def name() -> str:
    return f"mine_{secrets.token_hex(4)}"


@pytest.fixture
def plugin(tmp_path: Path, name: str) -> Path:
    path = tmp_path / "my_file.py"
    text = "import dataclasses\nimport affinear as af\n"
    text += f"af.register(dataclasses.replace(af.mechanisms()['mala'], name={name!r}, paper='none'))\n"
    path.write_text(text)
    return path


def affinear(*words: str | Path):
    return CliRunner().invoke(cli.build_app(), [str(word) for word in words])


def test_a_plugin_is_run_once(plugin: Path, name: str):
    plugins.load([str(plugin)])
    first = af.mechanisms()[name]
    plugins.load([str(plugin), str(plugin)])
    assert af.mechanisms()[name] is first


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import affinear\n\n1 / 0", r"my_file.py: line 3: ZeroDivisionError: division by zero"),
        ("import affinear\ndef (", r"my_file.py: line 2: SyntaxError: "),
        ("import affinear\naffinear.register(3)", r"line 2: ValueError: mechanism: expected an affinear.Mechanism"),
    ],
)
def test_one_that_fails_is_told_with_its_line(tmp_path: Path, text: str, said: str):
    (tmp_path / "my_file.py").write_text(text)
    with pytest.raises(ValueError, match=said):
        plugins.load([str(tmp_path / "my_file.py")])


def test_one_that_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(ValueError, match=r"expected a file of Python, found nothing"):
        plugins.load([str(tmp_path / "absent.py")])
    with pytest.raises(ValueError, match=r"or an entry point of affinear.plugins, got 'absent'"):
        plugins.load(["absent"])


def test_an_entry_point_is_loaded_where_it_is_named(
    plugin: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = f"plugin_of_{name}"
    plugin.rename(tmp_path / f"{module}.py")
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint("other", "no_such_module", plugins.GROUP), EntryPoint("mine", module, plugins.GROUP)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    plugins.load(["mine"])
    assert name in af.mechanisms()


def test_train_eval_and_predict_know_it_and_weights_alone_do_not(
    plugin: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    words = "train affinear_trunk_micro --data digits --epochs 1 --set workers=0 --model-arg depth=1 -o run --model-arg"
    done = affinear(*words.split(), f"mechanism={name}", "--plugin", plugin)
    assert done.exit_code == 0, done.output
    told = about(tmp_path / "run" / "best.safetensors")
    assert told is not None
    assert told.model_args["mechanism"] == name
    assert affinear("eval", "run", "--data", "digits", "--workers", "0", "--plugin", plugin).exit_code == 0
    text = json.dumps((tmp_path / "run" / "run.json").read_text())
    assert "my_file" not in text  # nothing that a file could name


@pytest.mark.parametrize("command", ["train", "distil", "compare", "eval", "predict", "export", "lens", "bench ops"])
def test_every_command_that_makes_a_network_takes_plugins(command: str):
    assert "--plugin" in affinear(*command.split(), "--help").output
    assert "--plugin" in affinear("lens", "report", "--help").output


@pytest.mark.exhaustive
@pytest.mark.parametrize("jobs", [0, 2])
def test_cells_of_a_comparison_know_it_in_their_own_processes(plugin: Path, name: str, tmp_path: Path, jobs: int):
    given: dict[str, Any] = {"epochs": 1, "limit": 96, "batch_size": 48, "workers": 0, "plugins": [str(plugin)]}
    names = ["mala", name]
    plan = prepare("digits", mechanisms=names, seeds=1, output=tmp_path / "c", jobs=jobs, **given)
    results = run(plan)
    assert [outcome.error for outcome in results.outcomes] == ["", ""]
    assert results.outcomes[0].value == results.outcomes[1].value  # the same mechanism under two names

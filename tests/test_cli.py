"""The `affinear` command, as a user meets it."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

import affinear
from affinear import cli

PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str | Path):
    return CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])


def test_demo_names_every_mechanism_and_saves_a_figure(tmp_path: Path):
    result = run("demo", "--output", tmp_path / "a.png")
    assert result.exit_code == 0, result.output
    for name in affinear.mechanisms():
        assert name in result.output
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    assert str(tmp_path / "a.png") in result.output.replace("\n", "")


def test_demo_writes_beside_the_caller_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert run("demo").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["affinear-demo.png"]


def test_demo_twice_is_the_same_as_once(tmp_path: Path):
    assert run("demo", "--output", tmp_path / "a.png").exit_code == 0
    again = run("demo", "--output", tmp_path / "a.png")
    assert again.exit_code == 0
    assert "already" in again.output
    assert len(list(tmp_path.iterdir())) == 1


def test_demo_leaves_an_existing_file_alone_and_says_where_the_figure_is(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"mine")
    result = run("demo", "--output", tmp_path / "a.png")
    assert result.exit_code == 0
    assert (tmp_path / "a.png").read_bytes() == b"mine"
    assert (tmp_path / "a-2.png").read_bytes().startswith(PNG)
    assert "a-2.png" in result.output


def test_demo_replaces_an_existing_file_when_forced(tmp_path: Path):
    (tmp_path / "a.png").write_bytes(b"mine")
    assert run("demo", "--output", tmp_path / "a.png", "--force").exit_code == 0
    assert [path.read_bytes()[:8] for path in tmp_path.iterdir()] == [PNG]


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("nowhere/a.png", "does not exist; make it first"),
        (".", "saved as .png, .svg or .pdf"),
        ("a.jpg", "saved as .png, .svg or .pdf"),
        ("folder.png", "is a folder"),
    ],
)
def test_a_bad_output_gets_one_sentence_before_any_work(tmp_path: Path, output: str, sentence: str):
    (tmp_path / "folder.png").mkdir()
    result = run("demo", "--output", tmp_path / output)
    assert result.exit_code == 1
    assert sentence in result.output
    assert result.output.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["folder.png"]


def test_another_seed_gives_other_numbers(tmp_path: Path):
    first, second = (run("demo", "--seed", str(seed), "--output", tmp_path / "a.png") for seed in (0, 1))
    assert first.output != second.output
    assert (tmp_path / "a-2.png").exists()


def test_version_is_the_package_version():
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"affinear {affinear.__version__}\n"


def test_app_is_made_on_demand():
    assert callable(cli.app)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = cli.nothing


@pytest.mark.parametrize("missing", cli.NEEDS)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert missing in said
    assert "pip install 'affinear[lens]'" in said
    assert said.count("\n") == 1


def test_the_operator_loads_neither_the_lens_nor_its_packages():
    heavy = ("affinear.lens", "affinear.cli", "matplotlib", "typer", "rich")
    code = f"import sys, affinear, affinear.ops; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"

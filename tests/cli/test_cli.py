"""The `affinear` command, as a user meets it."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

import affinear
from affinear import cli
from affinear.bench import tables
from affinear.bench.rows import Report

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


@pytest.mark.exhaustive
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


def bench(folder: Path, *arguments: str | Path):
    files = ("--output", folder / "bench.json", "--chart", folder / "chart.png")
    return run("bench", "ops", "--quick", "--seconds", "0.002", *files, *arguments)


def test_bench_measures_everything_and_saves_report_and_chart(tmp_path: Path):
    result = bench(tmp_path)
    assert result.exit_code == 0, result.output
    titles = ("Full", "Causal attention", "Decoding", "Rotary", "Mechanisms", "Before", "Time against tokens")
    assert [title for title in titles if title not in result.output] == []
    assert "a copy reads and writes" in result.output
    report = Report.from_json((tmp_path / "bench.json").read_text())
    assert {row.status for row in report.rows} == {"ok"}
    assert (tmp_path / "chart.png").read_bytes().startswith(PNG)
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "chart.png"}


def test_bench_takes_shapes_and_other_settings(tmp_path: Path):
    extra = ("--causal", "--shape", "1,2,40,8", "--shape", "1,1,20,16", "--mechanism", "linear", "--dtype", "float16")
    assert bench(tmp_path, *extra).exit_code == 0
    rows = Report.from_json((tmp_path / "bench.json").read_text()).rows
    assert {str(row.shape) for row in rows} == {"1,2,40,8", "1,1,20,16"}
    assert {(row.mechanism, row.dtype, row.causal, row.table) for row in rows} == {
        ("linear", "float16", True, "causal")
    }
    assert not (tmp_path / "chart.png").exists()


def test_bench_never_writes_over_the_results_of_another_run(tmp_path: Path):
    (tmp_path / "bench.json").write_text("mine")
    result = bench(tmp_path, "--only", "decode")
    assert result.exit_code == 0
    assert (tmp_path / "bench.json").read_text() == "mine"
    assert len(Report.from_json((tmp_path / "bench-2.json").read_text()).rows) == 1
    assert "bench-2.json" in result.output
    assert bench(tmp_path, "--only", "decode", "--force").exit_code == 0
    assert len(Report.from_json((tmp_path / "bench.json").read_text()).rows) == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_bench_keeps_what_it_has_when_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(plan, told):
        yield next(original(plan, told))
        raise KeyboardInterrupt

    original = tables._TABLES["mechanisms"]
    monkeypatch.setitem(tables._TABLES, "mechanisms", stop)
    result = bench(tmp_path, "--only", "decode,mechanisms,overhead")
    assert result.exit_code == 130
    assert "Interrupted after 2 rows; not begun: overhead." in result.output
    report = Report.from_json((tmp_path / "bench.json").read_text())
    assert report.interrupted
    assert [row.table for row in report.rows] == ["decode", "mechanisms"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--shape", "1,2"), "shape: expected four positive numbers B,H,N,D, got '1,2'"),
        (("--only", "everything"), "only: expected one of non-causal"),
        (("--output", "a.txt"), "The report can be saved as .json, not as 'a.txt'; give --output such a name."),
        (
            ("--chart", "a.gif"),
            ".png, .svg or .pdf, not as 'a.gif'; give --chart such a name.",
        ),
        (("--output", "nowhere/a.json"), "does not exist; make it first"),
    ],
)
def test_bench_refuses_in_one_sentence_before_any_work(tmp_path: Path, arguments: tuple[str, ...], sentence: str):
    result = bench(tmp_path, *arguments)
    assert result.exit_code == 1
    assert sentence in result.output
    assert result.output.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_operator_loads_no_benchmark():
    code = "import sys, affinear; print([name for name in sys.modules if name.startswith('affinear.bench')])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_models_lists_what_there_is():
    result = run("models", "inline_deit_tiny")
    assert result.exit_code == 0, result.output
    for text in ("inline_deit_tiny", "6.48M", "1.11", "12 linear", "74.5", "arXiv:2412.06590"):
        assert text in result.output


def test_models_speaks_json():
    result = run("models", "inline_pvt_tiny", "--json")
    (entry,) = json.loads(result.stdout)
    assert (entry["name"], entry["parameters"], entry["top1"]) == ("inline_pvt_tiny", 12_032_232, 78.2)


def test_models_names_those_of_timm_where_all_are_asked_for():
    assert run("models", "deit_tiny*").exit_code == 1
    result = run("models", "deit_tiny*", "--all", "--json")
    assert result.exit_code == 0, result.output
    (entry,) = json.loads(result.stdout)
    assert (entry["name"], entry["parameters"], entry["stages"]) == ("deit_tiny_patch16_224", 5_717_416, "softmax")


def test_models_of_other_tasks_are_named():
    result = run("models", "conformer*")
    assert result.exit_code == 0
    assert result.output == "For --task speech: conformer_small, conformer_medium, conformer_large\n"
    assert "For --task upscale: upscaler_light, swinir_light" in run("models").output


def test_models_that_are_not_there_are_told():
    result = run("models", "resnet*")
    assert result.exit_code == 1
    assert "No network is called 'resnet*'" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mavit_tin"], "such as mavit_tiny"),
        (["mavit_tiny", "--size", "big"], "--image-size: expected a side such as 224, or height and width"),
        (["mavit_tiny", "--size", "8x8"], "size: expected at least 32 x 32, got 8 x 8"),
        (["mavit_tiny", "-o", "model.pb"], "can be saved as .onnx"),
        (["mavit_tiny", "--weights", "absent.safetensors"], "absent.safetensors"),
    ],
)
def test_export_that_cannot_be_says_why(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = run("export", *arguments)
    assert result.exit_code == 1
    assert said in result.output
    assert list(tmp_path.iterdir()) == []


def test_export_saves_what_was_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from affinear.models import export

    exported = export.Exported(b"content", ("batch", "height", "width"), ((1, 3, 32, 48),), 2.5e-7)
    monkeypatch.setattr(export, "export_onnx", lambda model, **given: exported)
    result = run("export", "nalaformer_xtiny", "-o", tmp_path / "a.onnx", "--image-size", "32x48")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.onnx").read_bytes() == b"content"
    assert "May vary: batch, height, width. Largest relative error against torch: 2.5e-07." in result.output


def test_bench_models_measures_and_saves(tmp_path: Path):
    result = run("bench", "models", "--quick", "--output", tmp_path / "a.json", "--only", "inference")
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["model"] for row in rows] == ["inline_deit_tiny", "deit_tiny_patch16_224"]
    assert rows[0]["ratio"] > 0


def test_lens_figures_draws_reads_and_saves(tmp_path: Path):
    result = run("lens", "figures", "-o", tmp_path / "new", "--only", "ratios", "--format", "svg")
    assert result.exit_code == 0, result.output
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["ratios.svg"]
    assert "MALA" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--only", "everything"], "everything"), (["--format", "gif"], "--format: expected some of png, svg, pdf")],
)
def test_lens_figures_that_cannot_be_say_why(arguments: list[str], said: str, tmp_path: Path):
    result = run("lens", "figures", "-o", tmp_path / "new", *arguments)
    assert result.exit_code == 1
    assert said in result.output
    assert not (tmp_path / "new").exists()


def test_lens_report_looks_into_a_network(tmp_path: Path):
    Image.new("RGB", (40, 50), "teal").save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no picture")
    command = ("lens", "report", "--model", "nalaformer_xtiny", "--data", tmp_path, "--rows", "4")
    result = run(*command, "-o", tmp_path / "a.html")
    assert result.exit_code == 0, result.output
    assert "b.png" in result.output
    assert "nala_released" in (tmp_path / "a.html").read_text()


def test_lens_report_of_nothing_says_so(tmp_path: Path):
    result = run("lens", "report", "--model", "nalaformer_xtiny", "--data", tmp_path, "-o", tmp_path / "a.html")
    assert result.exit_code == 1
    assert list(tmp_path.iterdir()) == []

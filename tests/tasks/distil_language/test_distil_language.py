"""`affinear distil` on tiny language models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging
from typer.testing import CliRunner

import affinear.linearizing.distil
from affinear import tasks
from affinear.cli import build_app
from affinear.linearizing.leaving import Left
from affinear.tasks.distil import causal
from affinear.tasks.distil.choosing import layers_left
from affinear.tasks.distil.lesson import Lesson, begin, let_learn, student_of
from affinear.tasks.distil.quiet import without_bars
from affinear.tasks.language.spelling import Spelling
from affinear.train import Run, train


@pytest.fixture(scope="module")
def tiny(module_at: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, Path]:
    made = module_at(Path(__file__).with_name("tiny.py"))
    folder = tmp_path_factory.mktemp("distil")
    (folder / "data").mkdir()
    return made, made.data(folder / "data"), folder


def trained_spelling(weights: Path) -> Spelling:
    return Spelling(tasks.load_trained(weights).job.facts["tokenizer"])


def test_a_folder_of_transformers_becomes_a_linear_one(tiny: tuple[Any, str, Path]):
    made, data, folder = tiny
    teacher, out = Path(made.CHANGES["teacher"]), folder / "out"
    told = ["distil", str(teacher), "--data", data, "-o", str(out), "--layer-steps", "3", "--steps", "2", "--no-timing"]
    for name, value in {**made.CHANGES, "workers": 0, "low_rank": 2, "test_rows": 4}.items():
        told += [] if name == "teacher" else ["--set", f"{name}={value}"]
    result = CliRunner().invoke(build_app(), told)
    assert result.exit_code == 0, result.output
    before = {f"model.{name}": tensor for name, tensor in load_file(teacher / "model.safetensors").items()}
    for stage in ("layers", "whole"):
        after = load_file(out / stage / "last.safetensors")
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())  # low-rank updates alone learn
        assert float(after["model.model.layers.0.self_attn.q_proj.low_rank_up"].abs().sum()) > 0
        assert "Layer by layer" in (out / stage / "report.html").read_text()
    assert "Loading weights" not in result.output  # bars of transformers'
    assert "model shards" not in result.output
    own = json.loads((out / "teacher.json").read_text())["score"]["perplexity"]
    last = tasks.evaluate(out / "whole" / "last.safetensors", data)["perplexity"]
    assert f"Teacher: perplexity {own:.3f}. Student: perplexity {last:.3f}." in result.output
    student = AutoModelForCausalLM.from_pretrained(out / "student").eval()
    assert affinear.linearizing.report_of(student).choices.window == 4
    tokens = torch.randint(0, 99, (2, 12))
    trained: Any = tasks.load_trained(out / "whole" / "last.safetensors").network
    torch.testing.assert_close(student(tokens).logits, trained.model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert not any("low_rank" in name for name in student.state_dict())
    spelling = trained_spelling(out / "whole" / "last.safetensors")
    tokenizer: Any = AutoTokenizer.from_pretrained(out / "student")
    assert tokenizer.eos_token_id == spelling.end  # the teacher's own, 2, is a letter and ends nothing
    assert tokenizer("Some text")["input_ids"] == spelling.encode(["Some text"])[0]
    again = CliRunner().invoke(build_app(), told)
    assert again.exit_code == 0, again.output
    assert "is there already" in again.output


def test_bars_of_transformers_are_shown_as_before():
    shown = logging.is_progress_bar_enabled()
    for before, change in ((True, logging.enable_progress_bar), (False, logging.disable_progress_bar)):
        change()
        with without_bars():
            assert not logging.is_progress_bar_enabled()
        assert logging.is_progress_bar_enabled() == before
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()


def test_layers_come_nearer_to_their_teacher(tiny: tuple[Any, str, Path]):
    made, _, _ = tiny
    path = Path(made.CHANGES["teacher"])
    student = causal.made(causal.source_of(str(path)).config, 2**30)
    chosen = tasks.find("distil_language").settings(stage="layers", feature_map="hedgehog", gain=True)
    student_of(student.model, chosen)
    let_learn(student, chosen)
    lesson = Lesson(chosen, lambda: causal.teacher_of(path, torch.float32), torch.device("cpu"))
    begin(student, lesson.teacher.state_dict(), "teacher")
    learning = [(name, parameter) for name, parameter in student.named_parameters() if parameter.requires_grad]
    assert all(".self_attn." in name for name, _ in learning)
    optimizer = torch.optim.Adam([parameter for _, parameter in learning], lr=1e-2)
    tokens = torch.randint(0, 99, (4, 16))
    losses: list[float] = []
    for _ in range(30):
        loss = lesson.layers(student, lambda model: model(tokens))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_teacher_in_half_precision_teaches_a_student_that_is_not(tiny: tuple[Any, str, Path]):
    made, _, _ = tiny
    path, chosen = Path(made.CHANGES["teacher"]), tasks.find("distil_language").settings(stage="layers", window=4)
    fresh, student = (causal.made(causal.source_of(str(path)).config, 2**30) for _ in range(2))
    lesson = Lesson(chosen, lambda: causal.teacher_of(path, torch.bfloat16), torch.device("cpu"))
    for network in (fresh, student):
        student_of(network.model, chosen)
        begin(network, lesson.teacher.state_dict(), "teacher")
    tokens = torch.randint(0, 99, (2, 16))
    shown = lesson.section(fresh, student, lambda model: model(tokens), "2 rows")
    assert "layers.1.self_attn" in shown.html
    teacher: Any = lesson.teacher
    with torch.autocast("cpu", torch.bfloat16):
        head = teacher.model.get_output_embeddings().weight
        like = causal.Taught(teacher(tokens), head, 1.0, 1.0, 0.5, 2.0)
        loss = student(tokens, tokens, like=like)
    loss.backward()
    assert loss.dtype == torch.float32
    assert all(parameter.grad is not None for parameter in student.parameters())


@pytest.mark.exhaustive
def test_a_run_of_language_can_be_the_teacher(tiny: tuple[Any, str, Path], tmp_path: Path):
    _, data, _ = tiny
    plain: dict[str, Any] = {
        "batch_size": 4,
        "context": 16,
        "held_out": 3,
        "steps": 1,
        "workers": 0,
        "test_rows": 4,
        "tokenizer": "bytes",
    }
    args = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    train(Run("llama_tiny", data, tmp_path / "teacher", tasks.recipe_for("language", "llama_tiny", **plain), args))
    told: dict[str, Any] = {**plain, "teacher": str(tmp_path / "teacher"), "tokenizer": "teacher", "keep_every": 2}
    train(Run("llama", data, tmp_path / "student", tasks.recipe_for("distil_language", "llama", **told)))
    network = tasks.load_trained(tmp_path / "student").network
    assert len(affinear.linearizing.distil.swapped_layers(network)) == 1
    task: Any = tasks.find("distil_language")
    said = task.predict(tasks.load_trained(tmp_path / "student"), ["a"], task.options(tokens=3))
    assert next(iter(said)).text


def test_a_student_says_what_its_teacher_says_where_its_window_holds_all(tiny: tuple[Any, str, Path]):
    made, _, _ = tiny
    teacher = causal.teacher_of(Path(made.CHANGES["teacher"]), torch.float32)
    student = causal.made(causal.source_of(made.CHANGES["teacher"]).config, 2**30)
    student_of(student.model, tasks.find("distil_language").settings(mechanism="none", window=16))
    student.load_state_dict(teacher.state_dict(), strict=False)
    tokens = torch.randint(0, 99, (2, 16))
    with torch.no_grad():
        hidden = teacher(tokens)
        torch.testing.assert_close(student.eval()(tokens), hidden, rtol=1e-4, atol=1e-4)
        head = teacher.model.get_output_embeddings().weight
        like = causal.Taught(hidden, head, 1.0, 1.0, 0.0, 1.0)
        assert float(student(tokens, tokens, like=like)) < 1e-5
        assert float(student(tokens.flip(1), tokens, like=like)) > 1e-2


def test_heads_that_are_more_than_a_matrix_and_teachers_that_are_none_are_told(
    tiny: tuple[Any, str, Path], tmp_path: Path
):
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32)).eval()
    causal.check_head(causal.Student(gpt))
    scaled = causal.Student(gpt)
    scaled.model.lm_head.register_forward_hook(lambda _, __, out: 30 * torch.tanh(out / 30) + 1)
    with pytest.raises(ValueError, match="more than a matrix of its features"):
        causal.check_head(scaled)
    for teacher, said in ((None, "got none"), ("nowhere", "got no such: nowhere")):
        with pytest.raises(ValueError, match=f"teacher: .*{said}"):
            causal.source_of(teacher)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert_of_nobody"}))
    with pytest.raises(ValueError, match="expected a causal language model of transformers, got 'bert_of_nobody'"):
        causal.source_of(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="no weights as safetensors"):
        causal.source_of(str(tmp_path))


def test_layers_that_are_worth_it_are_left(tiny: tuple[Any, str, Path], tmp_path: Path):
    made, data, _ = tiny
    teacher = Path(made.CHANGES["teacher"])
    told = ["distil", str(teacher), "--data", data, "-o", str(tmp_path / "out"), "--layer-steps", "0", "--steps", "1"]
    told += ["--no-timing", "--leave", "1", "--leave-samples", "2"]
    for name, value in {**made.CHANGES, "workers": 0, "test_rows": 4}.items():
        told += [] if name == "teacher" else ["--set", f"{name}={value}"]
    result = CliRunner().invoke(build_app(), told)
    assert result.exit_code == 0, result.output
    costs = json.loads((tmp_path / "out" / "left.json").read_text())["costs"]
    best = min(costs, key=costs.__getitem__)
    assert set(costs) == {"0", "1"}
    assert f"Layer {best} stays softmax: the loss before learning is {costs[best]:.4f} with it." in result.output
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "student")
    assert [layer.name for layer in affinear.linearizing.report_of(student).left] == [f"model.layers.{best}.self_attn"]
    whole = tmp_path / "out" / "whole"
    with pytest.raises(ValueError, match=rf"leave: expected '{best}', as the weights of .* were trained with, got ''"):
        tasks.load_trained(whole, leave="")
    again = CliRunner().invoke(build_app(), told)
    assert again.exit_code == 0, again.output
    told[told.index("--leave-samples") + 1] = "3"
    other = CliRunner().invoke(build_app(), told)
    assert other.exit_code == 1
    assert "layers were chosen there for another teacher, data or settings; use another --output" in other.output


def test_choosing_goes_on_where_it_stopped(tiny: tuple[Any, str, Path], tmp_path: Path):
    made, data, _ = tiny
    setup = tasks.recipe_for("distil_language", "llama", "whole", **{**made.CHANGES, "test_rows": 4})
    run = Run("llama", data, tmp_path, setup)
    whole = layers_left(run, 1, 2)
    kept = json.loads((tmp_path / "left.json").read_text())
    del kept["costs"]["1"]
    kept["costs"]["0"] = -1.0  # a cost that no trial would find: it is not tried again
    (tmp_path / "left.json").write_text(json.dumps(kept))
    assert layers_left(run, 1, 2)[0] == Left("0", -1.0)
    (tmp_path / "left.json").unlink()
    assert layers_left(run, 1, 2) == whole  # the same again, to the last bit


def test_layers_are_not_chosen_by_several_processes_at_once(
    tiny: tuple[Any, str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made, data, _ = tiny
    monkeypatch.setenv("WORLD_SIZE", "2")
    told = ["distil", made.CHANGES["teacher"], "--data", data, "-o", str(tmp_path), "--leave", "1"]
    result = CliRunner().invoke(build_app(), told)
    assert result.exit_code == 1
    assert "--leave: layers are chosen by one process; run without torchrun first" in result.output

"""`affinear distil` on tiny Whispers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F
from transformers import AutoFeatureExtractor, WhisperForConditionalGeneration
from typer.testing import CliRunner

import affinear.linearizing
from affinear import tasks
from affinear.cli import build_app
from affinear.linearizing.distil import Weights, relative_error
from affinear.tasks.distil.lesson import Lesson, begin, let_learn, student_of
from affinear.tasks.distil.speech import whisper
from affinear.tasks.distil.speech.windows import windows_of
from affinear.tasks.distil.speech.work import DistilSpeechWork, network_of
from affinear.tasks.distil.stages import plan_for
from affinear.tasks.speech.recordings import Recording, Recordings
from affinear.tasks.speech.samples import played
from affinear.train.task import Job

SETTINGS = tasks.find("distil_speech").settings


@pytest.fixture(scope="module")
def tiny(module_at: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, Path]:
    made = module_at(Path(__file__).with_name("tiny.py"))
    folder = tmp_path_factory.mktemp("distil")
    (folder / "data").mkdir()
    return made, made.data(folder / "data"), folder


def settled(made: Any, data: str, **changes: Any) -> tuple[Job[Any], Any]:
    """A job with nothing left open, and its data."""
    setup = tasks.recipe_for("distil_speech", "whisper", "whole", **{**made.CHANGES, "workers": 0, **changes})
    opened = setup.task.open(data, setup.settings)
    return setup.task.settle(Job("whisper", {}, setup.recipe, setup.settings), opened), opened


def sounds(count: int = 2) -> torch.Tensor:
    return torch.randn(count, 16, 100)


def test_a_folder_of_transformers_becomes_one_with_a_linear_encoder(tiny: tuple[Any, str, Path]):
    made, data, folder = tiny
    teacher, out = Path(made.CHANGES["teacher"]), folder / "out"
    told = ["distil", str(teacher), "--data", data, "-o", str(out), "--layer-steps", "3", "--steps", "2", "--no-timing",
            "--mechanism", "linear"]  # fmt: skip
    for name, value in {**made.CHANGES, "workers": 0}.items():
        told += [] if name == "teacher" else ["--set", f"{name}={value}"]
    result = CliRunner().invoke(build_app(), told)
    assert result.exit_code == 0, result.output
    assert "best WER" in result.output
    own = json.loads((out / "teacher.json").read_text())["score"]["wer"]
    last = tasks.evaluate(out / "whole" / "last.safetensors", data)["wer"]
    assert f"Teacher: WER {own:.2%}. Student: WER {last:.2%}." in result.output
    before = {f"model.{name}": tensor for name, tensor in load_file(teacher / "model.safetensors").items()}
    for stage in ("layers", "whole"):
        after = load_file(out / stage / "last.safetensors")
        same = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
        changed = before.keys() - same
        assert changed
        assert all(name.startswith("model.model.encoder.") and "embed_positions" not in name for name in changed)
        assert ("model.model.encoder.conv1.weight" in changed) == (stage == "whole")
        report = (out / stage / "report.html").read_text()
        assert "Layer by layer" in report
        assert "What was heard" in report
    student: Any = WhisperForConditionalGeneration.from_pretrained(out / "student").eval()
    report = affinear.linearizing.report_of(student)
    assert report.choices.mechanism == "linear"
    assert {layer.name for layer in report.layers if layer.swapped} == {
        f"model.encoder.layers.{i}.self_attn" for i in range(2)
    }
    trained: Any = tasks.load_trained(out / "whole" / "last.safetensors").network
    heard, ids = sounds(), torch.randint(0, 99, (2, 7))
    torch.testing.assert_close(
        student(heard, decoder_input_ids=ids).logits, trained.model(heard, decoder_input_ids=ids).logits
    )
    extractor: Any = AutoFeatureExtractor.from_pretrained(out / "student")
    assert extractor(np.zeros(10), sampling_rate=16_000)["input_features"][0].shape == (16, 100)
    assert (out / "student" / "generation_config.json").is_file()
    assert (out / "student" / "tokenizer.json").read_text() == (teacher / "tokenizer.json").read_text()


def test_layers_come_nearer_to_their_teacher(tiny: tuple[Any, str, Path]):
    made, _, _ = tiny
    path = Path(made.CHANGES["teacher"])
    student = whisper.made(whisper.source_of(str(path)).config, 2**30)
    chosen = SETTINGS(stage="layers", feature_map="learned", gain=True)
    student_of(student.model, chosen)
    let_learn(student, chosen)
    whisper.freeze_but_encoder(student)
    lesson = Lesson(chosen, lambda: whisper.teacher_of(path, torch.float32), torch.device("cpu"))
    begin(student, lesson.teacher.state_dict(), "teacher")
    learning = [(name, parameter) for name, parameter in student.named_parameters() if parameter.requires_grad]
    assert learning
    assert all(".encoder." in name and ".self_attn." in name for name, _ in learning)
    optimizer = torch.optim.Adam([parameter for _, parameter in learning], lr=1e-2)
    heard, losses = sounds(), list[float]()
    for _ in range(30):
        loss = lesson.layers(student, lambda model: model(heard))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_the_loss_is_the_features_error_and_the_words_divergence(tiny: tuple[Any, str, Path]):
    made, data, _ = tiny
    job, opened = settled(made, data, label_weight=0.3, temperature=2.0)
    work = DistilSpeechWork(job, opened, torch.device("cpu"))
    student = network_of(job)
    begin(student, work.lesson.teacher.state_dict(), "teacher")
    batch = work.ready(next(iter(work.train_loader())))
    lengths = (batch.wanted != -100).sum(dim=1).tolist()
    assert len(set(lengths)) == len(lengths) > 1
    found = work.loss(student, batch)
    ours, theirs = (
        network.model(batch.features, decoder_input_ids=batch.ids, use_cache=False)
        for network in (student, whisper.teacher_of(Path(job.facts["teacher"]), torch.float32))
    )
    expected = relative_error(ours.encoder_last_hidden_state, theirs.encoder_last_hidden_state)
    words = torch.zeros(())
    for mine, other, wanted in zip(ours.logits, theirs.logits, batch.wanted, strict=True):
        there = wanted != -100
        p, q = ((x[there] / 2).log_softmax(-1) for x in (other, mine))
        words = words + 4 * F.kl_div(q, p, reduction="batchmean", log_target=True)
        words = words + 0.3 * F.cross_entropy(mine[there], wanted[there])
    torch.testing.assert_close(found, expected + words / len(batch.wanted))
    found.backward()
    for name, parameter in student.named_parameters():
        free = name.startswith("model.model.encoder.") and "embed_positions" not in name
        assert (parameter.grad is not None) == free, name


def test_a_student_says_what_its_teacher_says_where_its_window_holds_all(tiny: tuple[Any, str, Path]):
    made, data, _ = tiny
    job, opened = settled(
        made, data, mechanism="none", window=50, sinks=0, convolution=0, feature_map="own", gain=False
    )
    work = DistilSpeechWork(job, opened, torch.device("cpu"))
    teacher, student = work.lesson.teacher, network_of(job).eval()
    begin(student, teacher.state_dict(), "teacher")
    heard = sounds()
    torch.testing.assert_close(student(heard), teacher(heard), rtol=1e-4, atol=1e-4)
    batch = work.ready(next(iter(work.train_loader())))
    assert work.loss(student, batch).item() < 1e-5


def test_transcripts_are_the_likeliest_tokens_with_a_cache_or_without(tiny: tuple[Any, str, Path]):
    made, data, _ = tiny
    job, opened = settled(made, data)
    transcripts = DistilSpeechWork(job, opened, torch.device("cpu")).transcripts
    teacher = whisper.teacher_of(Path(job.facts["teacher"]), torch.float32)
    student = network_of(job).eval()
    begin(student, teacher.state_dict(), "teacher")
    for network in (teacher, student):
        heard = sounds(3)
        ids = torch.tensor([transcripts.prompt] * 3)
        for _ in range(transcripts.most):  # without a cache
            logits = network.model(heard, decoder_input_ids=ids).logits[:, -1]
            logits[:, transcripts.silent] = -torch.inf
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
        rows = [row[len(transcripts.prompt) :] for row in ids.tolist()]
        cut = [row[: row.index(transcripts.end)] if transcripts.end in row else row for row in rows]
        assert network(heard, asked=transcripts) == cut
    assert set(transcripts.prompt) <= set(transcripts.silent.tolist())
    assert job.facts["config"]["vocab_size"] - 1 in transcripts.silent
    assert transcripts.end not in transcripts.silent


def test_what_a_decoder_is_given_and_what_it_is_to_say(tiny: tuple[Any, str, Path]):
    made, data, _ = tiny
    job, opened = settled(made, data)
    transcripts = DistilSpeechWork(job, opened, torch.device("cpu")).transcripts
    begin_, timeless = transcripts.prompt
    ids, wanted = transcripts.asked(torch.tensor([[7, 8, 9], [5, 0, 0]]), torch.tensor([3, 1]))
    assert ids.tolist() == [[begin_, timeless, 7, 8, 9], [begin_, timeless, 5, 0, 0]]
    assert wanted.tolist() == [[-100, 7, 8, 9, transcripts.end], [-100, 5, transcripts.end, -100, -100]]
    assert transcripts.decode(transcripts.encode("Well, <|notimestamps|> it's so.")) == "well notimestamps it's so"


def test_recordings_that_no_window_holds_are_left_out_and_counted(tiny: tuple[Any, str, Path], tmp_path: Path):
    made, data, _ = tiny
    shutil.copytree(data, tmp_path / "data")
    seconds = {"slow": 0.95, "long": 1.2, "lying": 1.5}
    for name, length in seconds.items():
        made.write(tmp_path / "data" / f"{name}.wav", np.zeros(int(length * made.RATE)))
    rows = [{"audio": "slow.wav", "text": "a"}, {"audio": "long.wav", "text": "a"},
            {"audio": "lying.wav", "text": "a", "duration": 0.5}]  # fmt: skip
    for half in ("train", "test"):
        with (tmp_path / "data" / f"{half}.jsonl").open("a") as file:
            file.write("".join(f"\n{json.dumps(row)}" for row in rows))
    job, opened = settled(made, str(tmp_path / "data"), unreadable=0.5)
    said = tasks.find("distil_speech").summary(job, opened)
    assert said.startswith("10 training recordings of 0.00 hours and 5 test recordings")
    assert said.endswith("that fit into a window of 1 s; 2 and 1 left out")
    work = DistilSpeechWork(job, opened, torch.device("cpu"))
    said = "".join(section.note for section in work.report(network_of(job).eval()))
    assert "2 training and 1 test recordings that no window holds were left out" in said
    list(work.test_loader())
    assert [name for name in work.skipped.names if "lying" in name]
    with pytest.raises(ValueError, match=r"lying.wav: expected 0.5 s, as its manifest says, got 1.5 s"):
        _ = work.test[4]
    for half in ("train", "test"):
        (tmp_path / "data" / f"{half}.jsonl").write_text(json.dumps(rows[1]))
    with pytest.raises(ValueError, match=r"recordings to learn from of at most 0.9 s in .*, got 1 that are all longer"):
        settled(made, str(tmp_path / "data"))


@pytest.mark.parametrize("speed", [0.9, 0.944, 0.505, 0.996, 1.0])
def test_what_fits_into_a_window_fits_as_slowly_as_it_is_played(speed: float):
    rate, most = 16_000, 480_000
    rows = [Recording("a", "a", "", seconds) for seconds in (most * speed / rate, most * (speed - 0.01) / rate)]
    half = windows_of(Recordings(rows, rate), most, speed)
    assert len(half) in (1, 2)  # the second always
    assert len(played(torch.zeros(half.most), speed)) <= most + 1
    for row in half.rows:
        assert len(played(torch.zeros(int(row.seconds * rate)), speed)) <= most + 0.01 * rate / speed + 1


def test_texts_are_forced_as_they_are_written_unless_all_is_in_capitals(tiny: tuple[Any, str, Path], tmp_path: Path):
    made, _, _ = tiny
    texts = ["Well, I  see.", "WELL, I SEE.", "half \ud83d a pair"]
    for index in range(3):
        made.write(tmp_path / f"{index}.wav", np.zeros(4000))
    rows = [json.dumps({"audio": f"{i}.wav", "text": text}) for i, text in enumerate(texts)]
    for half in ("train", "test"):
        (tmp_path / f"{half}.jsonl").write_text("\n".join(rows))
    opened: Any = tasks.find("distil_speech").open(str(tmp_path), SETTINGS())
    assert [row.text for row in opened.train.rows] == ["Well, I see.", "well i see", "half a pair"]
    assert [row.text for row in opened.test.rows] == ["well i see", "well i see", "half a pair"]
    settled(made, str(tmp_path))
    (tmp_path / "train.jsonl").write_text("\n".join(rows).replace("see", "See"))
    assert tasks.find("distil_speech").open(str(tmp_path), SETTINGS()).fingerprint != opened.fingerprint


def test_a_text_that_the_decoder_has_no_room_for_is_told(tiny: tuple[Any, str, Path], tmp_path: Path):
    made, _, _ = tiny
    made.write(tmp_path / "a.wav", np.zeros(4000))
    for length, half in ((31, "train"), (3, "test")):
        row = {"audio": "a.wav", "text": " ".join("z" * length)}
        (tmp_path / f"{half}.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"data: expected texts of at most 30 tokens, .*, got \d+ of .*a.wav; cut it"):
        settled(made, str(tmp_path))


def test_low_rank_updates_learn_in_the_encoder_alone(tiny: tuple[Any, str, Path]):
    made, data, _ = tiny
    job, _ = settled(made, data, low_rank=2, window=0, sinks=0)
    names = [name for name, parameter in network_of(job).named_parameters() if parameter.requires_grad]
    assert names
    assert all(".encoder." in name and (".linearized." in name or "low_rank" in name) for name in names)
    changes: dict[str, Any] = {"low_rank_on": "*decoder*fc1", "feature_map": "own", "gain": False, "convolution": 0}
    with pytest.raises(ValueError, match="low_rank_on: expected linear layers of the encoder"):
        network_of(replace(job, settings=job.settings.changed(**changes)))


def test_a_teacher_of_several_languages_is_asked_in_one(tiny: tuple[Any, str, Path], tmp_path: Path):
    made, data, _ = tiny
    teacher = Path(made.teacher(tmp_path / "many", "<|en|>", "<|transcribe|>"))
    (teacher / "generation_config.json").write_text(json.dumps({"is_multilingual": True}))
    job, _ = settled(made, data, teacher=str(teacher), language="en")
    assert len(job.facts["prompt"]) == 4
    for language, said in ((None, "expected that of the recordings"), ("de", "such as en, got 'de'")):
        with pytest.raises(ValueError, match=f"language: .*{said}"):
            settled(made, data, teacher=str(teacher), language=language)
    with pytest.raises(ValueError, match="language: expected none, as the teacher knows one alone, got 'en'"):
        settled(made, data, language="en")


def test_teachers_that_are_none_are_told(tiny: tuple[Any, str, Path], tmp_path: Path):
    made, _, _ = tiny
    for teacher, said in ((None, "got none"), ("nowhere", "got no such: nowhere"), (str(tmp_path), "without config")):
        with pytest.raises(ValueError, match=f"teacher: .*{said}"):
            whisper.source_of(teacher)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="expected a Whisper of transformers, got 'llama'"):
        whisper.source_of(str(tmp_path))
    good = Path(made.CHANGES["teacher"])
    config = json.loads((good / "config.json").read_text())
    for fields, said in (
        ({"max_source_positions": 2**20}, "max_source_positions: expected a number from 2 to 65536"),
        ({"max_source_positions": True}, "max_source_positions: expected a number"),
        ({"quantization_config": {"quant_method": "affinear"}}, "quantized or linear already"),
        ({"d_model": 10**15}, "numbers that a network can have"),
        ({}, "expected tokenizer.json in"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
        with pytest.raises(ValueError, match=said):
            whisper.source_of(str(tmp_path))
    shutil.copy(good / "tokenizer.json", tmp_path)
    with pytest.raises(ValueError, match="no weights as safetensors"):
        whisper.source_of(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    with pytest.raises(ValueError, match="tokenizer: expected at most 20 tokens, as the teacher knows, got"):
        whisper.source_of(str(tmp_path))


def test_weights_that_are_not_all_there_and_tokens_that_are_missing_are_told(
    tiny: tuple[Any, str, Path], tmp_path: Path
):
    made, data, _ = tiny
    shutil.copytree(made.CHANGES["teacher"], tmp_path / "half")
    file = tmp_path / "half" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if ".decoder." not in name}
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ValueError, match="expected all weights of WhisperForConditionalGeneration, got none for"):
        whisper.teacher_of(tmp_path / "half", torch.float32)
    text = (tmp_path / "half" / "tokenizer.json").read_text().replace("<|notimestamps|>", "<|times|>")
    (tmp_path / "half" / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer: expected the token <\|notimestamps\|>, as Whisper's has"):
        settled(made, data, teacher=str(tmp_path / "half"))


def test_a_job_out_of_a_file_is_checked(tiny: tuple[Any, str, Path]):
    made, data, _ = tiny
    job, _ = settled(made, data)
    task: Any = tasks.find("distil_speech")
    task.check_job(job)
    bare = {name: value for name, value in job.facts["config"].items() if name != "vocab_size"}
    for name, value, said in (
        ("config", None, "expected a Whisper"),
        ("config", bare, "without one of them"),
        ("config", {**job.facts["config"], "num_mel_bins": 10**6}, "num_mel_bins: expected a number from 1 to 512"),
        ("generation", 3, "generation: expected fields"),
        ("generation", {"a": [0] * 5000}, "plain fields"),
        ("tokenizer", None, "tokenizer: expected what"),
        ("tokenizer", "numbers:9000", "tokenizer: expected at most"),
        ("prompt", [10**6], "prompt: expected a few tokens"),
        ("prompt", [], "prompt: expected a few tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            task.check_job(replace(job, facts={**job.facts, name: value}))


def test_a_whisper_finds_its_task_and_other_folders_do_not(tiny: tuple[Any, str, Path], tmp_path: Path):
    made, _, _ = tiny
    plan = plan_for(Path(made.CHANGES["teacher"]))
    assert (plan.task.name, plan.model) == ("distil_speech", "whisper")
    with pytest.raises(ValueError, match="model: expected whisper, as the teacher is, got 'llama'"):
        plan_for(Path(made.CHANGES["teacher"]), "llama")
    (tmp_path / "config.json").write_text("[" * 10**5)
    with pytest.raises(ValueError, match="nested too deep"):
        plan_for(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": 3}')
    with pytest.raises(ValueError, match="does not tell a model_type"):
        plan_for(tmp_path)


def test_a_teacher_in_half_precision_teaches_a_student_that_is_not(tiny: tuple[Any, str, Path]):
    made, data, _ = tiny
    job, opened = settled(made, data)
    work = DistilSpeechWork(job, opened, torch.device("cpu"))
    work.lesson = Lesson(
        job.settings, lambda: whisper.teacher_of(Path(job.facts["teacher"]), torch.bfloat16), work.device
    )
    student = network_of(job)
    begin(student, work.lesson.teacher.state_dict(), "teacher")
    batch = work.ready(next(iter(work.train_loader())))
    with torch.autocast("cpu", torch.bfloat16):
        loss = work.loss(student, batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert "Layer by layer" in [section.title for section in work.report(student)]


def test_dropout_stays_out_of_it(tiny: tuple[Any, str, Path], tmp_path: Path):
    made, _, _ = tiny
    network = whisper.teacher_of(Path(made.teacher(tmp_path / "a", dropout=0.5, encoder_layerdrop=0.5)), torch.float32)
    heard = sounds()
    assert torch.equal(network.train()(heard), network.eval()(heard))


def test_features_alone_ask_no_decoder(tiny: tuple[Any, str, Path]):
    made, data, _ = tiny
    job, opened = settled(made, data, logit_weight=0.0)
    work = DistilSpeechWork(job, opened, torch.device("cpu"))
    assert work.lesson.chosen.weights() == Weights(0.0, 1.0, 0.0, 1.0)
    student = network_of(job)
    begin(student, work.lesson.teacher.state_dict(), "teacher")
    student.model.model.decoder.register_forward_pre_hook(lambda *_: pytest.fail("the decoder was asked"))
    batch = work.ready(next(iter(work.train_loader())))
    assert work.loss(student, batch).item() > 0

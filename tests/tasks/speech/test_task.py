"""Speech as a task: data is opened, letters are settled, texts are judged, and a stream hears what the whole does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from typer.testing import CliRunner

from affinear import tasks
from affinear.cli import build_app
from affinear.models.speech import Conformer
from affinear.tasks.speech import TASK
from affinear.tasks.speech.audio import read_audio
from affinear.tasks.speech.hearing import Ear
from affinear.tasks.speech.listening import Listener, words_of
from affinear.tasks.speech.recordings import Voices
from affinear.tasks.speech.report import alignment, spectrogram
from affinear.tasks.speech.samples import batch_of
from affinear.tasks.speech.settings import Hearing, Writing
from affinear.tasks.speech.task import timed_words
from affinear.tasks.speech.text import Spelling
from affinear.tasks.speech.work import ctc, spelling_of
from affinear.train.recipe import Recipe
from affinear.train.task import Job, Trained

from .tiny import MODEL_ARGS, RATE, write

CPU = torch.device("cpu")


def manifest(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def voices(folder: Path, count: int = 6, text: str = "abba cab", **more: Any) -> Voices:
    random = np.random.default_rng()
    rows: list[dict[str, Any]] = []
    for number in range(count):
        write(folder / f"{number}.wav", random.normal(0, 0.1, int(random.uniform(0.9, 1.5) * RATE)))
        rows.append({"audio": f"{number}.wav", "text": text, "speaker": f"speaker {number % 4}"})
    return TASK.open(manifest(folder / "all.jsonl", rows), settings(**more))


def settings(**changes: Any) -> Hearing:
    return Hearing().changed(**{"sample_rate": RATE, "bands": 16, "band_width": 4, "batch_seconds": 5.0, **changes})


def trained_on(data: Voices, **args: Any) -> Trained[Voices, Hearing]:
    """Not trained at all, but far from saying the same everywhere."""
    job = TASK.settle(Job("conformer_small", {**MODEL_ARGS, **args}, Recipe(batch_size=4, workers=0), settings()), data)
    network = TASK.network(job)
    assert isinstance(network, Conformer)
    nn.init.normal_(network.head.weight, std=2.0)
    return Trained(TASK, job, network.eval())


def test_speakers_are_held_out_where_nobody_says_which(tmp_path: Path):
    data = voices(tmp_path)
    heard, held = ({row.speaker for row in half.rows} for half in (data.train, data.test))
    assert not heard & held
    assert sum(data.sizes) == 6
    assert "speaker" in data.name


def test_librispeech_is_read_as_it_lies(tmp_path: Path):
    for split, speakers in (("train-clean-100", ("19", "26")), ("dev-clean", ("84",)), ("test-clean", ("61",))):
        for speaker in speakers:
            folder = tmp_path / split / speaker / "121"
            folder.mkdir(parents=True)
            write(folder / f"{speaker}-121-0000.wav", np.zeros(RATE))
            write(folder / f"{speaker}-121-0001.wav", np.zeros(RATE // 2))
            told = f"{speaker}-121-0000 HELLO THERE\n{speaker}-121-0001 IT'S ME\n"
            (folder / f"{speaker}-121.trans.txt").write_text(told)
    data = TASK.open(str(tmp_path), settings())
    assert data.sizes == (4, 2)
    assert [(row.text, row.speaker, row.seconds) for row in data.test.rows] == [
        ("hello there", "84", 1.0),
        ("it's me", "84", 0.5),
    ]
    assert {row.speaker for row in TASK.open(str(tmp_path), settings(test_split="test-clean")).test.rows} == {"61"}
    (tmp_path / "dev-clean/84/121/84-121-0001.wav").unlink()
    with pytest.raises(ValueError, match=r"84-121-0001\.flac beside"):
        TASK.open(str(tmp_path), settings())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("no json", "expected an object of JSON"),
        ('{"audio": "a.wav", "text": 3}', "expected a text in the field 'text'"),
        ('{"audio": "a.wav", "text": "a", "begin": -1}', "expected seconds in the field 'begin'"),
        ('{"audio": "a.wav", "text": "a", "begin": 2, "end": 1}', "expected an end after"),
    ],
)
def test_a_wrong_line_of_a_manifest_is_named(tmp_path: Path, line: str, said: str):
    (tmp_path / "all.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(ValueError, match=f"line 2: {said}"):
        TASK.open(str(tmp_path / "all.jsonl"), settings())


def test_parts_of_files_are_recordings_and_memory_changes_nothing(tmp_path: Path):
    wave = np.random.default_rng().normal(0, 0.1, 3 * RATE)
    write(tmp_path / "a.wav", wave)
    rows = [{"audio": "a.wav", "text": "a", "begin": i, "end": i + 1} for i in range(3)]
    opened = TASK.open(manifest(tmp_path / "all.jsonl", rows), settings())
    kept = TASK.open(str(tmp_path / "all.jsonl"), settings(memory=True))
    assert opened.fingerprint == kept.fingerprint
    whole = read_audio(tmp_path / "a.wav", RATE)
    for half, stored in ((opened.train, kept.train), (opened.test, kept.test)):
        for i, row in enumerate(half.rows):
            assert row.seconds == 1
            assert torch.equal(half[i], whole[round(row.begin * RATE) : round((row.begin + 1) * RATE)])
            assert torch.equal(stored[i], half[i])


def test_a_part_ends_where_its_duration_says(tmp_path: Path):
    write(tmp_path / "a.wav", np.random.default_rng().normal(0, 0.1, 3 * RATE))
    rows = [{"audio": "a.wav", "text": "a", "begin": i, "duration": 1} for i in range(3)]
    data = TASK.open(manifest(tmp_path / "all.jsonl", rows), settings())
    assert [len(half[i]) for half in (data.train, data.test) for i in range(len(half))] == [RATE] * 3


def test_a_manifest_of_another_editor_is_read(tmp_path: Path):
    for name in "ab":
        write(tmp_path / f"{name}.wav", np.zeros(RATE))
    lines = [f'{{"audio": "{name}.wav", "text": "red\u2028blue\x85green"}}' for name in "ab"]
    (tmp_path / "all.jsonl").write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    data = TASK.open(str(tmp_path / "all.jsonl"), settings())
    assert [row.text for half in (data.train, data.test) for row in half.rows] == ["red blue green"] * 2


def test_recordings_in_folders_of_their_own_may_share_a_name(tmp_path: Path):
    rows: list[dict[str, Any]] = []
    for number in range(4):
        (tmp_path / f"{number}").mkdir()
        write(tmp_path / f"{number}" / "talk.wav", np.zeros(RATE))
        rows.append({"audio": f"{number}/talk.wav", "text": "a"})
    assert TASK.open(manifest(tmp_path / "all.jsonl", rows), settings()).sizes == (3, 1)


def test_recordings_that_are_gone_are_named_before_anything_is_learnt(tmp_path: Path):
    data = voices(tmp_path, count=12)
    for row in data.train.rows[:3]:
        Path(row.path).unlink()
    data = TASK.open(str(tmp_path / "all.jsonl"), settings())
    trained = trained_on(data)
    assert "3 that cannot be read, " in TASK.summary(trained.job, data)
    assert "too long or too short" not in TASK.summary(trained.job, data)
    with pytest.raises(ValueError, match=rf"3 of the {len(data.train)} train recordings cannot be read, .*0\.wav"):
        TASK.work(trained.job, data, CPU).train_loader()


def test_what_has_no_word_in_its_text_is_left_out_and_counted(tmp_path: Path):
    texts = ["a", "b", " ", "...", "ab"]
    for i in range(5):
        write(tmp_path / f"{i}.wav", np.zeros(RATE))
    rows = [{"audio": f"{i}.wav", "text": text} for i, text in enumerate(texts)]
    data = TASK.open(manifest(tmp_path / "all.jsonl", rows), settings())
    assert sum(data.sizes) == 3
    assert "2 without a word left out" in data.name


def test_what_does_not_fit_into_memory_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trained = trained_on(voices(tmp_path))
    path = str(write(tmp_path / "long.wav", np.zeros(RATE)))

    def full(*_: Any) -> Any:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Conformer, "forward", full)
    (answer,) = TASK.predict(trained, [path], Writing())
    assert answer.error is not None
    assert "does not fit into memory" in answer.error


def test_a_letter_outside_the_alphabet_is_refused_with_its_recording(tmp_path: Path):
    data = voices(tmp_path, text="abba zoo")
    job = Job("conformer_small", MODEL_ARGS, Recipe(), settings(alphabet="abco"))
    with pytest.raises(ValueError, match=r"alphabet: expected letters of 'abco', got 'z' in the text of .*\.wav"):
        TASK.settle(job, data)
    assert TASK.settle(Job("conformer_small", MODEL_ARGS, Recipe(), settings()), data).facts["pieces"] == list("▁aboz")
    joined = TASK.settle(Job("conformer_small", MODEL_ARGS, Recipe(), settings(tokens="bpe", vocabulary=8)), data)
    assert len(joined.facts["pieces"]) == 8
    assert spelling_of(joined).decode(spelling_of(joined).encode("abba zoo")) == "abba zoo"


def test_a_causal_network_normalises_by_the_corpus(tmp_path: Path):
    data = voices(tmp_path)
    assert trained_on(data).job.settings.normalization == "recording"
    job = trained_on(data, causal=True).job
    assert job.settings.normalization == "corpus"
    ear = Ear(job.settings, job.facts)
    features = torch.cat([ear(data.train[i][None])[0][0] for i in range(len(data.train))])
    torch.testing.assert_close(features.mean(dim=0), torch.zeros(16), atol=1e-3, rtol=0)
    torch.testing.assert_close(features.std(dim=0), torch.ones(16), atol=1e-2, rtol=0)
    with pytest.raises(ValueError, match="normalization: expected 'corpus'"):
        TASK.settle(Job("conformer_small", {"causal": True}, Recipe(), settings(normalization="recording")), data)


def test_features_do_not_depend_on_the_batch(tmp_path: Path):
    job = trained_on(voices(tmp_path)).job
    ear, waves = Ear(job.settings, job.facts), [torch.randn(size) for size in (3000, 8000, 700)]
    batch = batch_of([(wave, [], 1.0, i) for i, wave in enumerate(waves)], 3)
    features, frames = ear(batch.waves, batch.samples)
    for i, wave in enumerate(waves):
        alone, count = ear(wave[None])
        assert count.item() == frames[i].item()
        torch.testing.assert_close(features[i, : frames[i]], alone[0], atol=1e-4, rtol=1e-4)
        assert not features[i, frames[i] :].any()


def test_the_loss_is_a_mean_of_recordings_whoever_shares_the_batch(tmp_path: Path):
    data = voices(tmp_path, count=9)
    trained = trained_on(data)
    work = TASK.work(trained.job, data, CPU)
    batch = next(iter(work.train_loader()))
    heard = work.ready(batch)
    logits, lengths = trained.network(heard.features, heard.frames)
    losses = ctc(logits, lengths, batch.targets, batch.lengths)
    torch.testing.assert_close(work.loss(trained.network, heard), losses.mean())
    direct = torch.nn.functional.ctc_loss(
        logits.log_softmax(-1).transpose(0, 1), batch.targets, lengths, batch.lengths, reduction="mean"
    )
    torch.testing.assert_close(losses.mean(), direct)
    assert work.per_step > 0


def test_a_network_that_hears_right_has_no_errors(tmp_path: Path):
    data = voices(tmp_path, count=8, text="a bad cab")
    work = TASK.work(trained_on(data).job, data, CPU)
    numbers = work.spelling.encode("a bad cab")

    class Oracle(nn.Module):
        def forward(self, features: torch.Tensor, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            said = [x for number in numbers for x in (number, 0)]
            logits = nn.functional.one_hot(torch.tensor(said), work.spelling.size).float()
            return logits.expand(len(features), -1, -1), torch.full((len(features),), len(said))

    score = work.score(Oracle(), map(work.ready, work.test_loader()), Accelerator(cpu=True))
    assert score["wer"] == score["cer"] == 0
    assert score.count == len(data.test)


def test_recordings_too_long_or_too_short_for_their_text_are_not_learnt_from(tmp_path: Path):
    data = voices(tmp_path, text="abcdefghijklmnopqrstuvwxyz " * 3)
    work = TASK.work(trained_on(data).job, data, CPU)
    with pytest.raises(ValueError, match=r"none of .* has a token, 40 ms, for every piece"):
        work.train_loader()
    assert "too long or too short" in TASK.summary(trained_on(data).job, data)


@pytest.mark.parametrize("mechanism", ["mala", "nala", "none"])
def test_a_stream_says_what_the_whole_says_token_for_token(tmp_path: Path, mechanism: str):
    random = np.random.default_rng()
    data = voices(tmp_path)
    trained = trained_on(data, causal=True, mechanism=mechanism)
    ear, spelling = Ear(trained.job.settings, trained.job.facts), spelling_of(trained.job)
    assert isinstance(trained.network, Conformer)
    for rate, samples in ((RATE, 1), (RATE, 700), (11_025, 4 * 11_025)):
        path = write(tmp_path / "heard.wav", random.normal(0, 0.1, samples), rate)
        wave = read_audio(path, RATE)
        with torch.no_grad():
            expected = trained.network(ear(wave[None])[0])[0][0].argmax(-1).tolist()
        found: list[int] = []
        listener, rest, words = Listener(trained.network, ear, spelling), wave, list[str]()
        while len(rest):
            size = int(random.integers(1, 4000))
            words += listener.hear(rest[:size])
            found += listener.numbers
            rest = rest[size:]
        words += listener.end()
        assert found + listener.numbers == expected
        (whole,) = TASK.predict(trained, [str(path)], Writing())
        assert " ".join(words) == whole.content["text"] == " ".join(TASK.follow(trained, str(path), Writing()))
        assert [one["word"] for one in whole.content["words"]] == words


def test_what_a_listener_holds_does_not_grow(tmp_path: Path):
    trained = trained_on(voices(tmp_path), causal=True)
    ear = Ear(trained.job.settings, trained.job.facts)
    assert isinstance(trained.network, Conformer)
    listener = Listener(trained.network, ear, spelling_of(trained.job))
    held: set[tuple[int, int]] = set()
    for _ in range(6):
        list(words_of_piece(listener))
        held.add((listener.stream.numbers, listener.stream.frames.untyped_storage().nbytes()))
        assert len(listener._wave) < listener.block + ear.mel.length
    assert len(held) == 1


def words_of_piece(listener: Listener) -> list[str]:
    return listener.hear(torch.randn(RATE))


def test_only_what_can_stream_streams(tmp_path: Path):
    path = str(write(tmp_path / "a.wav", np.zeros(RATE)))
    data = voices(tmp_path)
    with pytest.raises(ValueError, match="stream: expected features normalised by the corpus"):
        TASK.follow(trained_on(data), path, Writing())
    with pytest.raises(ValueError, match="got a causal one with softmax"):
        TASK.follow(trained_on(data, causal=True, mechanism="softmax"), path, Writing())
    with pytest.raises(ValueError, match="beam: expected 0"):
        TASK.follow(trained_on(data, causal=True), path, Writing(beam=4))
    with pytest.raises(ValueError, match="nothing of that name"):
        list(TASK.follow(trained_on(data, causal=True), str(tmp_path / "absent.wav"), Writing()))


def test_a_recording_that_cannot_be_read_does_not_end_the_stream_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = str(write(tmp_path / "a.wav", np.random.default_rng().normal(0, 0.1, RATE)))
    trained = trained_on(voices(tmp_path), causal=True)
    monkeypatch.setattr(tasks, "load_trained", lambda *given, **named: trained)  # pyright: ignore

    def stream(*more: str) -> Any:
        return CliRunner().invoke(build_app(), ["predict", "--stream", "--weights", "any", *more])

    told = stream("absent.wav", path)
    assert told.exit_code == 1
    first, second = told.stdout.splitlines()
    assert first == "absent.wav: expected a recording, got nothing of that name."
    assert second.startswith(f"{path}:")
    for option in (["--json"], ["--output", str(tmp_path)]):
        refused = stream(path, *option)
        assert refused.exit_code == 1
        assert f"{option[0]}: --stream prints words as they come" in refused.stderr


def test_a_folder_is_asked_about_recording_by_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trained = trained_on(voices(tmp_path), causal=True)
    monkeypatch.setattr(tasks, "load_trained", lambda *given, **named: trained)  # pyright: ignore
    torch.nn.init.constant_(trained.network.head.bias, 0)  # pyright: ignore
    torch.nn.init.constant_(trained.network.head.weight, 0)  # pyright: ignore
    (folder := tmp_path / "talks" / "more").mkdir(parents=True)
    paths = [write(folder.parent / "b.wav", np.zeros(RATE)), write(folder / "a.WAV", np.zeros(1))]
    (folder / "notes.txt").write_text("no recording")
    for more in ([], ["--stream"]):
        told = CliRunner().invoke(build_app(), ["predict", *more, "--weights", "any", str(folder.parent)])
        assert told.exit_code == 0, told.output
        assert told.stdout.splitlines() == [f"{path}: (nothing)" for path in paths]


def test_words_are_whole_when_the_next_begins():
    class Fixed:
        def __init__(self) -> None:
            self.said = iter([["the"], [], ["cat"]])

        def hear(self, wave: torch.Tensor) -> list[str]:
            return next(self.said)

        def end(self) -> list[str]:
            return ["sat"]

    listener: Any = Fixed()
    assert list(words_of(listener, [torch.zeros(1)] * 3)) == ["the", "cat", "sat"]


def test_silence_stereo_and_eight_bits_are_answered(tmp_path: Path):
    trained = trained_on(voices(tmp_path))
    noise = np.random.default_rng().uniform(-0.5, 0.5, RATE)
    sources = [
        write(tmp_path / "silence.wav", np.zeros(RATE)),
        write(tmp_path / "one.wav", [0.5]),
        write(tmp_path / "stereo.wav", noise.repeat(2), channels=2),
        write(tmp_path / "bits.wav", noise, width=1),
        write(tmp_path / "mono.wav", noise),
    ]
    answers = list(TASK.predict(trained, [str(path) for path in sources], Writing()))
    assert [answer.error for answer in answers] == [None] * 5
    assert answers[2].content == answers[4].content
    assert all(answer.text for answer in answers)
    assert answers[1].content["seconds"] == round(1 / RATE, 3)


def test_a_beam_and_a_language_model_can_be_asked_for(tmp_path: Path):
    trained = trained_on(voices(tmp_path))
    path = str(write(tmp_path / "a.wav", np.random.default_rng().normal(0, 0.1, RATE // 2)))
    (tmp_path / "lm.txt").write_text("abba cab\ncab cab\n")
    (answer,) = TASK.predict(trained, [path], Writing(beam=4, lm=str(tmp_path / "lm.txt")))
    assert answer.error is None
    assert isinstance(answer.content["text"], str)
    with pytest.raises(ValueError, match="lm: expected a beam"):
        Writing(lm="lm.txt")


def test_words_have_the_seconds_at_which_they_begin():
    spelling = Spelling.of_letters([], "abc")
    numbers = [0, 2, 2, 3, 0, 1, 1, 0, 4, 4]  # ab, a gap, c
    assert timed_words(numbers, spelling) == [("ab", 0.04), ("c", 0.32)]
    joined = Spelling(("▁", "a", "b", "▁a"), (("▁", "a"),))
    assert timed_words([4, 3, 0, 4], joined) == [("ab", 0.0), ("a", 0.12)]


def test_a_job_out_of_a_file_is_looked_at(tmp_path: Path):
    job = trained_on(voices(tmp_path), causal=True).job
    TASK.check_job(job)
    for name, value, said in (
        ("pieces", [], "pieces: expected"),
        ("pieces", ["a" * 100], "pieces: expected"),
        ("merges", [["a"]], "merges: expected"),
        ("mean", [0.0], "mean: expected a number for each band"),
        ("std", [0.0] * 16, "std: expected a number for each band"),
    ):
        with pytest.raises(ValueError, match=said):
            TASK.check_job(Job(job.model, job.model_args, job.recipe, job.settings, {**job.facts, name: value}))
    with pytest.raises(ValueError, match="num_tokens: expected what texts"):
        TASK.network(Job(job.model, {"num_tokens": 4}, job.recipe, job.settings, job.facts))
    with pytest.raises(ValueError, match="mavit_tiny"):
        TASK.network(Job("mavit_tiny", {}, job.recipe, job.settings, job.facts))


def test_every_variant_can_be_made(tmp_path: Path):
    data = voices(tmp_path)
    for name, args in TASK.variants("conformer_small").items():
        network = Conformer(5, **{**MODEL_ARGS, **args})
        assert (network.mechanism, network.positions) == (
            ("softmax", "relative") if name == "softmax_relative" else (name, "rotary")
        )
        assert TASK.variant_about(name)
    assert TASK.limited(data, 2).sizes == (2, len(data.test.rows[:2]))


def test_the_report_shows_words_and_escapes_them():
    from affinear.tasks.speech.metric import align

    page = alignment(align(["<b>", "cat"], ["cat", "dog"]))
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    image = spectrogram(np.random.default_rng().normal(size=(2000, 80)).astype(np.float32))
    assert image.size == (960, 80)

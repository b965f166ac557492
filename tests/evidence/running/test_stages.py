"""Students that are taught in stages: stages go on where they were stopped, and files say what they hold."""

from __future__ import annotations

import bz2
import json
import time
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

import affinear


def small() -> tuple[Any, Any]:
    torch.manual_seed(0)
    teacher = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, embed_dim=24, num_heads=2).eval()
    return teacher, affinear.linearize(teacher, "mala", feature_map="learned", gain=True)[0]


class Stops:
    """A clock that is over after so many looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def over(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_a_stage_that_was_stopped_ends_with_the_same_weights(script: Any, tmp_path: Path):
    stages = script("running.stages")
    stage = stages.Stage("layers", 6, 1e-3, 1e-2)

    def taught(kept: Path, clock: Any) -> tuple[Any, Any]:
        teacher, student = small()

        def loss(step: int) -> torch.Tensor:
            images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(step))
            return stages.layer_loss(teacher, student, lambda network: network(images))

        return stages.taught(student, stage, stages.layers_of(student), loss, kept, clock), student

    whole, student = taught(tmp_path / "whole.pt", stages.Clock(1))
    assert whole["steps"] == 6
    assert taught(tmp_path / "parts.pt", Stops(3))[0] is None
    again, other = taught(tmp_path / "parts.pt", stages.Clock(1))
    assert again["losses"] == whole["losses"]
    fresh = small()[1].state_dict()
    for name, value in student.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
        assert torch.equal(value, fresh[name]) == (".attn." not in name)  # nothing else was taught


def test_a_stage_of_so_many_seconds_ends_with_them(script: Any, tmp_path: Path):
    stages = script("running.stages")
    _, stage = stages.stages_of((1, 3), (0.1, 0.1), (0.1, 0.1), seconds=0.8)
    weight, rates = torch.nn.Linear(1, 1), list[float]()

    def look() -> float:
        return float(len(rates))

    def loss(step: int) -> torch.Tensor:
        rates.append(stage.rate(step))
        time.sleep(0.01)
        return weight(torch.ones(1, 1)).square().sum()

    told = stages.taught(weight, stage, ["weight"], loss, tmp_path / "kept.pt", stages.Clock(1), look)
    assert stage.seconds == pytest.approx(0.6)
    assert 0.6 <= told["seconds"] < 0.9
    assert told["steps"] == len(rates) <= 60
    assert [step for step, _ in told["seen"]] == [number for _, number in told["seen"]]
    assert len(told["seen"]) == len(told["losses"]) > 10


def test_a_rate_rises_and_falls(script: Any):
    stage = script("running.stages").Stage("whole", 200, 1.0, 1.0)
    rates = [stage.rate(stage.done(step + 1, 0.0)) for step in range(200)]
    assert rates[:20] == pytest.approx([(step + 1) / 20 for step in range(20)])
    assert rates[19:] == sorted(rates[19:], reverse=True)
    assert rates[-1] == pytest.approx(0.01)


def test_rows_of_other_settings_are_refused(script: Any, tmp_path: Path):
    stages = script("running.stages")
    rows = stages.Rows(tmp_path / "rows.json", {"steps": (1, 2)})
    rows.add(mechanism="mala", row="swapped", wer=0.5)
    assert stages.Rows(rows.path, {"steps": (1, 2)}).find(mechanism="mala", row="swapped")["wer"] == 0.5
    with pytest.raises(ValueError, match="expected rows of"):
        stages.Rows(rows.path, {"steps": (1, 3)})


def theirs() -> list[str]:
    """The names in OpenAI's file of a Whisper with one layer in each half."""
    names = ["encoder.conv1.weight", "encoder.conv1.bias", "encoder.conv2.weight", "encoder.conv2.bias"]
    names += ["encoder.positional_embedding", "decoder.positional_embedding", "decoder.token_embedding.weight"]
    norms = ["encoder.ln_post", "decoder.ln"]
    for half, kinds in (("encoder", ["attn"]), ("decoder", ["attn", "cross_attn"])):
        block = f"{half}.blocks.0"
        norms += [f"{block}.mlp_ln", *(f"{block}.{kind}_ln" for kind in kinds), f"{block}.mlp.0", f"{block}.mlp.2"]
        norms += [f"{block}.{kind}.{part}" for kind in kinds for part in ("query", "value", "out")]
        names += [f"{block}.{kind}.key.weight" for kind in kinds]
    return names + [f"{name}.{what}" for name in norms for what in ("weight", "bias")]


def test_every_weight_of_whisper_has_its_place(script: Any):
    config = WhisperConfig(encoder_layers=1, decoder_layers=1)
    with torch.device("meta"):
        known = set(WhisperForConditionalGeneration(config).state_dict()) - {"proj_out.weight"}
    assert {script("packing.pack_teachers").renamed(name) for name in theirs()} == known


def test_words_become_tokens_and_words_again(script: Any):
    pieces = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"\xc3\xa9"]
    spelling = script("packing.pack_teachers").Spelling(pieces)
    text = " the café, don't! 42"
    tokens = spelling.encode(text)
    assert spelling.decode([*tokens, 50257]) == text
    assert tokens[0] == 258 or tokens[:2] == [32, 257]
    assert 259 in tokens


def test_positions_of_a_longer_whisper_are_those_it_has_and_more(script: Any):
    hearing = script("linearize_whisper")
    config = WhisperConfig(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, vocab_size=99,
                           decoder_attention_heads=2, max_source_positions=20, pad_token_id=0, bos_token_id=1,
                           eos_token_id=2, decoder_start_token_id=1)  # fmt: skip
    network = WhisperForConditionalGeneration(config).eval()
    assert torch.allclose(network.model.encoder.embed_positions.weight, hearing.sines(20, 32), atol=1e-6)
    sounds = torch.randn(1, 80, 40)
    with torch.no_grad():
        same = hearing.longer(network, 20)(sounds).last_hidden_state
        assert torch.equal(same, network.model.encoder(sounds).last_hidden_state)
        assert hearing.longer(network, 50)(torch.randn(1, 80, 100)).last_hidden_state.shape == (1, 50, 32)
    assert network.config.max_source_positions == 20  # the network itself stays as it was


def test_windows_of_a_part_that_is_missing_are_left_out(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    steps = torch.randint(0, 50, (80, 7), dtype=torch.uint8)
    packed = torch.diff(steps.int(), dim=1, prepend=torch.zeros(80, 1, dtype=torch.int32)).to(torch.uint8)
    (tmp_path / "windows-0.bz2").write_bytes(bz2.compress(packed.numpy().tobytes()))
    rows = [{"part": f"windows-{part}.bz2", "speaker": "a", "frames": 7, "floor": 0.0} for part in (0, 1)]
    (tmp_path / "windows.json").write_text(json.dumps(rows))
    kept, found = script("packing.pack_teachers").read_windows(tmp_path)
    assert kept == rows[:1]
    assert torch.equal(found[0], steps)
    assert "windows-1.bz2 is not in" in capsys.readouterr().out


def test_a_probe_tells_what_a_stage_would_take(script: Any, capsys: pytest.CaptureFixture[str]):
    stages, weight = script("running.stages"), torch.ones(1, requires_grad=True)
    layers, whole = stages.stages_of((30, 7), (1e-3, 1e-4), (1e-2, 1e-3))
    assert (layers.name, layers.steps, whole.name, whole.steps) == ("layers", 30, "whole", 7)
    seen: list[int] = []

    def loss(step: int) -> torch.Tensor:
        seen.append(step)
        return weight.square().sum()

    assert stages.probed("mala", layers, loss, torch.device("cpu")) > 0
    assert seen == [0, 1, 2, 3]
    assert weight.grad is not None
    assert "mala layers:" in capsys.readouterr().out

"""Teachers of speech: Whisper, out of a folder of transformers'. The encoder is what becomes linear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from ....linearizing.distil import Weights, relative_error
from ....linearizing.divergence import chunked_divergence
from ....models import making
from ....models.speech import WhisperMel
from ...language import spelling
from ...language.spelling import Spelling
from .. import hugging
from .transcripts import Transcripts

KIND = "whisper"
GENERATION = "generation_config.json"
MANY = 51_865  # tokens that a Whisper of several languages has at least
ENCODER, POSITIONS = "model.model.encoder.", "embed_positions"
# What the released ones have, and what anybody's may have.
SIZES: Mapping[str, tuple[int, int, int]] = {
    "num_mel_bins": (80, 1, 512),
    "max_source_positions": (1500, 2, 2**16),
    "max_target_positions": (448, 32, 2**16),
    "vocab_size": (51_865, 2, 2**20),
}


@dataclass(frozen=True)
class Source:
    """Where a teacher is, and what it is.

    Attributes:
        path: A folder of transformers'.
        config: All fields of its configuration.
        generation: Those of how it speaks; none where the folder does not tell.
        spelling: Its tokens.
        digest: Of its weights.
    """

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    spelling: Spelling
    digest: str

    @property
    def many(self) -> bool:
        """Whether it knows several languages."""
        told = self.generation.get("is_multilingual")
        return told if isinstance(told, bool) else self.config["vocab_size"] >= MANY


def source_of(teacher: str | None) -> Source:
    """Look at a teacher without reading its weights into memory.

    Raises:
        ValueError: If there is none, it is no Whisper with softmax attention, or has no tokenizer.
    """
    if not teacher:
        raise ValueError("teacher: expected a folder of transformers' with a Whisper, got none; --set teacher=PATH")
    path = Path(teacher).expanduser()
    if not hugging.is_hugging(path):
        found = "one without config.json" if path.is_dir() else "a file" if path.exists() else "no such"
        raise ValueError(f"teacher: expected a folder of transformers' with a Whisper, got {found}: {teacher}")
    config = checked_config(hugging.fields_in(path / hugging.CONFIG), str(path))
    if not (path / "tokenizer.json").is_file():
        raise ValueError(
            f"tokenizer: expected tokenizer.json in {path}, found none; transformers' tokenizer writes it there with "
            "save_pretrained"
        )
    own = spelling.read(hugging.file_in(path, "tokenizer.json"))
    if own.size > config["vocab_size"]:
        raise ValueError(
            f"tokenizer: expected at most {config['vocab_size']} tokens, as the teacher knows, got {own.size}: {path}"
        )
    generation = hugging.fields_in(path / GENERATION) if (path / GENERATION).is_file() else {}
    hugging.check_plain(generation, str(path / GENERATION))
    return Source(path, config, generation, own, hugging.digest_in(path))


def checked_config(told: Any, source: str) -> dict[str, Any]:
    """The fields of a configuration that a network is made with, its sizes among them.

    Raises:
        ValueError: If it is none of a Whisper, or says what it may not.
    """
    fields = hugging.checked_fields(told, source, (KIND,), "a Whisper")
    for name, (usual, least, most) in SIZES.items():
        value = fields.setdefault(name, usual)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{source}: {name}: expected a number from {least} to {most}, got {making.short(value)}")
    return fields


def teacher_of(source: Path, dtype: torch.dtype) -> Recogniser:
    """The teacher itself.

    Raises:
        ValueError: If its weights cannot be read, or are not all there.
    """
    from transformers import AutoModelForSpeechSeq2Seq

    fields = checked_config(hugging.fields_in(source / hugging.CONFIG), str(source))
    return Recogniser(hugging.loaded(source, fields, AutoModelForSpeechSeq2Seq, dtype)).eval()


def made(config: Mapping[str, Any], room: int) -> Recogniser:
    """A softmax network of a configuration, with fresh weights.

    Raises:
        ValueError: If it cannot be made, or would be too large.
    """
    from transformers import AutoModelForSpeechSeq2Seq

    return Recogniser(hugging.made(checked_config(dict(config), "config"), AutoModelForSpeechSeq2Seq, room))


def ear_of(config: Mapping[str, Any]) -> WhisperMel:
    """What makes the features that a network of checked fields takes."""
    return WhisperMel(config["num_mel_bins"], 2 * config["max_source_positions"])


def freeze_but_encoder(network: nn.Module) -> None:
    """Take the decoder, and the positions of sounds, from what learns.

    Raises:
        ValueError: If nothing is left.
    """
    for name, parameter in network.named_parameters():
        if not name.startswith(ENCODER) or POSITIONS in name:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ValueError("low_rank_on: expected linear layers of the encoder, as the decoder stays, got none of them")


class Said(NamedTuple):
    """What a network makes of sounds and the text so far.

    Attributes:
        features: (B, N, C), of the encoder.
        hidden: (B, T, C), of the decoder; None where nobody asked.
    """

    features: Tensor
    hidden: Tensor | None


class Recogniser(nn.Module):
    """Whisper, as a teacher or a student. It never drops anything at random: what is learned is what a teacher says.

    Args:
        model: Of transformers.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: Any = model

    def train(self, mode: bool = True) -> Self:
        """The network as it is: it has nothing that trains otherwise than it answers, but dropout."""
        super().train(mode)
        self.model.eval()
        return self

    @property
    def head(self) -> Tensor:
        """(V, C), what the decoder's features are multiplied with."""
        return self.model.proj_out.weight

    def forward(
        self,
        sounds: Tensor,
        ids: Tensor | None = None,
        wanted: Tensor | None = None,
        like: Taught | None = None,
        asked: Transcripts | None = None,
    ) -> Any:
        """Features (B, N, C) of sounds; or what is said of them, how far that is from a teacher, or a transcript.

        Args:
            sounds: (B, bands, frames), as `WhisperMel` makes them.
            ids: (B, T), int64, tokens that the decoder is given; `Said` is answered.
            wanted: (B, T), int64, tokens that it is to say next; -100 where it does not matter.
            like: What the teacher said to the same; the loss is answered.
            asked: How transcripts are asked for; the tokens of each are answered.
        """
        features = self._encoded(sounds)
        if asked is not None:
            return self._transcribed(features, asked)
        if ids is None:
            return features
        said = Said(features, self._decoded(features, ids) if like is None or like.said.hidden is not None else None)
        if like is None:
            return said
        assert wanted is not None
        return like.loss(said, self.head, wanted)

    def _encoded(self, sounds: Tensor) -> Tensor:
        """What the encoder makes of sounds."""
        encoder = self.model.model.encoder
        return encoder(sounds.to(encoder.conv1.weight.dtype)).last_hidden_state

    def _decoded(self, features: Tensor, ids: Tensor) -> Tensor:
        given: dict[str, Any] = {"encoder_hidden_states": features, "use_cache": False}
        return self.model.model.decoder(input_ids=ids, **given).last_hidden_state

    @torch.no_grad()
    def _transcribed(self, features: Tensor, asked: Transcripts) -> list[list[int]]:
        """The tokens that are heard: always the likeliest, until the end."""
        cache, end, silent = None, asked.end, asked.silent.to(features.device)
        ids = torch.tensor([asked.prompt] * len(features), device=features.device)
        done = torch.zeros(len(features), dtype=torch.bool, device=features.device)
        found: list[Tensor] = []
        for _ in range(asked.most):
            before: dict[str, Any] = {"encoder_hidden_states": features, "past_key_values": cache, "use_cache": True}
            answer = self.model.model.decoder(input_ids=ids, **before)
            cache = answer.past_key_values
            logits = self.model.proj_out(answer.last_hidden_state[:, -1])
            ids = logits.index_fill(1, silent, -torch.inf).argmax(-1, keepdim=True).masked_fill(done[:, None], end)
            done |= ids[:, 0] == end
            if bool(done.all()):
                break
            found.append(ids[:, 0])
        rows: list[list[int]] = torch.stack(found, dim=1).tolist() if found else [[] for _ in features]
        return [[token for token in row if token != end] for row in rows]


@dataclass(frozen=True)
class Taught:
    """What a teacher said, and what each part of the loss counts.

    Attributes:
        said: Its features, and its decoder's where words count.
        head: (V, C), of its words.
        weights: What each part counts.
    """

    said: Said
    head: Tensor
    weights: Weights

    def loss(self, said: Said, head: Tensor, wanted: Tensor) -> Tensor:
        """How far a student's features and words are from these: of words, the mean over each text, and then over all.

        Args:
            said: What the student made of the same sounds and texts.
            head: (V, C), of its words.
            wanted: (B, T), int64, the next tokens; -100 where it does not matter.
        """
        weights = self.weights
        loss = said.features.new_zeros((), dtype=torch.float32)
        if said.hidden is not None and self.said.hidden is not None:
            texts = zip(said.hidden, self.said.hidden, wanted, strict=True)
            losses = [
                chunked_divergence(
                    ours, head, theirs, self.head, tokens,
                    logits=weights.logits, label=weights.labels, temperature=weights.temperature,
                )
                for ours, theirs, tokens in texts
            ]  # fmt: skip
            loss = loss + torch.stack(losses).mean()
        if weights.hidden:
            loss = loss + weights.hidden * relative_error(said.features, self.said.features)
        return loss

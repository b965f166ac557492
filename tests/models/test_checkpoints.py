"""Checkpoints of others are read whole, or refused with everything that is wrong; their code is never run."""

from __future__ import annotations

import argparse
import math
import pickle
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from affinear import cli
from affinear.models import checkpoints, released

NAME = "nalaformer_xtiny"


def released_names(model: Any) -> dict[str, Tensor]:
    """A state dict of NaLaFormer under the released names, made by hand from ours."""
    out: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        part = name.split(".")
        if part[0] == "stem":
            out[f"patch_embed.proj.{3 * int(part[1][-1]) + (part[1][:4] == 'norm')}.{part[2]}"] = tensor
        elif part[0] == "head":
            shape = (*tensor.shape, 1, 1) if name == "head.fc.weight" else tensor.shape
            out[{"fc": "head", "proj": "proj", "norm": "norm"}[part[1]] + f".{part[2]}"] = tensor.reshape(shape)
        elif part[2] == "downsample":
            kind = {"conv": "reduction", "norm": "norm"}[part[3]]
            out[f"layers.{int(part[1]) - 1}.downsample.{kind}.{part[4]}"] = tensor
        else:
            rest = ".".join(part[4:])
            for ours, theirs in (
                ("position1", "cpe1"),
                ("position2", "cpe2"),
                ("attn.position", "attn.lepe"),
                ("attn.qkv", "attn.qkvg"),
                ("attn.norm", "attn.ln"),
                ("attn.proj", "attn.out_proj"),
                ("scale1.gamma", "gamma_1"),
                ("scale2.gamma", "gamma_2"),
                ("norm1.", "norm1.norm."),
                ("norm2.", "norm2.norm."),
                ("mlp.conv", "ffn.dwconv"),
                ("mlp.fc", "ffn.fc"),
            ):
                rest = theirs + rest[len(ours) :] if rest.startswith(ours) else rest
            shape = (1, -1, 1, 1) if rest.startswith("gamma") else tensor.shape
            out[f"layers.{part[1]}.blocks.{part[3]}.{rest}"] = tensor.reshape(shape)
    return out


@pytest.fixture(scope="module")
def network() -> Any:
    return timm.create_model(NAME, num_classes=11).eval()


@pytest.fixture
def file(network: Any, tmp_path: Path) -> Path:
    """A checkpoint as the released training program writes it."""
    path = tmp_path / "checkpoint.pth"
    other = {f"module.{name}": torch.zeros_like(x) for name, x in released_names(network).items()}
    content = {
        "model": released_names(network),
        "model_ema": other,
        "epoch": 299,
        "args": argparse.Namespace(lr=1e-3, model="NaLa_XT"),
        "optimizer": {"state": {}, "param_groups": []},
    }
    torch.save(content, path)
    return path


def same(model: Any, other: Any) -> bool:
    images = torch.randn(1, 3, 32, 64)
    with torch.no_grad():
        return torch.equal(model(images), other.eval()(images))


def test_a_released_checkpoint_becomes_a_safetensors_file(file: Path, network: Any, tmp_path: Path):
    out = tmp_path / "weights.safetensors"
    result = CliRunner().invoke(cli.build_app(), ["convert", str(file), "--model", NAME, "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "Took model; the file also has model_ema: see --nest." in result.output
    assert same(network, timm.create_model(NAME, num_classes=11, checkpoint_path=out))
    with safe_open(out, "pt") as opened:
        assert {name: text for name, text in opened.metadata().items() if name != "sha256"} == {
            **{"format": "pt", "model": NAME, "source": "checkpoint.pth", "nest": "model"},
            "affinear": checkpoints.__version__,
        }


def test_averaged_weights_are_there_for_the_asking(file: Path):
    converted = checkpoints.convert(file, NAME, nest="model_ema")
    assert all(parameter.abs().max() == 0 for parameter in converted.model.parameters())
    with pytest.raises(ValueError, match=r"nest: checkpoint\.pth has weights under model, model_ema, not under 'best'"):
        checkpoints.convert(file, NAME, nest="best")


def test_classes_and_channels_are_those_of_the_checkpoint(tmp_path: Path):
    model = timm.create_model(NAME, num_classes=4, in_chans=1).eval()
    torch.save({"state_dict": released_names(model)}, tmp_path / "a.pth")
    converted = checkpoints.convert(tmp_path / "a.pth", NAME)
    assert converted.model.num_classes == 4
    with torch.no_grad():
        assert converted.model.eval()(torch.randn(1, 1, 32, 32)).shape == (1, 4)


def test_our_own_files_are_read_as_well(network: Any, tmp_path: Path):
    save_file(network.state_dict(), tmp_path / "ours.safetensors")
    assert same(network, checkpoints.convert(tmp_path / "ours.safetensors", NAME).model)


def test_settings_of_a_program_that_is_not_here_are_passed_over(
    network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = ModuleType("yacs.config")
    kind = type("CfgNode", (dict,), {"__module__": "yacs.config"})
    module.CfgNode = kind  # pyright: ignore[reportAttributeAccessIssue]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "yacs", ModuleType("yacs"))
        patch.setitem(sys.modules, "yacs.config", module)
        settings = kind(lr=1.0)
        vars(settings)["frozen"] = True
        torch.save({"model": released_names(network), "config": settings}, tmp_path / "swin.pth")
    assert same(network, checkpoints.convert(tmp_path / "swin.pth", NAME).model)


def test_code_in_a_checkpoint_is_named_and_not_run(tmp_path: Path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    torch.save({"model": Bomb()}, tmp_path / "bomb.pth")
    (tmp_path / "old.pth").write_bytes(pickle.dumps({"model": Bomb()}))
    out = tmp_path / "out.safetensors"
    for name in ("bomb.pth", "old.pth"):
        result = CliRunner().invoke(cli.build_app(), ["convert", str(tmp_path / name), "--model", NAME, "-o", str(out)])
        assert result.exit_code == 1
        assert name in result.output
        assert "run" in result.output
    assert not (tmp_path / "exploded").exists()
    assert not out.exists()


def test_everything_that_does_not_fit_is_named_and_nothing_is_written(file: Path, tmp_path: Path):
    out = tmp_path / "out.safetensors"
    command = ["convert", str(file), "--model", "nalaformer_tiny", "-o", str(out)]
    result = CliRunner().invoke(cli.build_app(), command)
    assert result.exit_code == 1
    assert "tensors do not fit NaLaFormer" in result.output
    assert "missing stages.2.blocks.5.norm1.weight" in result.output
    assert "head.proj.weight is (1024, 384), expected (1024, 512)" in result.output
    assert not out.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "got an empty file"),
        (b"hello, world", "got a text file"),
        ({"epoch": 3}, "expected tensors by name"),
        ([1], "got list"),
    ],
)
def test_files_that_are_no_checkpoints_are_refused(content: Any, reason: str, tmp_path: Path):
    path = tmp_path / "a.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=f"a.pth: .*{reason}"):
        checkpoints.read(path)


def test_a_name_that_is_no_network_is_refused(file: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"a network such as .*mavit_tiny.* got 'mavit_giant'"):
        checkpoints.convert(file, "mavit_giant")
    result = CliRunner().invoke(
        cli.build_app(), ["convert", str(tmp_path / "no.pth"), "--model", NAME, "-o", str(tmp_path / "a.safetensors")]
    )
    assert "no.pth is not a file" in result.output


@pytest.mark.parametrize("family", ["inline_deit", "inline_pvt"])
def test_position_tables_are_resized(family: str):
    sizes: dict[str, dict[str, Any]] = {
        "inline_deit": {"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3},
        "inline_pvt": {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4)},
    }
    small, large = (released.build(family, {**sizes[family], "img_size": side}) for side in (64, 96))
    state = small.state_dict()
    tables = [name for name in state if name.endswith("position.table")]
    for name in tables:
        torch.nn.init.constant_(state[name], 2.0)
    if family == "inline_deit":
        state["pos_embed"] = torch.cat((state.pop("cls_position"), state.pop("position.table").flatten(1, 2)), dim=1)
    else:
        state["pos_embed1"] = state.pop("stem.position.table").flatten(1, 2)
    released.load(large, state)
    for name in tables:
        table = large.state_dict()[name]
        assert table.shape[1] > small.state_dict()[name].shape[1]
        assert torch.equal(table, torch.full_like(table, 2.0))


def test_relative_positions_are_resized():
    given = {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8), "stage_types": "IIIS"}
    small, large = (released.build("inline_swin", {**given, "img_size": side}) for side in (96, 160))
    released.load(large, small.state_dict())
    table = large.state_dict()["stages.3.blocks.0.attn.relative_position_bias_table"]
    assert table.shape == (81, 8)


ODD: dict[str, Callable[[], Tensor]] = {
    "a sparse one": lambda: torch.eye(4).to_sparse(),
    "a quantised one": lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8),
    "one without content": lambda: torch.empty(4, device="meta"),
    "one of torch.complex64": lambda: torch.eye(4, dtype=torch.complex64),
    "one that is larger than its bytes": lambda: torch.zeros(1).expand(10**10),
}


@pytest.mark.filterwarnings("ignore")  # torch's about its own quantised tensors
@pytest.mark.parametrize("kind", ODD)
def test_tensors_that_are_no_plain_numbers_are_named(tmp_path: Path, kind: str):
    torch.save({"model": {"head.weight": ODD[kind]()}}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=f"a.pth: 'head.weight': expected a plain tensor of numbers, got {kind}"):
        checkpoints.read(tmp_path / "a.pth")


def test_names_that_are_none_are_named(tmp_path: Path):
    torch.save({3: torch.zeros(1), "a": torch.zeros(1)}, tmp_path / "a.pth")
    with pytest.raises(ValueError, match=r"a.pth: expected names of tensors, got 3"):
        checkpoints.read(tmp_path / "a.pth")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float):
    tensor = torch.randn(5)
    tensor[3] = value
    save_file({"a": torch.zeros(1), "b": tensor}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="b: expected finite numbers, got 1 of 5 that are NaN or infinite"):
        checkpoints.convert(tmp_path / "a.safetensors", "mavit_tiny")


def test_whole_numbers_and_scalars_in_place_of_weights_are_named(tmp_path: Path):
    state = timm.create_model("inline_deit_tiny", depth=1).state_dict()
    for changed in ({"head.weight": torch.tensor(3.0)}, {"head.weight": torch.zeros(1000, 192, dtype=torch.int64)}):
        torch.save({**state, **changed}, tmp_path / "a.pth")
        with pytest.raises(ValueError, match=r"head\.weight"):
            checkpoints.convert(tmp_path / "a.pth", "inline_deit_tiny")


def test_an_archive_that_unpacks_to_more_than_it_is_is_refused(tmp_path: Path):
    torch.save({"a": torch.zeros(10**6)}, tmp_path / "stored.pth")
    with zipfile.ZipFile(tmp_path / "stored.pth") as stored, zipfile.ZipFile(tmp_path / "a.pth", "w") as packed:
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry), zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="packed, which torch does not do"):
        checkpoints.read(tmp_path / "a.pth")


# How each of the networks of comparison is called where it was released: ours, theirs, in this order.
SKELETON = (
    (r"^stem\.conv(\d)\.", lambda found: f"patch_embed.proj.{3 * int(found[1])}."),
    (r"^stem\.norm(\d)\.", lambda found: f"patch_embed.proj.{3 * int(found[1]) + 1}."),
    (r"^stages\.(\d)\.downsample\.conv\.", lambda found: f"layers.{int(found[1]) - 1}.downsample.reduction."),
    (r"^stages\.(\d)\.downsample\.norm\.", lambda found: f"layers.{int(found[1]) - 1}.downsample.norm."),
    (r"^stages\.", "layers."),
    (r"^head\.fc\.", "head."),
    (r"^head\.(proj|norm)\.", r"\1."),
)
THEIRS: dict[str, tuple[tuple[str, Any], ...]] = {
    "rmt_tiny": (
        *SKELETON,
        (r"\.position1\.", ".pos.conv."),
        (r"\.norm1\.", ".retention_layer_norm."),
        (r"\.norm2\.", ".final_layer_norm."),
        (r"\.attn\.position\.", ".retention.lepe.conv."),
        (r"\.attn\.proj\.", ".retention.out_proj."),
        (r"\.mlp\.conv\.", ".ffn.dwconv.conv."),
        (r"\.mlp\.", ".ffn."),
    ),
    "secvit_tiny": (
        *SKELETON,
        (r"\.position1\.", ".pos."),
        (r"\.norm(\d)\.", r".norm\1.norm."),
        (r"\.attn\.position\.", ".attn.lepe."),
        (r"\.attn\.proj\.", ".attn.out_proj."),
        (r"\.mlp\.conv\.", ".ffn.dwconv."),
        (r"\.mlp\.", ".ffn."),
    ),
    "mila_tiny": (
        (r"^stem\.reduce1\.", "patch_embed.conv1."),
        (r"^stem\.residual(\d)\.", lambda found: f"patch_embed.conv2.{int(found[1]) - 1}."),
        (r"^stem\.reduce2\.", "patch_embed.conv3.0."),
        (r"^stem\.proj\.", "patch_embed.conv3.1."),
        (r"\.downsample\.conv\.", ".downsample.conv.1.conv."),
        (r"\.downsample\.expand\.", ".downsample.conv.0.conv."),
        (r"\.downsample\.reduce\.", ".downsample.conv.2.conv."),
        (r"\.downsample\.norm\.", ".downsample.conv.2.norm."),
        (r"^stages\.(\d)\.downsample\.", lambda found: f"layers.{int(found[1]) - 1}.downsample."),
        (r"^stages\.", "layers."),
        (r"\.position(\d)\.", r".cpe\1."),
        (r"\.attn\.position\.", ".attn.lepe."),
        (r"\.attn\.qkv\.", ".attn.qk."),
        (r"\.attn\.gate\.", ".act_proj."),
        (r"\.attn\.branch\.proj\.", ".in_proj."),
        (r"\.attn\.branch\.conv\.", ".dwc."),
        (r"\.attn\.proj\.", ".out_proj."),
        (r"^head\.fc\.", "head."),
    ),
}


@pytest.mark.parametrize("name", THEIRS)
def test_checkpoints_of_the_networks_of_comparison_are_converted(name: str, tmp_path: Path):
    model = timm.create_model(name, num_classes=3, in_chans=1).eval()
    theirs: dict[str, Tensor] = {}
    for key, tensor in model.state_dict().items():
        for ours, other in THEIRS[name]:
            key = re.sub(ours, other, key)
        if name == "rmt_tiny" and ".attn.qkv." in key:
            for stream, part in zip("qkv", tensor.chunk(3), strict=True):
                theirs[key.replace(".attn.qkv.", f".retention.{stream}_proj.")] = part
        else:
            theirs[key] = tensor
    theirs["layers.0.Relpos.angle" if name == "rmt_tiny" else "layers.0.RoPE.angle"] = torch.zeros(4)
    if name == "mila_tiny":
        del theirs["layers.0.RoPE.angle"]
        theirs["layers.0.blocks.0.attn.rope.rotations"] = torch.zeros(56, 56, 32, 2)
    torch.save({"model": theirs}, tmp_path / "theirs.pth")
    converted = checkpoints.convert(tmp_path / "theirs.pth", name)
    state = converted.model.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())

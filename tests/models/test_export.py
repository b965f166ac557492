"""Networks through torch.export, torch.compile and ONNX: one small network per family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from affinear.models import export, released

PAIR: dict[str, Any] = {"embed_dims": (8, 16), "depths": (1, 1), "num_heads": (1, 2), "num_classes": 5}
SINGLE: dict[str, Any] = {"embed_dims": (8,), "depths": (1,), "num_heads": (1,), "num_classes": 5}
SWIN: dict[str, Any] = {"img_size": 32, "embed_dim": 8, "depths": (1, 1), "num_heads": (2, 4), "num_classes": 5}
DEIT: dict[str, Any] = {"img_size": 64, "embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 5}
# Every block costs seconds here, so NaLaFormer and PVT have their linear one alone. CSwin's stripes come first, as its
# last stage never has any.
SMALL: dict[str, dict[str, Any]] = {
    "mavit": {**PAIR, "mlp_ratios": (2, 2), "projection": 16, "stage_types": "lv"},
    "nalaformer": {**SINGLE, "mlp_ratio": 2.0, "projection": 16, "stage_types": "l"},
    "inline_deit": DEIT,
    "inline_pvt": {**SINGLE, "img_size": 32, "mlp_ratios": (2,), "stage_types": "I"},
    "inline_swin": {**SWIN, "window_size": 8, "stage_types": "IS"},
    "inline_cswin": {**SWIN, "split_size": (2, 2), "stage_types": "SI"},
    "ravlt": {**SINGLE, "mlp_ratios": (2,), "projection": 16, "stage_types": "l"},
    "mila": {"embed_dim": 8, "depths": (1,), "num_heads": (2,), "mlp_ratio": 2, "num_classes": 5},
    "rmt": {**PAIR, "num_heads": (2, 2), "mlp_ratios": (2, 2), "projection": 16, "stage_types": "df"},
    "secvit": {**SINGLE, "mlp_ratios": (2,), "projection": 16, "num_clusters": (4,)},
}
# What only repeats another family's kind of block is left to `make test-all`: a graph takes seconds.
COMPILED = [
    family if family in ("mavit", "inline_deit") else pytest.param(family, marks=pytest.mark.exhaustive)
    for family in SMALL
]
WINDOWED = {"inline_swin": "SwinBlock", "inline_cswin": "StripeAttention"}
FIXED = {**WINDOWED, "secvit": "ClusterAttention"}


def build(family: str) -> nn.Module:
    return released.build(family, SMALL[family])


def close(out: Tensor, truth: Tensor) -> bool:
    return bool((out - truth).norm() <= 1e-5 * truth.norm())


@pytest.fixture(scope="module")
def any_size() -> export.Exported:
    return export.export_onnx(build("inline_deit"), size=(64, 64), dynamic_size=True)


@pytest.fixture(scope="module")
def one_size() -> export.Exported:
    softmax = {"depths": (1,), "num_heads": (2,), "stage_types": "S"}
    return export.export_onnx(released.build("inline_swin", {**SMALL["inline_swin"], **softmax}), size=(32, 48))


@pytest.fixture
def untranslated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exporting without the slow parts: nothing is traced or translated."""
    monkeypatch.setattr(export, "_trace", lambda *_: (None, ("batch",)))
    monkeypatch.setattr(export, "_translate", lambda *_: b"file")


def axes(exported: export.Exported) -> list[str | int]:
    onnx = pytest.importorskip("onnx")
    (image,) = onnx.load_from_string(exported.content).graph.input
    assert image.name == "image"
    return [length.dim_param or length.dim_value for length in image.type.tensor_type.shape.dim]


def test_onnx_takes_any_batch_and_size(any_size: export.Exported) -> None:
    assert any_size.dynamic == ("batch", "height", "width")
    assert axes(any_size) == ["batch", 3, "height", "width"]
    assert any_size.error < 1e-4
    sizes = {shape[2:] for shape in any_size.checked}
    assert len({shape[0] for shape in any_size.checked}) > 1
    assert (32, 32) in sizes
    assert any(height != width for height, width in sizes)
    assert any(height % 2 and width % 2 for height, width in sizes)


def test_onnx_of_windows_takes_any_batch_of_one_size(one_size: export.Exported) -> None:
    assert one_size.dynamic == ("batch",)
    assert axes(one_size) == ["batch", 3, 32, 48]
    assert one_size.checked == ((1, 3, 32, 48), (3, 3, 32, 48))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["mila", "secvit"])  # RAVLT's and RMT's operations are all in these and the others
def test_onnx_of_the_networks_of_comparison(family: str) -> None:
    exported = export.export_onnx(build(family), size=(32, 64))
    assert exported.dynamic == (("batch",) if family == "secvit" else ("batch", "height", "width"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "stage_types"), [("mavit", "l"), ("nalaformer", "v"), ("inline_pvt", "I")])
def test_onnx_of_the_other_families(family: str, stage_types: str) -> None:
    block = {**SMALL[family], **SINGLE, "stage_types": stage_types}
    block |= {"mlp_ratios": (2,)} if family == "mavit" else {}
    exported = export.export_onnx(released.build(family, block), size=(32, 32), dynamic_size=False)
    assert exported.dynamic == ("batch",)


@pytest.mark.exhaustive
def test_onnx_of_stripes() -> None:
    block = {**SMALL["inline_cswin"], "depths": (1, 1), "stage_types": "SS"}
    assert export.export_onnx(released.build("inline_cswin", block), size=(32, 48)).dynamic == ("batch",)


def test_onnx_says_what_it_is_and_not_where_it_was_made(one_size: export.Exported) -> None:
    onnx = pytest.importorskip("onnx")
    proto = onnx.load_from_string(one_size.content)
    onnx.checker.check_model(proto)
    facts = {entry.key: entry.value for entry in proto.metadata_props}
    assert facts["producer"].startswith("affinear ")
    assert (facts["model"], facts["input_size"], facts["num_classes"]) == ("InLineSwin", "[3, 32, 48]", "5")
    assert [(entry.domain, entry.version) for entry in proto.opset_import] == [("", 20)]
    assert [value.name for value in proto.graph.output] == ["logits"]
    assert b"inline_swin.py" not in one_size.content


def test_facts_are_those_that_timm_keeps() -> None:
    model = build("mavit")
    model.pretrained_cfg = {"architecture": "mavit_tiny", "mean": (0.5, 0.4, 0.3), "interpolation": "bicubic"}  # pyright: ignore[reportArgumentType]
    facts = export._facts(model, (2, 3, 64, 32))
    assert facts["model"] == "mavit_tiny"
    assert facts["mean"] == "[0.5, 0.4, 0.3]"
    assert facts["interpolation"] == "bicubic"
    assert "std" not in facts


@pytest.mark.parametrize(  # the others go through it on their way to ONNX
    "family", [pytest.param("mavit", marks=pytest.mark.exhaustive), "inline_cswin"]
)
def test_torch_export_gives_the_same(family: str) -> None:
    model = build(family).eval()
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(2, 3, 32, 64),), dynamic_shapes=({0: Dim("batch")},))
        images = torch.randn(3, 3, 32, 64)
        assert close(program.module()(images), model(images))


@pytest.mark.parametrize("family", COMPILED)
def test_compiled_whole_it_gives_the_same(family: str) -> None:
    torch.compiler.reset()
    model = build(family).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    images = torch.randn(2, 3, 32, 48)
    results = [_with_gradients(run, model, images) for run in (model, compiled)]
    for truth, out in zip(*results, strict=True):
        assert close(out, truth)


def _with_gradients(run: Callable[[Tensor], Tensor], model: nn.Module, images: Tensor) -> list[Tensor]:
    """Logits, and the gradients of image and weights, joined."""
    images = images.clone().requires_grad_()
    logits = run(images)
    inputs = [images, *model.parameters()]
    grads = torch.autograd.grad(logits.square().sum(), inputs, allow_unused=True, materialize_grads=True)
    return [logits.detach(), torch.cat([grad.flatten() for grad in grads])]


@pytest.mark.parametrize("family", SMALL)
def test_windows_and_clusters_alone_fix_the_size(family: str) -> None:
    assert export.fixing_layer(build(family)) == FIXED.get(family)


@pytest.mark.parametrize(("family", "layer"), FIXED.items())
def test_any_size_is_refused_for_windows_and_clusters(family: str, layer: str) -> None:
    model = build(family)
    with pytest.raises(ValueError, match=rf"{type(model).__name__} cuts its maps into windows or clusters \({layer}"):
        export.export_onnx(model, size=(32, 32), dynamic_size=True)


class Asking(nn.Module):
    """A network that does one thing to small images and another to large ones."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3)) if images.shape[2] < 100 else images.amax((2, 3))


def test_a_network_that_asks_for_the_size_gets_a_graph_for_one() -> None:
    _, dynamic = export._trace(Asking(), (2, 3, 32, 32), None)
    assert dynamic == ("batch",)
    with pytest.raises(ValueError, match="Asking asks how large"):
        export._trace(Asking(), (2, 3, 32, 32), True)


@pytest.mark.usefixtures("untranslated")
@pytest.mark.parametrize("wrong", [lambda y: 1.001 * y, lambda y: y * float("nan"), lambda y: y[:, :-1]])
def test_a_wrong_result_is_refused(wrong: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("inline_pvt").eval()
    monkeypatch.setattr(export, "_runner", lambda _: lambda images: wrong(model(images).detach()))
    with pytest.raises(RuntimeError, match="images 1 x 3 x 32 x 32"):
        export.export_onnx(model, size=(32, 32))


@pytest.mark.usefixtures("untranslated")
def test_the_model_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mavit").double().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    evaluated = export._evaluated(model)
    monkeypatch.setattr(export, "_runner", lambda _: evaluated)
    told: list[str] = []
    exported = export.export_onnx(model, size=(32, 64), progress=told.append)
    assert exported.content == b"file"
    assert exported.error == 0
    assert len(told) == 3
    assert all(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ImportError, match=r"needs onnxscript: pip install 'affinear\[export\]'"):
        export.export_onnx(build("mavit"), size=(32, 32))


def test_wrong_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mavit")
    with pytest.raises(ValueError, match="size: expected at least 32 x 32, got 32 x 31"):
        export.export_onnx(model, size=(32, 31))
    with pytest.raises(ValueError, match="opset: expected at least 18, got 9"):
        export.export_onnx(model, size=(32, 32), opset=9)
    monkeypatch.setattr(export, "PROTOBUF_LIMIT", 1000)
    with pytest.raises(ValueError, match="all that one ONNX file can hold"):
        export.export_onnx(model, size=(32, 32))

"""A released detector becomes a file that can be judged and asked like a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from affinear import tasks
from affinear.cli import build_app
from affinear.models.checkpoints import Weights
from affinear.models.detectors import Detector, DetectorSettings
from affinear.tasks.detect.converting import convert

Make = Callable[..., Path]
SMALL: dict[str, Any] = {"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]}
# From torchvision's names to mmdetection's: written from its own modules, not by turning our rules round.
NAMES = (
    (r"^dense\.backbone\.features\.body\.model\.", "backbone."),
    (r"^dense\.backbone\.neck\.inner_blocks\.(\d)\.0\.", r"neck.lateral_convs.\1.conv."),
    (r"^dense\.backbone\.neck\.layer_blocks\.(\d)\.0\.", r"neck.fpn_convs.\1.conv."),
    (r"^dense\.backbone\.neck\.p6\.", "neck.fpn_convs.3.conv."),
    (r"^dense\.backbone\.neck\.p7\.", "neck.fpn_convs.4.conv."),
    (r"^dense\.head\.classification_head\.conv\.(\d)\.0\.", r"bbox_head.cls_convs.\1.conv."),
    (r"^dense\.head\.regression_head\.conv\.(\d)\.0\.", r"bbox_head.reg_convs.\1.conv."),
    (r"^dense\.head\.classification_head\.cls_logits\.", "bbox_head.retina_cls."),
    (r"^dense\.head\.regression_head\.bbox_reg\.", "bbox_head.retina_reg."),
)


def released(classes: int) -> tuple[Detector, dict[str, Tensor]]:
    settings = DetectorSettings("retinanet", norm="none", masked=False, sampling=0, relu_between=False)
    network = Detector("mavit_tiny", classes, settings, SMALL).eval()
    state: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        if ".norms." in name:  # the finest map has a norm there that RetinaNet does not use
            place, part = name.partition(".norms.")[2].split(".")
            state[f"backbone.extra_norms.{int(place) + 1}.norm.{part}"] = tensor
            state[f"backbone.extra_norms.0.norm.{part}"] = torch.ones(8)
            continue
        for pattern, new in NAMES:
            name = re.sub(pattern, new, name)
        state[name] = tensor
    return network, state


@torch.no_grad()
@pytest.mark.exhaustive  # a segmenter goes the same way in tests/tasks/segment
def test_a_converted_detector_is_judged_and_asked_like_a_run(coco: Make, tmp_path: Path) -> None:
    network, state = released(2)
    (tmp_path / "classes.txt").write_text("box\nbar\n")
    converted = convert(Weights(state), "mavit_tiny", tmp_path / "classes.txt", SMALL)
    (tmp_path / "retinanet.safetensors").write_bytes(converted.content)
    trained = tasks.load_trained(tmp_path / "retinanet.safetensors")
    image = torch.rand(3, 64, 64)
    torch.testing.assert_close(trained.network.backbone(image[None])["0"], network.backbone(image[None])["0"])  # pyright: ignore
    assert (trained.job.settings.mask_padding, trained.job.settings.test_side) == (False, 800)
    small = tasks.load_trained(tmp_path / "retinanet.safetensors", test_side=64)
    score = tasks.evaluate(small, str(coco(masks=False)))
    assert (score.count, score["cap"]) == (4, 100)


def test_eighty_classes_are_cocos_and_names_must_be_as_many_as_classes(tmp_path: Path) -> None:
    _, state = released(80)
    content = convert(Weights(state), "mavit_tiny", None, SMALL).content
    head = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    facts = json.loads(head["about"])["facts"]
    assert (len(facts["class_names"]), facts["class_names"][0], facts["categories"][-1]) == (80, "person", 90)
    (tmp_path / "classes.txt").write_text("box\n")
    with pytest.raises(ValueError, match="expected 80 names, as the weights have classes, got 1"):
        convert(Weights(state), "mavit_tiny", tmp_path / "classes.txt", SMALL)


def test_the_command_line_reads_a_detector_and_names_what_does_not_fit(tmp_path: Path) -> None:
    _, state = released(3)
    torch.save({"state_dict": state, "meta": {"epoch": 12}}, tmp_path / "released.pth")
    command = [
        "convert",
        str(tmp_path / "released.pth"),
        "--model",
        "mavit_tiny",
        "-o",
        str(tmp_path / "o.safetensors"),
    ]
    told = CliRunner().invoke(build_app(), command)
    assert told.exit_code == 1
    assert "of its tensors do not fit mavit_tiny under retinanet" in told.output  # the released ones are larger
    assert not (tmp_path / "o.safetensors").exists()

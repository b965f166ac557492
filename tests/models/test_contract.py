"""What a user of timm expects of a model holds for every registered name."""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.data import resolve_data_config
from timm.models import group_parameters
from timm.optim import create_optimizer_v2

from affinear.models.catalogue import PUBLISHED, names, stages_of

EVERY = names()
COUNTS = {
    "mavit_tiny": 16_449_128,
    "mavit_small": 27_142_568,
    "mavit_base": 49_792_648,
    "mavit_large": 97_766_088,
    "nalaformer_xtiny": 6_142_248,
    "nalaformer_tiny": 15_907_752,
    "nalaformer_small": 25_654_184,
    "nalaformer_base": 52_002_952,
    "nalaformer_large": 95_426_760,
    "ravlt_tiny": 14_897_768,
    "ravlt_small": 25_591_208,
    "ravlt_base": 48_241_288,
    "ravlt_large": 95_242_440,
    "mila_tiny": 24_392_200,
    "mila_small": 43_015_048,
    "mila_base": 95_983_960,
    "rmt_tiny": 14_334_216,
    "rmt_small": 26_967_240,
    "rmt_base": 54_154_896,
    "rmt_large": 95_464_864,
    "secvit_tiny": 14_981_800,
    "secvit_small": 26_776_104,
    "secvit_base": 54_682_776,
    "secvit_large": 96_495_096,
}
MILLIONS = {
    "inline_deit_tiny": "6.48",
    "inline_deit_small": "16.73",
    "inline_deit_base": "23.80",
    "inline_pvt_tiny": "12.03",
    "inline_pvt_small": "21.56",
    "inline_pvt_medium": "37.62",
    "inline_pvt_large": "51.15",
    "inline_swin_tiny": "29.2",
    "inline_swin_small": "49.8",
    "inline_swin_base": "88.4",
    "inline_cswin_tiny": "20.60",
    "inline_cswin_small": "33.03",
    "inline_cswin_base": "73.41",
}


def cheap(name: str, **given: Any) -> Any:
    """A network whose numbers are drawn in the quickest way; that the right ones are drawn is told elsewhere."""
    model = timm.create_model(name, device="meta", **given).to_empty(device="cpu")
    drawn = torch.empty(999_983).uniform_(-0.1, 0.1)  # a prime, so that rows do not repeat
    for parameter in model.parameters():
        for piece in parameter.detach().view(-1).split(len(drawn)):
            piece.copy_(drawn[: len(piece)])
    for key, buffer in model.named_buffers():
        buffer.fill_(1 if key.endswith("running_var") else 0)
    return model


@cache
def without_numbers(name: str) -> Any:
    """A network as it is built, to be looked at and not to be changed."""
    return timm.create_model(name, device="meta")


def parameters_of(name: str) -> int:
    return sum(parameter.numel() for parameter in without_numbers(name).parameters())


def test_all_families_are_there():
    assert len(EVERY) == len(set(EVERY)) == 56
    assert set(COUNTS) | set(MILLIONS) == {name for name in EVERY if not name.endswith("_linear")}
    assert set(timm.list_models("mavit*")) <= set(EVERY)


# Of the networks of comparison one of each kind: their other sizes differ in numbers alone.
KINDS = ("ravlt_tiny", "ravlt_tiny_linear", "mila_tiny", "rmt_tiny", "rmt_base", "secvit_tiny", "secvit_base")
RUN = [name for name in EVERY if name in KINDS or not name.startswith(("ravlt", "mila", "rmt", "secvit"))]
# So do those of the other families: `make test` runs the smallest of each kind, `make test-all` every one.
SMALLEST = re.compile(
    r"(mavit|inline_\w+|ravlt|mila|rmt|secvit)_tiny(_linear)?|nalaformer_xtiny(_linear)?|(rmt|secvit)_base"
)


@pytest.mark.parametrize(
    "name",
    [name if SMALLEST.fullmatch(name) else pytest.param(name, marks=pytest.mark.exhaustive) for name in RUN],
)
def test_every_network_is_what_timm_expects(name: str):
    # Equal clusters ask for sides that fit; all else is promised for any image.
    model = cheap(name, drop_path_rate=0.1, **({"uneven": True} if name.startswith("secvit") else {}))
    it_learns(model)
    model.eval()
    it_reads_odd_images_in_bfloat16(model)
    its_intermediates_are_as_announced(model)
    its_configuration_tells_the_truth(model)
    its_layers_form_groups(model)
    its_classifier_can_be_replaced_and_removed(model)


def it_learns(model: Any) -> None:
    model(torch.randn(2, 3, 32, 64)).square().sum().backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@torch.no_grad()
def it_reads_odd_images_in_bfloat16(model: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.randn(1, 3, 37, 75))
    assert logits.shape == (1, 1000)
    assert logits.isfinite().all()


@torch.no_grad()
def its_intermediates_are_as_announced(model: Any) -> None:
    images = torch.randn(1, 3, 32, 64)
    features, maps = model.forward_intermediates(images)
    torch.testing.assert_close(features, model.forward_features(images))
    for out, info in zip(maps, model.feature_info, strict=True):
        assert out.shape == (1, info["num_chs"], 32 // info["reduction"], 64 // info["reduction"])


def its_configuration_tells_the_truth(model: Any) -> None:
    config, state = model.pretrained_cfg, model.state_dict()
    assert f"{config['first_conv']}.weight" in state
    assert state[f"{config['classifier']}.weight"].shape[0] == model.num_classes == 1000
    assert resolve_data_config(model=model)["input_size"] == config["input_size"]
    assert model.no_weight_decay() <= state.keys()
    if config["pool_size"] is not None:
        assert (
            tuple(side * model.feature_info[-1]["reduction"] for side in config["pool_size"])
            == config["input_size"][1:]
        )


def its_layers_form_groups(model: Any) -> None:
    for coarse in (True, False):
        groups = group_parameters(model, model.group_matcher(coarse=coarse))
        assert sorted(itertools.chain(*groups.values())) == sorted(key for key, _ in model.named_parameters())
        assert len(groups) > 4
    optimizer = create_optimizer_v2(model, opt="adamw", weight_decay=0.05, layer_decay=0.9)
    assert len(optimizer.param_groups) > 8


@torch.no_grad()
def its_classifier_can_be_replaced_and_removed(model: Any) -> None:
    images = torch.randn(2, 3, 32, 32)
    features = model.forward_features(images)
    before = model.forward_head(features, pre_logits=True)
    assert before.shape == (2, model.head_hidden_size)
    assert model.get_classifier().out_features == 1000
    model.reset_classifier(7)
    assert model(images).shape == (2, model.num_classes) == (2, 7)
    model.reset_classifier(0)
    torch.testing.assert_close(model(images), before)
    model.reset_classifier(0, "")
    assert model(images).ndim == features.ndim


@pytest.mark.parametrize("name", EVERY)
def test_parameters_are_those_of_the_released_network(name: str):
    count = parameters_of(name)
    if name in COUNTS:
        assert count == COUNTS[name]
    elif name in MILLIONS:
        assert f"{count / 1e6:.{len(MILLIONS[name].partition('.')[2])}f}" == MILLIONS[name]
    else:
        assert count >= parameters_of(name.removesuffix("_linear"))


@pytest.mark.parametrize("name", EVERY)
def test_unknown_arguments_are_refused(name: str):
    with pytest.raises(TypeError, match="depth_of_field"):
        timm.create_model(name, device="meta", depth_of_field=3)


@pytest.mark.parametrize("name", [name for name in EVERY if name.endswith("_linear")])
def test_a_linear_twin_has_no_softmax(name: str):
    twin, original = without_numbers(name), without_numbers(name.removesuffix("_linear"))
    assert type(twin) is type(original)
    assert twin.feature_info == original.feature_info
    assert "softmax" not in repr(twin)
    assert "softmax" in repr(original)


def test_the_documentation_lists_every_published_network():
    page = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text()
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")
    ]
    table = {row[0]: row for row in rows if row[0] in EVERY}
    assert set(table) == set(COUNTS) | set(MILLIONS)
    for name, (_, size, parameters, _, stages, top1) in table.items():
        model, millions = without_numbers(name), f"{parameters_of(name) / 1e6:.2f}M"
        assert (size, parameters) == (str(model.pretrained_cfg["input_size"][-1]), millions), name
        published = f"{PUBLISHED[name]:.1f}" if name in PUBLISHED else ""
        assert (stages, top1) == (stages_of(model), published), name

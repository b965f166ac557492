"""A network is made from plain arguments that its own constructor takes; all else is refused before memory is taken."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import timm
import torch

from affinear.models import making
from affinear.models.making import check_plain, make, outline, takes
from affinear.tasks.classify import trunk

assert trunk  # which registers affinear_trunk_micro

MODEL = "inline_deit_tiny"
LOADERS = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "pretrained_strict",
    "pretrained_filter_fn",
    "checkpoint_path",
    "cache_dir",
    "custom_load",
    "features_only",
    "feature_cls",
    "kwargs_filter",
    "scriptable",
    "exportable",
    "no_jit",
    "pruned",
    "device",
    "dtype",
)


@pytest.mark.parametrize(
    "model", [MODEL, "mavit_tiny", "affinear_trunk_micro", "resnet18", "regnety_002", "tf_efficientnet_b0"]
)
def test_no_network_takes_what_timms_loader_takes(model: str):
    assert "num_classes" in takes(model)
    assert not set(LOADERS) & takes(model).keys()
    for name in LOADERS if model == MODEL else LOADERS[:1]:  # each makes the network
        with pytest.raises(ValueError, match=f"model_args: {model} takes no '{name}'"):
            making.check(model, {name: 1})


def test_a_network_is_what_timm_makes_with_the_same_arguments():
    given: dict[str, Any] = {"depth": 1, "embed_dim": 16, "num_heads": 2, "num_classes": 3}
    torch.manual_seed(5)
    ours = make(MODEL, given).state_dict()
    torch.manual_seed(5)
    theirs = timm.create_model(MODEL, **given).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"deepth": 1}, "takes no 'deepth'; did you mean 'depth'"),
        ({"depth": "many"}, "depth: expected a number, got 'many'"),
        ({"depth": True}, "depth: expected a number, got True"),
        ({"depth": 10**5000}, "depth: expected a number of at most 1048576, got a number of more than thirty digits"),
        ({"mlp_ratio": float("nan")}, "mlp_ratio: expected a number of at most 1048576, got nan"),
        ({"mlp_ratio": float("inf")}, "mlp_ratio: expected a number"),
        ({"mechanism": "../../etc/passwd"}, "mechanism: expected a name of letters"),
        ({"mechanism": "http://a/b"}, "mechanism: expected a name of letters"),
        ({"mechanism": "a" * 65}, "mechanism: expected a name of letters"),
        ({"mechanism": {"a": 1}}, "mechanism: expected a number, a name or a list of these, got dict"),
        ({"depth": [[[[1]]]]}, "depth: expected a list of at most 64, 3 deep"),
        ({"depth": [1] * 65}, "depth: expected a list of at most 64, 3 deep"),
        ({"num_heads": 0}, "inline_deit_tiny cannot be made with num_heads=0"),
        ({"num_heads": -1}, "num_heads: expected a number of at least 0, got -1"),
        ({"depth": [1, 2]}, r"inline_deit_tiny cannot be made with depth=\(1, 2\)"),
        ({"embed_dim": 2**20, "num_heads": 2}, "would have .* numbers, and there is room for"),
        ({"img_size": 2**20}, "would have .* numbers, and there is room for"),
    ],
)
def test_what_may_not_be_is_refused_in_a_sentence_and_without_memory(given: dict[str, Any], sentence: str):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=sentence):
        make(MODEL, given)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


def test_a_making_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(making, "MOST_CALLS", 1000)
    with pytest.raises(ValueError, match="more than 1000 steps to make it"):
        make(MODEL, {"depth": 2**20})


def test_no_more_numbers_than_there_is_room_for():
    given = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    shape = outline(MODEL, given)
    count = sum(tensor.numel() for tensor in (*shape.parameters(), *shape.buffers()))
    assert all(parameter.is_meta for parameter in shape.parameters())
    make(MODEL, given, room=count)
    with pytest.raises(ValueError, match=f"would have {count:,} numbers, and there is room for {count - 1:,}"):
        make(MODEL, given, room=count - 1)


@pytest.mark.parametrize(
    "model", ["hf-hub:a/b", "local-dir:/tmp", "../a", "a/b", "", "mavit tiny", "mavit_tinny", "é" * 500]
)
def test_other_names_are_refused(model: str):
    with pytest.raises(ValueError, match="model: expected a network such as"):
        make(model, {})


def test_plain_values_are_plain():
    for value in (None, True, 3, -0.5, "gelu", [1, (2, "a")], []):
        check_plain(value, "x")
    for value in (b"a", {1}, object(), lambda: 1, 2**20 + 1, "a b", torch.zeros(1)):
        with pytest.raises(ValueError, match="x: expected"):
            check_plain(value, "x")


def test_looking_at_a_network_draws_nothing():
    before = torch.random.get_rng_state()
    outline("affinear_trunk_micro", {})
    takes("affinear_trunk_micro")
    assert torch.equal(before, torch.random.get_rng_state())

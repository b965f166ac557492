"""A released segmenter becomes a file that can be judged and asked like a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from affinear import tasks
from affinear.models.checkpoints import Weights
from affinear.models.heads import Segmenter
from affinear.tasks.segment.converting import convert

from . import scenes

SMALL: dict[str, Any] = {"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]}
# From our names back to mmsegmentation's: written from its own modules, not by turning our rules round.
HEAD = {
    "head.neck.lateral.{}.": "neck.lateral_convs.{}.conv.",
    "head.neck.output.{}.": "neck.fpn_convs.{}.conv.",
    "head.levels.{}.": "decode_head.scale_heads.{}.",
}


def as_released(network: Segmenter) -> dict[str, Tensor]:
    """The weights of a segmenter under the names that its release would have."""
    state: dict[str, Tensor] = {}
    for name, tensor in network.state_dict().items():
        new = name.replace("backbone.body.model.", "backbone.").replace(
            "head.classifier.conv.", "decode_head.conv_seg."
        )
        if name.startswith("backbone.norms."):
            place, part = name.removeprefix("backbone.norms.").split(".")
            new = f"backbone.extra_norms.{place}.norm.{part}"
        for i in range(4):
            for ours, theirs in HEAD.items():
                new = new.replace(ours.format(i), theirs.format(i))
        if new.startswith("decode_head.scale_heads."):
            new = new.replace(".norm.", ".bn.")
        state[new] = tensor
    return state


@torch.no_grad()
def test_a_converted_segmenter_is_judged_like_a_run(tmp_path: Path):
    root = scenes.write(tmp_path / "streets", (2, 2), ((32, 48),))
    network = Segmenter("mavit_tiny", "semantic_fpn", 3, norms=True, model_args=SMALL).eval()
    converted = convert(Weights(as_released(network)), "mavit_tiny", root / "classes.txt", SMALL)
    (tmp_path / "fpn.safetensors").write_bytes(converted.content)
    trained = tasks.load_trained(tmp_path / "fpn.safetensors")
    images = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(trained.network(images)[0], network(images)[0])
    assert not trained.job.settings.mask_padding
    assert tasks.evaluate(trained, str(root)).count == 2


def test_names_must_be_as_many_as_classes(tmp_path: Path):
    (tmp_path / "classes.txt").write_text("sky\nroad\n")
    network = Segmenter("mavit_tiny", "semantic_fpn", 3, norms=True, model_args=SMALL)
    with pytest.raises(ValueError, match=r"classes.txt: expected 3 names, as the weights have classes, got 2"):
        convert(Weights(as_released(network)), "mavit_tiny", tmp_path / "classes.txt", SMALL)

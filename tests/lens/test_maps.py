"""Maps of real images: one for every layer, as bright as the weights are."""

from __future__ import annotations

import numpy as np
import timm
import torch
from PIL import Image

from affinear.lens.glance import Map
from affinear.lens.maps import STRONG, overlaid, section
from affinear.models import inline_deit, inline_swin  # noqa: F401  # pyright: ignore[reportUnusedImport]


def test_every_layer_of_every_image_has_a_picture():
    network = timm.create_model("inline_deit_tiny", depth=2, img_size=64).eval()
    layers = [("blocks.0.attn", "inline"), ("blocks.1.attn", "inline")]
    shown = section(network, torch.randn(5, 3, 64, 64), [f"<{number}>" for number in range(5)], layers)
    assert shown.count("<img") == 3 * (1 + 2)
    assert shown.count("<figcaption>1 inline</figcaption>") == 3
    assert "&lt;0&gt;" in shown
    assert "<0>" not in shown


def test_a_network_without_maps_says_so():
    assert "No layer has one map" in section(torch.nn.Linear(2, 2), torch.randn(1, 3, 8, 8), ["a"], [])


def test_places_that_are_looked_at_more_turn_yellow_and_others_dark():
    grey = Image.new("RGB", (40, 20), (100, 100, 100))
    weights = (0.0, 1.0, STRONG, 1.0, 1.0, 1.0, 1.0, 1.0)
    found = np.asarray(overlaid(grey, Map(0, "a", 7, (2, 4), weights))).astype(int)
    assert (found[5, 15] == 100).all()  # as a uniform row
    assert (found[5, 5] == 25).all()
    assert found[5, 25, 0] > 200 > found[5, 25, 2] + 150
    assert (found[10, 30] == 255).all()  # the frame of the patch that looks

"""Classifiers as backbones: the names that timm's network of maps has for their weights, and their stochastic depth."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

LAST = ("head.", "head_dist.", "classifier.", "fc.", "norm.")  # what comes after a classifier's last map
# The published segmenters and detectors keep the stochastic depth that each backbone was trained with.
DROP_PATH = {"tiny": 0.1, "small": 0.15, "base": 0.4, "large": 0.55}


def backbone_weights(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a classifier under the names they have in timm's network of maps; its head and last norm are left out.

    timm puts a network of ours under "model.", and calls a part of another's "layers_0" that was "layers.0".
    """
    known = {re.sub(r"^(?:model\.)?([a-z]+)_(\d+)\.", r"\1.\2.", name).removeprefix("model."): name for name in own}
    return {known.get(name, name): tensor for name, tensor in tensors.items() if not name.startswith(LAST)} | {
        known[name]: tensor for name, tensor in tensors.items() if name in known
    }


def drop_path_of(model: str) -> float:
    """The published stochastic depth of a backbone, by the size in its name; 0.1 where the name tells none."""
    return next((rate for size, rate in DROP_PATH.items() if size in model.split("_")), 0.1)

"""Released segmenters as files that `affinear eval` and `affinear predict` take."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...models.checkpoints import Converted, Weights
from ...models.heads import released
from ...train.task import Job
from ..sealing import converted
from .opening import read_names
from .recipes import SEMANTIC_FPN_80K, UPERNET_160K
from .task import TASK, settled

RECIPE_OF = {"semantic_fpn": SEMANTIC_FPN_80K, "upernet": UPERNET_160K}


def convert(
    weights: Weights, model: str, classes: Path | None = None, model_args: Mapping[str, Any] | None = None
) -> Converted:
    """A released segmenter as one of ours, with all that a file of weights tells of itself.

    Args:
        weights: As `affinear.models.checkpoints.read` gives them.
        model: The backbone's name, such as "mavit_tiny".
        classes: A list of their names, one per line, or ADE20K's table; None for numbers.
        model_args: Arguments of the backbone, where they are not the released ones.

    Raises:
        ValueError: If a tensor does not fit, or there are more or fewer names than classes.
    """
    args = dict(model_args or {})
    network = released.read(weights.tensors, model, args)
    names = [f"class {i + 1}" for i in range(network.num_classes)] if classes is None else list(read_names(classes))
    if len(names) != network.num_classes:
        raise ValueError(
            f"{classes}: expected {network.num_classes} names, as the weights have classes, got {len(names)}"
        )
    head = released.head_of(weights.tensors)
    assert head is not None
    setup = TASK.preset(model, RECIPE_OF[head]).changed(mask_padding=False, map_norms=True)
    job = settled(Job(model, args, setup.recipe, TASK.settings(**setup.settings.as_dict()), {"classes": names}))
    return converted(TASK.name, job, network, weights)

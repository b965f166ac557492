"""Released networks of a task as files of weights that tell of themselves what a run's would."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from .. import __version__
from ..models.checkpoints import Converted, Weights
from ..models.sealing import sealed
from ..train.task import Job


def converted(task: str, job: Job[Any], network: nn.Module, weights: Weights) -> Converted:
    """A network with the weights that were read, as such a file.

    Args:
        task: Its name.
        job: What makes the network, and how it would be trained.
        network: With the weights.
        weights: As `affinear.models.checkpoints.read` gave them.
    """
    about = {
        "task": task,
        "model": job.model,
        "model_args": dict(job.model_args),
        "recipe": job.recipe.as_dict(),
        "settings": job.settings.as_dict(),
        "facts": dict(job.facts),
    }
    tensors = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    told = {"format": "pt", "affinear": __version__, "about": json.dumps(about)}
    return Converted(sealed(tensors, told), network, weights)

"""What weights to begin with tell of the network that they go into."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .about import about, check_asked
from .folder import weights_in

# What another training may choose anew: it changes no weight but those of the classifier.
FREE = re.compile(r"num_classes|img_size|drop\w*|\w+_drop(_rate)?")


def made_with(weights: Path | None, model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a network is made with that begins with trained weights: as they tell, and as the user says beside that.

    Args:
        weights: A file or the folder of a run; None, or what is not there, tells nothing.
        model: Name of the network.
        given: What the user says.

    Raises:
        ValueError: If the user says other than the weights do.
    """
    try:
        path = None if weights is None else weights_in(weights)
    except ValueError:  # a run that goes on needs them no more, and one that begins says so
        path = None
    told = None if path is None or path.suffix != ".safetensors" else about(path)
    if path is None or told is None:
        return dict(given)
    fixed = {name: value for name, value in told.model_args.items() if not FREE.fullmatch(name)}
    check_asked(told, path, model, {name: value for name, value in given.items() if not FREE.fullmatch(name)})
    return {**fixed, **given}

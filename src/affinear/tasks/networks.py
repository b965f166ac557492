"""A network for commands that look into it or hand it on: with fresh weights, or as a file of weights tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..linearizing.low_rank import merge
from ..models.making import make
from ..train.examples import images_of
from ..train.task import Trained
from .registry import find
from .using import load_trained


@dataclass(frozen=True)
class Opened:
    """A classifier in evaluation mode.

    Attributes:
        name: Of the network.
        network: Its `pretrained_cfg` says how it wants images, and for weights of a run `label_names` its classes.
        weights: Where they came from; "" where they are random.
        images: Test images (B, C, H, W) of the run that it was trained in, as it wants them; None where there are none.
    """

    name: str
    network: nn.Module
    weights: str = ""
    images: Tensor | None = None


def open_network(model: str | None, weights: Path | None = None, *, num_classes: int | None = None) -> Opened:
    """The network of a name, with fresh weights, or the one that weights were trained in.

    Args:
        model: Name of a network of ours or of timm's. Weights that tell their own need none.
        weights: The folder of a run, or a file of weights, released ones too.
        num_classes: For fresh weights; of a file, what it must have.

    Raises:
        ValueError: If neither is given, the two contradict each other, or there is no such network or file.

    Example:
        >>> from affinear.tasks.networks import open_network
        >>> opened = open_network("inline_deit_tiny", num_classes=7)
        >>> opened.network.num_classes, opened.weights
        (7, '')
    """
    if weights is None:
        if model is None:
            raise ValueError("model: expected the name of a network, or weights that tell it, got neither")
        find("classify")  # trunks are among its networks
        return Opened(model, make(model, {} if num_classes is None else {"num_classes": num_classes}).eval())
    trained = load_trained(weights, model)
    if not isinstance(trained.task, type(find("classify"))):  # distilled ones are classifiers, too
        raise ValueError(
            f"{weights}: expected the weights of a classifier, got those of --task {trained.task.name}, which "
            "`affinear predict` and `affinear eval` take"
        )
    classes = getattr(trained.network, "num_classes", None)
    if num_classes is not None and num_classes != classes:
        raise ValueError(f"num_classes: {weights} tells {classes} classes apart, not {num_classes}; leave it out")
    merge(trained.network)  # low-rank updates of a distilled one; others have none
    images = images_of(weights, trained.job.facts["channels"]) if weights.is_dir() else None
    return Opened(trained.job.model, _as_trained(trained), str(weights), images)


def _as_trained(trained: Trained[Any, Any]) -> nn.Module:
    """The network, which says of itself how it was shown images, and not how its namesake was published."""
    settings, facts = trained.job.settings, trained.job.facts
    shown = {name: getattr(settings, name) for name in ("mean", "std", "interpolation", "crop_pct")}
    size = (facts["channels"], *settings.image_size)
    published: dict[str, Any] = getattr(trained.network, "pretrained_cfg", None) or {}
    names = list(facts["class_names"]) or published.get("label_names")
    network: Any = trained.network
    network.pretrained_cfg = {**published, **shown, "input_size": size, "label_names": names}
    return network

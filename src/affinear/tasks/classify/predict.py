"""What a trained network takes images for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from ...train import settings
from ...train.settings import Check, Settings
from ...train.task import Answer, Trained
from ..images.batching import as_tensor
from ..images.labelled.images import Images
from ..images.reading import CorruptImage, open_image
from . import network as networks
from .settings import ClassifySettings


@dataclass(frozen=True)
class Options(Settings):
    """What predictions can be told.

    Attributes:
        top: How many guesses for each image.
    """

    kind: ClassVar[str] = "options"

    top: int = 5

    checks: ClassVar[Mapping[str, Check]] = {"top": settings.whole(1)}


def predict(
    trained: Trained[Images, ClassifySettings], sources: Sequence[str | Path], options: Options | None = None
) -> Iterator[Answer]:
    """Tell what images show, one after the other, in the order of the files, the likeliest class first.

    An image that cannot be read gets an answer that says so, and the others are answered all the same.

    Args:
        trained: What `affinear.tasks.load_trained` gave.
        sources: Files of images.
        options: How many guesses.

    Returns:
        Answers whose content has the image and its guesses: number, name and probability of a class.
    """
    device, batching = next(trained.network.parameters()).device, networks.batching(trained.job)
    named, top = trained.job.facts["class_names"], (options or Options()).top
    for source in sources:
        path = Path(source)
        try:
            image = open_image(path)
        except (CorruptImage, OSError, ValueError) as error:
            said = _reason(path, error)
            yield Answer(str(path), content={"image": str(path), "guesses": [], "error": said}, error=said)
            continue
        with torch.inference_mode():
            logits = trained.network(as_tensor(image, batching)[None].to(device))[0]
        chances, numbers = logits.float().softmax(0).topk(min(top, len(logits)))
        guesses = [
            {"number": number, "name": named[number] if named else str(number), "probability": chance}
            for number, chance in zip(numbers.tolist(), chances.tolist(), strict=True)
        ]
        text = ", ".join(f"{guess['name']} {guess['probability']:.1%}" for guess in guesses)
        yield Answer(str(path), text, {"image": str(path), "guesses": guesses, "error": None})


def _reason(path: Path, error: Exception) -> str:
    if not path.exists():
        return "there is no such file"
    if path.is_dir():
        return "it is a folder"
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix(f"{path}: ")

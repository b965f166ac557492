"""What a trained network takes images for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .data import CorruptImage, as_tensor, open_image
from .evaluate import Trained


@dataclass(frozen=True)
class Guess:
    """A class that an image may be of.

    Attributes:
        number: Of the class.
        name: What it is called; its number where the file of weights does not tell.
        probability: How sure the network is.
    """

    number: int
    name: str
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What a network takes an image for.

    Attributes:
        image: The file.
        guesses: The likeliest first; none if the image could not be read.
        error: Why it could not be read; None if it could.
    """

    image: str
    guesses: tuple[Guess, ...]
    error: str | None = None


def predict(trained: Trained, paths: Sequence[Path], *, top: int = 5) -> Iterator[Prediction]:
    """Tell what images show, one after the other, in the order of the files.

    An image that cannot be read gets a prediction that says so, and the others are answered all the same.

    Args:
        trained: What `load_trained` gave.
        paths: Files of images.
        top: How many guesses for each.
    """
    device = next(trained.network.parameters()).device
    for path in paths:
        try:
            image = open_image(path)
        except (CorruptImage, OSError, ValueError) as error:
            yield Prediction(str(path), (), _reason(path, error))
            continue
        with torch.inference_mode():
            logits = trained.network(as_tensor(image, trained.batching)[None].to(device))[0]
        chances, numbers = logits.float().softmax(0).topk(min(top, len(logits)))
        named = trained.class_names
        yield Prediction(
            str(path),
            tuple(
                Guess(number, named[number] if named else str(number), chance)
                for number, chance in zip(numbers.tolist(), chances.tolist(), strict=True)
            ),
        )


def _reason(path: Path, error: Exception) -> str:
    if not path.exists():
        return "there is no such file"
    if path.is_dir():
        return "it is a folder"
    return (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix(f"{path}: ")

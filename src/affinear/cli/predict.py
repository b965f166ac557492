"""`affinear predict`: what trained weights answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import TRAINING, require, told_in_a_sentence


def predict(
    images: Annotated[list[Path], typer.Argument(help="Files of images.")],
    weights: Annotated[Path, typer.Option(help="Folder of a run, or a file of weights.")],
    model: Annotated[str | None, typer.Option(help="The network, for weights that do not tell.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many guesses for each image.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Tell what images show, with the likeliest classes first.

    An image that cannot be read gets a line that says so; the others are answered, and the exit code is 1.
    """
    require("train", *TRAINING)
    import json
    from dataclasses import asdict

    from affinear.tasks.classify.predict import predict as guesses
    from affinear.train import load_trained

    found: list[dict[str, Any]] = []
    with told_in_a_sentence():
        for answer in guesses(load_trained(weights, model), images, top=top):
            found.append(asdict(answer))
            if as_json:
                continue
            if answer.error is not None:
                print(f"{answer.image}: {answer.error}")
            else:
                print(f"{answer.image}: " + ", ".join(f"{g.name} {g.probability:.1%}" for g in answer.guesses))
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    if any(answer["error"] is not None for answer in found):
        sys.exit(1)

"""`affinear eval`: how well trained weights do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .common import TRAINING, is_first, require, told_in_a_sentence


def evaluate(
    source: Annotated[Path, typer.Argument(help="Folder of a run, or a file of weights.")],
    data: Annotated[str, typer.Option(help="Images, as for `affinear train`; the test half is taken.")],
    model: Annotated[str | None, typer.Option(help="The network, for weights that do not tell.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images at a time.")] = None,
    image_size: Annotated[str | None, typer.Option(help="Side, or height x width, if not that of training.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure trained weights on test images: top-1, top-5, loss, and each class by itself."""
    require("train", *TRAINING)
    import json
    from dataclasses import asdict

    from affinear.train import evaluate as measure
    from affinear.train import recipe as recipes

    with told_in_a_sentence():
        size = None if image_size is None else recipes.parse_size(image_size)
        score = measure(source, data, model=model, batch_size=batch_size, workers=workers, image_size=size)
    if not is_first():
        return
    for name in score.skipped:
        print(f"Skipped, because it cannot be read: {name}", file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(score), indent=2, ensure_ascii=False))
        return
    for part in score.classes:
        print(f"{part.top1:8.2%}  of {part.images:6}  {part.name}")
    print(f"top-1 {score.top1:.2%}, top-5 {score.top5:.2%}, loss {score.loss:.4f}, {score.images} images")

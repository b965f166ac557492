"""`affinear convert`: released checkpoints as safetensors."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from .common import TRAINING, check_output, keeper, parse_sides, require, sentence, stop, told


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A released file, .pth or .safetensors.")],
    model: Annotated[str, typer.Option(help="The network it belongs to, such as mavit_tiny, or any of timm's.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to save the weights: .safetensors.")],
    nest: Annotated[
        str | None, typer.Option(help="Which weights, where the file has several: model, state_dict, model_ema ...")
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option("--image-size", "--img-size", help="Resize position tables for this size: 224 or 192x256."),
    ] = None,
    allow_nan: Annotated[bool, typer.Option("--allow-nan", help="Take weights that are NaN or infinite, too.")] = False,
    classes: Annotated[
        Path | None,
        typer.Option(help="Of a segmenter or detector: a file with the names of its classes, one per line."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Read a released checkpoint into one of the networks and save it as safetensors.

    Classifiers, segmenters with SemanticFPN or UperNet under mmsegmentation's names, and RetinaNet, Mask R-CNN and
    Cascade Mask R-CNN under mmdetection's, for --model as their backbone.
    Code in the checkpoint is never run. If a tensor is missing, unexpected or of another shape, all of them are named
    and nothing is written.
    """
    require("vision", "timm", "safetensors")
    check_output(output, "The weights", (".safetensors",))
    if not checkpoint.is_file():
        stop(f"{checkpoint} is not a file; give the path of a checkpoint.")
    from affinear.models import checkpoints
    from affinear.models.detectors import released as detectors
    from affinear.models.heads import released

    if model.startswith("affinear_"):  # the trunks of `affinear compare`
        require("train", *TRAINING)
        from affinear.tasks import find

        find("classify")
    try:
        sides = parse_sides(image_size)
        weights = checkpoints.read(checkpoint, nest, finite=not allow_nan)
        if released.head_of(weights.tensors) is not None:
            require("train", *TRAINING)
            from affinear.tasks.segment import converting

            converted = converting.convert(weights, model, classes)
        elif detectors.kind_of(weights.tensors) is not None:
            require("train", *TRAINING)
            from affinear.tasks.detect import converting

            converted = converting.convert(weights, model, classes)
        else:
            converted = checkpoints.convert(checkpoint, model, nest=nest, img_size=sides, finite=not allow_nan)
    except (ValueError, TypeError) as error:
        if _is_ours(checkpoint):
            stop(f"{checkpoint} is of affinear train: predict, eval and train --weights take it as it is.")
        stop(sentence(error))
    except OSError as error:
        stop(f"{checkpoint} could not be read: {error.strerror or error}.")
    if converted.weights.others:
        print(f"Took {converted.weights.nest}; the file also has {', '.join(converted.weights.others)}: see --nest.")
    saved = keeper(output, "file", force)(converted.content)
    print(told(saved.path, saved.written, output, "file"))


def _is_ours(path: Path) -> bool:
    """Whether a file tells of itself what `affinear train` writes."""
    if find_spec("accelerate") is None:
        return False
    from affinear.train.about import about

    try:
        return bool(about(path))
    except ValueError:
        return False

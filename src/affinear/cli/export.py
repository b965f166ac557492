"""`affinear export`: a network as ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import TRAINING, check_output, keeper, parse_sides, require, sentence, stop, told
from .plugins import Plugins, load_plugins


def export(
    name: Annotated[str | None, typer.Argument(help="The folder of a run, or a network such as mavit_tiny.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to save it: .onnx.")] = Path("model.onnx"),
    weights: Annotated[
        Path | None,
        typer.Option(help="Folder of a run, or a file, .safetensors or released; random weights if not given."),
    ] = None,
    image_size: Annotated[
        str | None,
        typer.Option("--image-size", "--size", help="Side, or height x width: 224 or 192x256; if not given, its own."),
    ] = None,
    fixed_size: Annotated[bool, typer.Option("--fixed-size", help="For images of that size only.")] = False,
    opset: Annotated[int, typer.Option(min=18, help="Version of ONNX's operators.")] = 20,
    num_classes: Annotated[int | None, typer.Option(min=1, help="Classes, without --weights.")] = None,
    plugin: Plugins = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Save a network as ONNX, for any batch and, if it has no windows, any size, once onnxruntime agrees with torch.

    It takes minutes. If the output file is there already and differs, a free name such as model-2.onnx is taken, unless
    --force.
    """
    require("export", "onnx", "onnxscript", "onnxruntime")
    require("train", *TRAINING)
    check_output(output, "The network", (".onnx",))
    from rich.console import Console

    from affinear.models.export import export_onnx
    from affinear.tasks.networks import open_network

    if name is not None and weights is None and Path(name).exists():
        name, weights = None, Path(name)
    try:
        load_plugins(plugin)
        opened = open_network(name, weights, num_classes=num_classes)
        model: Any = opened.network
        height, width = parse_sides(image_size) or model.pretrained_cfg["input_size"][1:]
        with Console(stderr=True).status("") as status:
            exported = export_onnx(
                model,
                size=(height, width),
                dynamic_size=False if fixed_size else None,
                opset=opset,
                images=opened.images,
                progress=lambda step: status.update(f"{step.capitalize()} ..."),
            )
    except (ValueError, RuntimeError, OSError) as error:
        stop(sentence(error))
    saved = keeper(output, "network", force)(exported.content)
    real = 0 if opened.images is None or tuple(opened.images.shape) not in exported.checked else len(opened.images)
    seen = f" on random images and {real} of the run" if real else ""
    print(f"May vary: {', '.join(exported.dynamic)}. Largest relative error against torch{seen}: {exported.error:.1e}.")
    print(told(saved.path, saved.written, output, "network"))

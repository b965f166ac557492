"""`affinear lens`: the microscope, the papers' figures, and a report of a network's attention."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import FORMATS, TRAINING, check_output, keeper, listen, parse_sides, require, sentence, stop, told
from .plugins import Plugins, load_plugins

if TYPE_CHECKING:
    from affinear.lens.microscope import Network

WEIGHTS = "Folder of a run, or a file, .safetensors or released; random weights if not given."


def lens_microscope(
    context: typer.Context,
    host: Annotated[
        str, typer.Option(help="Where to listen; anywhere but on this machine, everybody can use it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 0,
    model: Annotated[str | None, typer.Option(help="A network to look into, such as mavit_tiny.")] = None,
    weights: Annotated[Path | None, typer.Option("--weights", "--checkpoint", help=WEIGHTS)] = None,
    plugin: Plugins = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, open nothing.")] = False,
) -> None:
    """Open the microscope, a page that shows what a patch of an image attends to; or draw figures or write a report."""
    if context.invoked_subcommand is not None:
        return
    require("lens", "PIL", "numpy")
    asked = model is not None or weights is not None
    if asked:
        require("train", *TRAINING)
    from affinear.lens.microscope import serve

    listen()
    try:
        load_plugins(plugin)
        serve(host, port, _looked_into(model, weights) if asked else None, open_browser=not no_browser)
    except (ValueError, TypeError) as error:
        stop(sentence(error))
    except OSError as error:
        stop(f"The microscope could not be started: {error.strerror or error}.")


def _looked_into(model: str | None, weights: Path | None) -> Network:
    from affinear.lens.microscope import Network
    from affinear.tasks.networks import open_network

    opened = open_network(model, weights)
    return Network(opened.name, opened.network, opened.weights)


def lens_figures(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the figures; made if it is not there.")],
    only: Annotated[
        str | None,
        typer.Option(help="Figures, with commas: norms, ratios, confusion, locality, signs, distributions, ranks."),
    ] = None,
    formats: Annotated[str, typer.Option("--format", help="png, svg or pdf; several with commas.")] = "png,svg",
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Draw the papers' analysis figures anew, from this library's own numbers, and say what they show.

    Tokens are synthetic and seeds fixed: the same files every time. If a file is there already and differs, a free name
    such as norms-2.png is taken, unless --force.
    """
    suffixes = list(dict.fromkeys(f".{word.strip().lower()}" for word in formats.split(",")))
    for suffix in suffixes:
        if suffix not in FORMATS:
            stop(f"--format: expected some of png, svg, pdf, with commas, got {suffix[1:]!r}.")
    from rich.console import Console

    from affinear.lens import papers
    from affinear.lens.figures import render

    try:
        chosen = papers.pick(only)
    except ValueError as error:
        stop(f"--{error}.")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        stop(f"The folder {output} could not be made: {error.strerror or error}.")
    console = Console(highlight=False)
    for name, draw in chosen.items():
        drawn = draw()
        console.print(f"[bold]{name}[/bold] ({drawn.source})")
        console.print(drawn.reading, width=min(console.width, 80), markup=False)
        for suffix in suffixes:
            wanted = output / f"{name}{suffix}"
            saved = keeper(wanted, "figure", force)(render(drawn.figure, suffix[1:]))
            print(told(saved.path, saved.written, wanted))
        print()


def lens_report(
    data: Annotated[Path, typer.Option(help="A folder of images: .jpg, .png or .webp, in it or in folders of it.")],
    model: Annotated[
        str | None, typer.Option(help="A network, such as mavit_tiny; weights of a run tell it themselves.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to save the report: .html.")] = Path(
        "affinear-report.html"
    ),
    weights: Annotated[Path | None, typer.Option("--weights", "--checkpoint", help=WEIGHTS)] = None,
    image_size: Annotated[str | None, typer.Option(help="Side, or height x width, if not that of training.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many images.")] = 16,
    rows: Annotated[int, typer.Option(min=1, help="At most so many queries of each image and layer.")] = 256,
    plugin: Plugins = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Show a network some images and report what each attention layer and head did: one HTML file.

    If the output file is there already and differs, a free name such as affinear-report-2.html is taken, unless
    --force.
    """
    require("train", *TRAINING)
    check_output(output, "The report", (".html",))
    import torch
    from rich.console import Console

    from affinear.lens.maps import section
    from affinear.lens.report import batch_of_images, html, summary
    from affinear.lens.watching import watch
    from affinear.tasks.networks import open_network

    try:
        load_plugins(plugin)
        opened = open_network(model, weights)
        network = opened.network
        images = batch_of_images(data, network, limit, parse_sides(image_size))
        with Console(stderr=True).status("") as status, watch(network, rows=rows) as watched, torch.no_grad():
            for done, batch in enumerate(images.pixels.split(4)):
                status.update(f"Looking at image {4 * done + 1} of {len(images.names)} ...")
                network(batch)
    except (ValueError, RuntimeError, OSError) as error:
        stop(sentence(error))
    for reason in images.skipped:
        print(f"Skipped {reason}", file=sys.stderr)
    about = {
        "network": opened.name,
        "weights": opened.weights or "random",
        "images": f"{len(images.names)} of {data}, shown at {' x '.join(map(str, images.pixels.shape[2:]))}",
        "rows": f"at most {rows} of each image",
    }
    seen = [(layer.name, layer.mechanism) for layer in watched.layers]
    maps = section(network, images.pixels, images.names, seen)
    page = html(watched, title=f"Attention of {opened.name}", about=about, maps=maps)
    print("\n".join(summary(watched)))
    saved = keeper(output, "report", force)(page.encode())
    print(told(saved.path, saved.written, output, "report"))

"""`affinear demo`: what a louder query does to its attention row."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import check_output, listen, stop, told


def demo(
    output: Annotated[Path, typer.Option(help="Where to save the figure: .png, .svg or .pdf.")] = Path(
        "affinear-demo.png"
    ),
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the random keys.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Make one query louder and show what its attention row does, for softmax and every mechanism.

    If the output file is there already and differs, a free name such as affinear-demo-2.png is taken, unless --force.
    """
    check_output(output)
    from rich.console import Console

    from affinear.lens import demo as experiment
    from affinear.lens import figures
    from affinear.lens.files import place

    listen()
    curves = experiment.collect(experiment.example(seed))
    console = Console(highlight=False)
    console.print(experiment.table(curves))
    console.print(experiment.reading(curves), width=min(console.width, 80))
    figure = figures.render(figures.loudness_figure(curves), output.suffix[1:].lower())
    try:
        placed = place(figure, output, force=force)
    except OSError as error:
        stop(f"The figure could not be saved to {output}: {error.strerror or error}.")
    print(told(placed.path, placed.written, output))

"""`affinear models`: which networks there are."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .common import stop


def models(
    pattern: Annotated[str, typer.Argument(help="Which ones, such as 'mavit*' or '*_linear'.")] = "*",
    everything: Annotated[
        bool, typer.Option("--all", help="Also timm's own that the papers compare with: EfficientViT, DeiT, Swin ...")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the networks: parameters, multiply-adds, which blocks are linear and which softmax, published accuracy."""
    from rich.console import Console

    from affinear import listing

    rows, others = listing.entries(pattern, everything), listing.elsewhere(pattern)
    if not rows and not others:
        stop(f"No network is called {pattern!r}; `affinear models` without a pattern lists all.")
    if as_json:
        print(listing.as_json(rows), end="")
        return
    if rows:
        Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(listing.table(rows))
    for task, names in others.items():
        print(f"For --task {task}: {', '.join(names)}")

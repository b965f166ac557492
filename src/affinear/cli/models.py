"""`affinear models`: which networks there are."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .common import require, stop


def models(
    pattern: Annotated[str, typer.Argument(help="Which ones, such as 'mavit*' or '*_linear'.")] = "*",
    everything: Annotated[
        bool, typer.Option("--all", help="Also timm's own that the papers compare with: EfficientViT, DeiT, Swin ...")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the networks: parameters, multiply-adds, which blocks are linear and which softmax, published accuracy."""
    require("vision", "timm", "safetensors")
    import json
    from dataclasses import asdict

    from rich.console import Console

    from affinear.models import catalogue

    total = len(catalogue.names(pattern, everything))
    if not total:
        stop(f"No network is called {pattern!r}; `affinear models` without a pattern lists all.")
    rows: list[catalogue.Entry] = []
    with Console(stderr=True).status("Counting multiply-adds ...") as status:
        for entry in catalogue.entries(pattern, everything):
            rows.append(entry)
            status.update(f"Counting multiply-adds ... {len(rows)} of {total} networks, about a second each")
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(catalogue.table(rows))

"""`--plugin`: the option that commands share, and what it does."""

from __future__ import annotations

from typing import Annotated

import typer

Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        help="A file of Python to run first, which registers mechanisms of your own, or an entry point of an installed "
        "package; may be given again.",
    ),
]


def load_plugins(names: list[str] | None) -> None:
    """Run what the user named.

    Raises:
        ValueError: If there is no such plugin, or it fails.
    """
    from affinear.plugins import load

    load(names or [])

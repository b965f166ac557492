"""`affinear` itself: what it says of itself, and its version."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def _print_version(wanted: bool) -> None:
    if wanted:
        import affinear

        print(f"affinear {affinear.__version__}")
        sys.exit(0)


def command_line(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Linear attention that keeps the query's magnitude."""

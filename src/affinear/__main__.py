"""The `affinear` command, and `python -m affinear`: Ctrl-C is heard before anything else is imported."""

from __future__ import annotations

from .stopping import await_interrupts


def main() -> None:
    """Run the command line."""
    await_interrupts()
    from .cli import main as command

    command()


if __name__ == "__main__":
    main()

"""The `affinear` command: one thin function per subcommand, everything heavy imported when it is needed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

if TYPE_CHECKING:
    import typer

NEEDS = ("typer", "rich", "matplotlib")
FORMATS = (".png", ".svg", ".pdf")


def main() -> None:
    """Run the command line; where its packages are missing, say in one sentence how to get them."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        _stop(f"The affinear command needs {' and '.join(missing)}: pip install 'affinear[lens]'")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a pipe of a narrower encoding loses a sign, not the whole answer
    build_app()()


def build_app() -> typer.Typer:
    """Assemble the command line out of the functions below."""
    global typer  # their annotations are read with this name in sight
    import typer

    app = typer.Typer(no_args_is_help=True, add_completion=False)
    app.callback()(command_line)
    app.command()(demo)
    return app


def __getattr__(name: str) -> Any:
    # `app` is made on demand, so that this module can be imported, and main() can explain, without typer.
    if name == "app":
        return build_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    _check_output(output)
    from rich.console import Console

    from affinear.lens import demo as experiment
    from affinear.lens import figures
    from affinear.lens.files import place

    curves = experiment.collect(experiment.example(seed))
    console = Console(highlight=False)
    console.print(experiment.table(curves))
    console.print(experiment.reading(curves), width=min(console.width, 80))
    figure = figures.render(figures.loudness_figure(curves), output.suffix[1:].lower())
    try:
        placed = place(figure, output, force=force)
    except OSError as error:
        _stop(f"The figure could not be saved to {output}: {error.strerror or error}.")
    print(_told(placed.path, placed.written, output))


def _check_output(output: Path) -> None:
    # Before the work, not after it.
    if output.suffix.lower() not in FORMATS:
        _stop(f"The figure can be saved as .png, .svg or .pdf, not as {output.name!r}; give --output such a name.")
    if output.is_dir():
        _stop(f"{output} is a folder; give --output the name of a file in it.")
    if not output.parent.is_dir():
        _stop(f"The folder {output.parent} does not exist; make it first or give --output another place.")


def _told(path: Path, written: bool, wanted: Path) -> str:
    if not written:
        return f"The same figure is already in {path}."
    return f"Figure: {path}" if path == wanted else f"{wanted} was there and differs, so the figure is in {path}."


def _stop(sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()

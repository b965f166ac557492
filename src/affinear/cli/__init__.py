"""The `affinear` command: one thin file per subcommand, everything heavy imported when it is needed."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from importlib.util import find_spec
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from ..stopping import INTERRUPTED, await_interrupts
from .common import stop

if TYPE_CHECKING:
    from types import FrameType

    import typer

NEEDS = ("typer", "rich", "matplotlib")


def main() -> None:
    """Run the command line; where its packages are missing, say in one sentence how to get them."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        stop(f"The affinear command needs {' and '.join(missing)}: pip install 'affinear[lens]'")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a pipe of a narrower encoding loses a sign, not the whole answer
    await_interrupts()
    try:
        build_app()()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            _leave(INTERRUPTED)
        raise
    except KeyboardInterrupt:  # once more, on the way out of the first
        _leave(INTERRUPTED)


def _leave(code: int) -> None:
    """End now. Python would first take apart all that torch has made, for seconds, and who presses Ctrl-C waits."""

    def at_once(number: int, frame: FrameType | None) -> None:
        os._exit(code)

    signal.signal(signal.SIGINT, at_once)  # and who presses it again waits for nothing
    _flush()
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    _flush()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def build_app() -> typer.Typer:
    """Assemble the command line out of its subcommands."""
    import typer

    from . import bench, compare, convert, demo, distil, evaluate, export, lens, models, predict, train, version

    app = typer.Typer(no_args_is_help=True, add_completion=False)
    app.callback()(version.command_line)
    app.command()(demo.demo)
    app.command()(models.models)
    app.command()(convert.convert)
    app.command()(export.export)
    app.command()(train.train)
    app.command()(distil.distil)
    app.command("eval")(evaluate.evaluate)
    app.command()(predict.predict)
    app.command()(compare.compare)
    looking = typer.Typer()
    looking.callback(invoke_without_command=True)(lens.lens_microscope)
    looking.command("figures")(lens.lens_figures)
    looking.command("report")(lens.lens_report)
    app.add_typer(looking, name="lens")
    timing = typer.Typer(no_args_is_help=True, help="Time the library on this machine.")
    timing.command("ops")(bench.bench_ops)
    timing.command("models")(bench.bench_models)
    app.add_typer(timing, name="bench")
    return app


def __getattr__(name: str) -> Any:
    # `app` is made on demand, so that this module can be imported, and main() can explain, without typer.
    if name == "app":
        return build_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

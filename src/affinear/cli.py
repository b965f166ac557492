"""The `affinear` command: one thin function per subcommand, everything heavy imported when it is needed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

    from affinear.lens.files import Placed

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
    app.command()(models)
    app.command()(convert)
    app.command()(export)
    lens = typer.Typer()
    lens.callback(invoke_without_command=True)(lens_microscope)
    lens.command("figures")(lens_figures)
    lens.command("report")(lens_report)
    app.add_typer(lens, name="lens")
    bench = typer.Typer(no_args_is_help=True, help="Time the library on this machine.")
    bench.command("ops")(bench_ops)
    bench.command("models")(bench_models)
    app.add_typer(bench, name="bench")
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


def models(
    pattern: Annotated[str, typer.Argument(help="Which ones, such as 'mavit*' or '*_linear'.")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the networks: parameters, multiply-adds, which blocks are linear and which softmax, published accuracy."""
    _require("vision", "timm", "safetensors")
    import json
    from dataclasses import asdict

    from rich.console import Console

    from affinear.models import catalogue

    total = len(catalogue.names(pattern))
    if not total:
        _stop(f"No network is called {pattern!r}; `affinear models` without a pattern lists all.")
    rows: list[catalogue.Entry] = []
    with Console(stderr=True).status("Counting multiply-adds ...") as status:
        for entry in catalogue.entries(pattern):
            rows.append(entry)
            status.update(f"Counting multiply-adds ... {len(rows)} of {total} networks, about a second each")
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(catalogue.table(rows))


def convert(
    checkpoint: Annotated[Path, typer.Argument(help="A released file, .pth or .safetensors.")],
    model: Annotated[str, typer.Option(help="The network it belongs to, such as mavit_tiny.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to save the weights: .safetensors.")],
    nest: Annotated[
        str | None, typer.Option(help="Which weights, where the file has several: model, state_dict, model_ema ...")
    ] = None,
    img_size: Annotated[int | None, typer.Option(help="Resize position tables for images of this side.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Read a released checkpoint into one of the networks and save it as safetensors.

    Code in the checkpoint is never run. If a tensor is missing, unexpected or of another shape, all of them are named
    and nothing is written.
    """
    _require("vision", "timm", "safetensors")
    _check_output(output, "The weights", (".safetensors",))
    if not checkpoint.is_file():
        _stop(f"{checkpoint} is not a file; give the path of a checkpoint.")
    from affinear.models import checkpoints

    try:
        converted = checkpoints.convert(checkpoint, model, nest=nest, img_size=img_size)
    except (ValueError, TypeError) as error:
        _stop(f"{error}.")
    except OSError as error:
        _stop(f"{checkpoint} could not be read: {error.strerror or error}.")
    if converted.weights.others:
        print(f"Took {converted.weights.nest}; the file also has {', '.join(converted.weights.others)}: see --nest.")
    saved = _keeper(output, "file", force)(converted.content)
    print(_told(saved.path, saved.written, output, "file"))


def export(
    name: Annotated[str, typer.Argument(help="A network that `affinear models` lists, such as mavit_tiny.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to save it: .onnx.")] = Path("model.onnx"),
    weights: Annotated[
        Path | None, typer.Option(help="Its weights, .safetensors or a released file; random ones if not given.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="HxW of the images, such as 224x224; if not given, its own.")] = None,
    fixed_size: Annotated[bool, typer.Option("--fixed-size", help="For images of that size only.")] = False,
    opset: Annotated[int, typer.Option(min=18, help="Version of ONNX's operators.")] = 20,
    num_classes: Annotated[int | None, typer.Option(min=1, help="Classes, without --weights.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Save a network as ONNX, for any batch and, if it has no windows, any size, once onnxruntime agrees with torch.

    It takes minutes. If the output file is there already and differs, a free name such as model-2.onnx is taken, unless
    --force.
    """
    _require("export", "timm", "safetensors", "onnx", "onnxscript", "onnxruntime")
    _check_output(output, "The network", (".onnx",))
    from rich.console import Console

    from affinear.bench.models_plan import Images
    from affinear.models import checkpoints
    from affinear.models.export import export_onnx

    try:
        model = checkpoints.network(name, weights, num_classes)
        images = Images.parse(size or "x".join(str(side) for side in model.pretrained_cfg["input_size"][1:]), batch=1)
        with Console(stderr=True).status("") as status:
            exported = export_onnx(
                model,
                size=(images.height, images.width),
                dynamic_size=False if fixed_size else None,
                opset=opset,
                progress=lambda step: status.update(f"{step.capitalize()} ..."),
            )
    except (ValueError, RuntimeError, OSError) as error:
        _stop(f"{str(error).rstrip('.')}.")
    saved = _keeper(output, "network", force)(exported.content)
    print(f"May vary: {', '.join(exported.dynamic)}. Largest relative error against torch: {exported.error:.1e}.")
    print(_told(saved.path, saved.written, output, "network"))


def lens_microscope(
    context: typer.Context,
    host: Annotated[
        str, typer.Option(help="Where to listen; anywhere but on this machine, everybody can use it.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 0,
    model: Annotated[str | None, typer.Option(help="A network to look into, such as mavit_tiny.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Its weights, .safetensors or a released file; random ones if not given.")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Print the address, open nothing.")] = False,
) -> None:
    """Open the microscope, a page that shows what a patch of an image attends to; or draw figures or write a report."""
    if context.invoked_subcommand is not None:
        return
    _require("lens", "PIL", "numpy")
    if model is not None:
        _require("vision", "timm", "safetensors")
    from affinear.lens.microscope import serve

    try:
        serve(host, port, model, checkpoint, open_browser=not no_browser)
    except (ValueError, TypeError) as error:
        _stop(f"{str(error).rstrip('.')}.")
    except OSError as error:
        _stop(f"The microscope could not be started: {error.strerror or error}.")


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
            _stop(f"--format: expected some of png, svg, pdf, with commas, got {suffix[1:]!r}.")
    from rich.console import Console

    from affinear.lens import papers
    from affinear.lens.figures import render

    try:
        chosen = papers.pick(only)
    except ValueError as error:
        _stop(f"--{error}.")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _stop(f"The folder {output} could not be made: {error.strerror or error}.")
    console = Console(highlight=False)
    for name, draw in chosen.items():
        drawn = draw()
        console.print(f"[bold]{name}[/bold] ({drawn.source})")
        console.print(drawn.reading, width=min(console.width, 80), markup=False)
        for suffix in suffixes:
            wanted = output / f"{name}{suffix}"
            saved = _keeper(wanted, "figure", force)(render(drawn.figure, suffix[1:]))
            print(_told(saved.path, saved.written, wanted))
        print()


def lens_report(
    model: Annotated[str, typer.Option(help="A network that `affinear models` lists, such as mavit_tiny.")],
    data: Annotated[Path, typer.Option(help="A folder of images: .jpg, .png or .webp, in it or in folders of it.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to save the report: .html.")] = Path(
        "affinear-report.html"
    ),
    checkpoint: Annotated[
        Path | None, typer.Option(help="Its weights, .safetensors or a released file; random ones if not given.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many images.")] = 16,
    rows: Annotated[int, typer.Option(min=1, help="At most so many queries of each image and layer.")] = 256,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Show a network some images and report what each attention layer and head did: one HTML file.

    If the output file is there already and differs, a free name such as affinear-report-2.html is taken, unless
    --force.
    """
    _require("vision", "timm", "safetensors", "torchvision", "PIL")
    _check_output(output, "The report", (".html",))
    import torch
    from rich.console import Console

    from affinear.lens.report import batch_of_images, html, summary
    from affinear.lens.watching import watch
    from affinear.models import checkpoints

    try:
        network = checkpoints.network(model, checkpoint).eval()
        images = batch_of_images(data, network, limit)
        with Console(stderr=True).status("") as status, watch(network, rows=rows) as watched, torch.no_grad():
            for done, batch in enumerate(images.pixels.split(4)):
                status.update(f"Looking at image {4 * done + 1} of {len(images.names)} ...")
                network(batch)
    except (ValueError, RuntimeError, OSError) as error:
        _stop(f"{str(error).rstrip('.')}.")
    for reason in images.skipped:
        print(f"Skipped {reason}", file=sys.stderr)
    about = {
        "network": model,
        "weights": "random" if checkpoint is None else checkpoint.name,
        "images": f"{len(images.names)} of {data}",
        "rows": f"at most {rows} of each image",
    }
    page = html(watched, title=f"Attention of {model}", about=about)
    print("\n".join(summary(watched)))
    saved = _keeper(output, "report", force)(page.encode())
    print(_told(saved.path, saved.written, output, "report"))


def bench_ops(
    shape: Annotated[
        list[str] | None, typer.Option(help="B,H,N,D instead of the default shapes; may be given again.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="The shapes are causal; alone: the causal table.")] = False,
    mechanism: Annotated[str, typer.Option(help="Of every table but the one that compares mechanisms.")] = "mala",
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16, float16 or float32; if not given, bfloat16, on a CPU float32.")
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Tables, with commas: non-causal, causal, decode, rotary, mechanisms, overhead, crossover."),
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=1e-3, help="About how long to measure one row.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="As little as still shows that everything works.")] = False,
    output: Annotated[Path, typer.Option(help="Where to save the report, every number of it: .json.")] = Path(
        "affinear-bench.json"
    ),
    chart: Annotated[Path, typer.Option(help="Where to save the crossover chart: .png, .svg or .pdf.")] = Path(
        "affinear-crossover.png"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace the files if they are there.")] = False,
) -> None:
    """Time the operator beside its rivals, check every result first, and say which bars are met.

    All tables take some minutes. Ctrl-C ends a run early; what was measured is saved all the same. If a file is there
    already and differs, a free name such as affinear-bench-2.json is taken, unless --force.
    """
    _check_output(output, "The report", (".json",))
    _check_output(chart, "The chart", FORMATS, "--chart")
    from rich.console import Console

    from affinear.bench import ops
    from affinear.bench.session import watch

    try:
        plan = ops.prepare(shape or (), causal, mechanism, dtype, quick, only, seconds)
    except ValueError as error:
        _stop(f"{error}.")
    keep = _keeper(output, "report", force)
    report = ops.begin(plan)
    page = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    watch(plan, report, page, Console(highlight=False, stderr=True), keep)
    if any(row.table == "crossover" and row.ms is not None for row in report.rows):
        from affinear.bench.chart import crossover_figure
        from affinear.lens.figures import render

        drawn = _keeper(chart, "chart", force)(render(crossover_figure(report), chart.suffix[1:].lower()))
        print(_told(drawn.path, drawn.written, chart, "chart"))
    saved = keep(ops.as_json(report))
    print(_told(saved.path, True, output, "report"))
    if report.interrupted:
        sys.exit(130)


def bench_models(
    model: Annotated[
        list[str] | None, typer.Option(help="A network instead of the default ones, any of timm's; may be given again.")
    ] = None,
    size: Annotated[
        list[str] | None, typer.Option(help="HxW of the images, such as 512x2048; may be given again.")
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Images at once; given again, one for each size.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of autocast: bfloat16 or float32; if not given, bfloat16, on a CPU float32.")
    ] = None,
    compiled: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="Measure compiled networks too; if not given, on a GPU."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Any of these, with commas: inference, training, eager, compiled.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=1e-3, help="About how long to measure one row.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="As little as still shows that everything works.")] = False,
    output: Annotated[Path, typer.Option(help="Where to save the report, every number of it: .json.")] = Path(
        "affinear-bench-models.json"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Time networks beside softmax networks of about their size: images per second and memory.

    Inference and a training step, eager and compiled, each network in turns with its baseline. Compiling takes most of
    the time. Ctrl-C ends a run early; what was measured is saved all the same. If the file is there already and
    differs, a free name such as affinear-bench-models-2.json is taken, unless --force.
    """
    _require("vision", "timm")
    _check_output(output, "The report", (".json",))
    from rich.console import Console

    from affinear.bench import models as networks

    try:
        plan = networks.prepare(model or (), size or (), batch or (), dtype, compiled, only, quick, seconds)
    except ValueError as error:
        _stop(f"{error}.")
    keep = _keeper(output, "report", force)
    report = networks.begin(plan)
    page = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    networks.watch(plan, report, page, Console(highlight=False, stderr=True), keep)
    saved = keep(networks.as_json(report))
    print(_told(saved.path, True, output, "report"))
    if report.interrupted:
        sys.exit(130)


def _require(extra: str, *packages: str) -> None:
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        _stop(f"This command needs {' and '.join(missing)}: pip install 'affinear[{extra}]'")


def _keeper(wanted: Path, what: str, force: bool) -> Callable[[bytes], Placed]:
    """A function that saves the latest version of a file: once a name is taken, over what it saved there before."""
    from affinear.lens.files import place

    taken: list[Path] = []

    def keep(content: bytes) -> Placed:
        try:
            placed = place(content, taken[0] if taken else wanted, force=force or bool(taken))
        except OSError as error:
            _stop(f"The {what} could not be saved to {wanted}: {error.strerror or error}.")
        taken.append(placed.path)
        return placed

    return keep


def _check_output(
    output: Path, what: str = "The figure", formats: tuple[str, ...] = FORMATS, option: str = "--output"
) -> None:
    # Before the work, not after it.
    if output.suffix.lower() not in formats:
        named = " or ".join(filter(None, (", ".join(formats[:-1]), formats[-1])))
        _stop(f"{what} can be saved as {named}, not as {output.name!r}; give {option} such a name.")
    if output.is_dir():
        _stop(f"{output} is a folder; give {option} the name of a file in it.")
    if not output.parent.is_dir():
        _stop(f"The folder {output.parent} does not exist; make it first or give {option} another place.")


def _told(path: Path, written: bool, wanted: Path, what: str = "figure") -> str:
    if not written:
        return f"The same {what} is already in {path}."
    if path == wanted:
        return f"{what.capitalize()}: {path}"
    return f"{wanted} was there and differs, so the {what} is in {path}."


def _stop(sentence: str) -> NoReturn:
    print(sentence, file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()

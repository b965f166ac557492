"""The `affinear` command: one thin function per subcommand, everything heavy imported when it is needed."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    import typer

    from affinear.lens.files import Placed
    from affinear.train import Run
    from affinear.train.compare import Results

NEEDS = ("typer", "rich", "matplotlib")
FORMATS = (".png", ".svg", ".pdf")
TRAINING = ("timm", "accelerate", "safetensors", "torchvision", "PIL", "numpy")


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
    app.command()(train)
    app.command("eval")(evaluate)
    app.command()(predict)
    app.command()(compare)
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


def train(
    model: Annotated[str, typer.Argument(help="A network, such as mavit_tiny, or any of timm's.")],
    data: Annotated[str, typer.Option(help="Images: a folder with train/ and val/, CIFAR or idx files, or 'digits'.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the run; runs/MODEL-DATA if not given.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe by name; if not given, the network's published one.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any field of the recipe: field=value; may be given again.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the images.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images of one step, over all processes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; if not given, the recipe's, by batch.")] = None,
    image_size: Annotated[str | None, typer.Option(help="Side, or height x width: 224 or 192x256.")] = None,
    precision: Annotated[str | None, typer.Option(help="no, bf16 or fp16; bf16 on a GPU if not given.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that read images.")] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile; if not given, on a GPU.")
    ] = None,
    model_arg: Annotated[
        list[str] | None, typer.Option(help="name=value for the network's making; may be given again.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Weights to begin with, .safetensors or released.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue a run in the folder; or refuse to if there is one.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="With --no-resume: remove the run in the folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and the recipe, and stop.")] = False,
) -> None:
    """Train a network on images; run the same command again to continue after any interruption.

    On several GPUs: torchrun --nproc-per-node 4 -m affinear.cli train ..., or accelerate launch.
    """
    _require("train", *TRAINING)
    from affinear.train import Run, devices, progress, published
    from affinear.train import recipe as recipes
    from affinear.train import train as run_training

    plain = {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "precision": precision,
        "seed": seed,
        "workers": workers,
        "compile": compiled,
    }
    with _told_in_a_sentence():
        changes = {**recipes.parse(setting or []), **{k: v for k, v in plain.items() if v is not None}}
        if image_size is not None:
            changes["image_size"] = recipes.parse_size(image_size)
        chosen = published.recipe_for(model, recipe, **changes)
        where = output or Path("runs") / f"{model}-{Path(data).name or 'data'}"
        run = Run(model, data, where, chosen, recipes.parse_model_args(model_arg or []), weights)
        if dry_run:
            _print_plan(run)
            return
        result = run_training(run, resume=resume, force=force, progress=progress.for_people())
        devices.part()
    if _is_first():
        for name in result.skipped_names:
            print(f"Skipped, because it cannot be read: {name}", file=sys.stderr)
        skipped = f" Images that could not be read: {result.skipped}." if result.skipped else ""
        print(
            f"top-1 {result.top1:.2%}, top-5 {result.top5:.2%} after {len(result.epochs)} epochs; best "
            f"{result.best_top1:.2%} after epoch {result.best_epoch}. {result.images_per_second:,.0f} images/s."
            + skipped
        )
        print(f"Best weights: {result.weights}")


def evaluate(
    source: Annotated[Path, typer.Argument(help="Folder of a run, or a file of weights.")],
    data: Annotated[str, typer.Option(help="Images, as for `affinear train`; the test half is taken.")],
    model: Annotated[str | None, typer.Option(help="The network, for weights that do not tell.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images at a time.")] = None,
    image_size: Annotated[str | None, typer.Option(help="Side, or height x width, if not that of training.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read images.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure trained weights on test images: top-1, top-5, loss, and each class by itself."""
    _require("train", *TRAINING)
    import json
    from dataclasses import asdict

    from affinear.train import evaluate as measure
    from affinear.train import recipe as recipes

    with _told_in_a_sentence():
        size = None if image_size is None else recipes.parse_size(image_size)
        score = measure(source, data, model=model, batch_size=batch_size, workers=workers, image_size=size)
    if not _is_first():
        return
    for name in score.skipped:
        print(f"Skipped, because it cannot be read: {name}", file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(score), indent=2, ensure_ascii=False))
        return
    for part in score.classes:
        print(f"{part.top1:8.2%}  of {part.images:6}  {part.name}")
    print(f"top-1 {score.top1:.2%}, top-5 {score.top5:.2%}, loss {score.loss:.4f}, {score.images} images")


def predict(
    images: Annotated[list[Path], typer.Argument(help="Files of images.")],
    weights: Annotated[Path, typer.Option(help="Folder of a run, or a file of weights.")],
    model: Annotated[str | None, typer.Option(help="The network, for weights that do not tell.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many guesses for each image.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Tell what images show, with the likeliest classes first.

    An image that cannot be read gets a line that says so; the others are answered, and the exit code is 1.
    """
    _require("train", *TRAINING)
    import json
    from dataclasses import asdict

    from affinear.train import load_trained
    from affinear.train.predict import predict as guesses

    found: list[dict[str, Any]] = []
    with _told_in_a_sentence():
        for answer in guesses(load_trained(weights, model), images, top=top):
            found.append(asdict(answer))
            if as_json:
                continue
            if answer.error is not None:
                print(f"{answer.image}: {answer.error}")
            else:
                print(f"{answer.image}: " + ", ".join(f"{g.name} {g.probability:.1%}" for g in answer.guesses))
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    if any(answer["error"] is not None for answer in found):
        sys.exit(1)


def compare(
    data: Annotated[str, typer.Option(help="Images, as for `affinear train`; 'digits' are always at hand.")] = "digits",
    model: Annotated[
        str, typer.Option(help="affinear_trunk_micro, affinear_trunk_cifar, or any network of ours or timm's.")
    ] = "affinear_trunk_micro",
    mechanisms: Annotated[
        str | None, typer.Option(help="What to compare, with commas, such as softmax,mala+rotary,mala_layer.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many, such as 3, or which, such as 0,1,2.")] = "2",
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the images.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the comparison; runs/compare if not given.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any field of the recipe: field=value; may be given again.")
    ] = None,
    model_arg: Annotated[
        list[str] | None,
        typer.Option(help="What the network is made with: name=value, such as depth=6; may be given again."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many images of each half.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=0, help="Networks trained at a time; one per core if not given, 0: in this process."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, two epochs: whether it works.")] = False,
) -> None:
    """Train the same network once per attention and seed, and say which differences are real: the papers' experiment.

    Without options: scikit-learn's digits, six attentions with and without rotary positions, two seeds. The same
    command goes on after an interruption, and does not train again what is through.
    """
    _require("train", *TRAINING)
    from affinear.train import compare as comparisons
    from affinear.train import compare_screen as screens
    from affinear.train import recipe as recipes

    with _told_in_a_sentence():
        changes = {**recipes.parse(setting or []), **({"epochs": epochs} if epochs else {})}
        chosen = 1 if quick else comparisons.parse_seeds(seeds)
        where = output or Path("runs", "compare-quick" if quick else "compare")
        names = None if mechanisms is None else mechanisms.split(",")
        if quick:
            changes = {"epochs": comparisons.QUICK_EPOCHS, **changes}
        made = recipes.parse_model_args(model_arg or [])
        plan = comparisons.prepare(
            data, model, names, chosen, where, model_args=made, limit=limit, jobs=jobs, **changes
        )
        results = comparisons.run(plan, screens.for_people())
    if results.outcomes:
        _print_results(results)
    if results.interrupted:
        print(f"Stopped and saved after {len(results.outcomes)} of {len(plan.cells)} cells. The same command goes on.")
        sys.exit(130)


def _print_results(results: Results) -> None:
    from rich.console import Console

    from affinear.train import compare as comparisons
    from affinear.train import compare_screen as screens

    told = comparisons.conclusions(results)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(screens.table(told.summaries))
    console.print(screens.LEGEND, style="dim", width=min(console.width, 120))
    print()
    for finding in told.findings:
        if finding.decided:
            console.print(finding.sentence, markup=False)
    for sentence in told.limits:
        console.print(sentence, markup=False)
    print(f"Report: {results.comparison.output / comparisons.REPORT}")


def _print_plan(run: Run) -> None:
    from affinear.train import plan as plans

    planned = plans.plan(run)
    if _is_first():
        print(plans.in_words(planned))
        print(f"recipe         {planned.run.recipe.to_json()}")


@contextmanager
def _told_in_a_sentence() -> Generator[None]:
    """End with a sentence, and the exit code that fits, where training or evaluation cannot go on."""
    import torch

    from affinear.train import Interrupted, NonFinite

    try:
        yield
    except Interrupted as stop:
        if _is_first():
            print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)
    except KeyboardInterrupt:
        print("Stopped at once; the last checkpoint is as it was.", file=sys.stderr)
        sys.exit(130)
    except torch.OutOfMemoryError:
        _stop(
            "The GPU's memory is full. --set accumulate=2 works a batch off in two parts; a smaller --batch-size helps "
            "too."
        )
    except NonFinite as fault:
        _stop(str(fault))  # by whichever process met it
    except (ValueError, RuntimeError, OSError) as error:
        if not _is_first():
            sys.exit(1)
        _stop(f"{str(error).rstrip('.')}.")


def _is_first() -> bool:
    # Of the processes that torchrun or accelerate started; all of them compute, one of them speaks.
    return os.environ.get("RANK", "0") == "0"


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
        str | None, typer.Option(help="Any of these, with commas: inference, training, eager, compiled, graphed.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=1e-3, help="About how long to measure one row.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="As little as still shows that everything works.")] = False,
    output: Annotated[Path, typer.Option(help="Where to save the report, every number of it: .json.")] = Path(
        "affinear-bench-models.json"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
) -> None:
    """Time networks beside softmax networks of about their size: images per second and memory.

    Inference and a training step; eager, compiled, and graphed, which is compiled and replayed as CUDA graphs; each
    network in turns with its baseline. Compiling takes most of the time. Ctrl-C ends a run early; what was measured is
    saved all the same. If the file is there already and differs, a free name such as
    affinear-bench-models-2.json is taken, unless --force.
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

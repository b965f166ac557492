"""`affinear train`: train a network, or go on where it was interrupted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import TRAINING, changes_of, is_first, listen, require, told_in_a_sentence
from .plugins import Plugins, load_plugins

if TYPE_CHECKING:
    from affinear.train import Result, Run, Task


def train(
    model: Annotated[
        str, typer.Argument(help="A network, such as mavit_tiny, or any of timm's; `affinear models` lists ours.")
    ],
    data: Annotated[
        str,
        typer.Option(
            help="What to learn from: a folder with train/ and val/, CIFAR or idx files, or 'digits'; what other tasks "
            "take, their pages in docs/ tell."
        ),
    ],
    task: Annotated[
        str,
        typer.Option(
            help="What to train it for: classify, segment, detect, speech, language, ranges, generate, upscale; "
            "docs/tasks.md tells of all."
        ),
    ] = "classify",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the run; runs/MODEL-DATA if not given.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe by name; if not given, the network's published one.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any field of recipe or task: field=value; may be given again.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the samples.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, instead of epochs.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples of one step, over all processes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate; if not given, the recipe's, by batch.")] = None,
    image_size: Annotated[str | None, typer.Option(help="Side, or height x width: 224 or 192x256.")] = None,
    precision: Annotated[str | None, typer.Option(help="no, bf16 or fp16; bf16 on a GPU if not given.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of everything random.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that read samples.")] = None,
    compiled: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile; if not given, on a GPU.")
    ] = None,
    context_parallel: Annotated[
        int | None, typer.Option(help="Processes that share every image, each with a strip of it.")
    ] = None,
    model_arg: Annotated[
        list[str] | None, typer.Option(help="name=value for the network's making; may be given again.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Weights to begin with, .safetensors or released.")] = None,
    plugin: Plugins = None,
    freeze: Annotated[
        str | None,
        typer.Option(help="What keeps its weights: body (all but the head), or names of parts with commas."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue a run in the folder; or refuse to if there is one.")
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="With --no-resume: remove the run in the folder.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and the recipe, and stop.")] = False,
) -> None:
    """Train a network; run the same command again to continue after any interruption.

    On several GPUs: torchrun --nproc-per-node 4 -m affinear.cli train ..., or accelerate launch.
    """
    require("train", *TRAINING)
    from affinear import tasks
    from affinear.tasks.fitting import fitted
    from affinear.train import Run, devices, progress, spelling
    from affinear.train import train as run_training
    from affinear.train.engine import by_steps_of

    plain = {
        "epochs": epochs,
        "steps": steps,
        "batch_size": batch_size,
        "lr": lr,
        "precision": precision,
        "seed": seed,
        "workers": workers,
        "compile": compiled,
        "context_parallel": context_parallel,
        "freeze": freeze,
    }
    with told_in_a_sentence():
        load_plugins(plugin)
        chosen = tasks.find(task)
        changes = changes_of(chosen, setting, image_size=image_size)
        changes |= {name: value for name, value in plain.items() if value is not None}
        opened = chosen.open(data, tasks.recipe_for(chosen, model, recipe, **changes).settings)
        setup, fitting = fitted(chosen, model, recipe, changes, opened)
        if fitting and is_first():
            print(fitting, file=sys.stderr)
        where = output or Path("runs") / f"{model}-{Path(data).name or 'data'}"
        run = Run(model, data, where, setup, spelling.parse_model_args(model_arg or []), weights)
        if dry_run:
            _print_plan(run, opened)
            return
        tunes = "finetune" in chosen.recipes and setup == fitted(chosen, model, "finetune", changes, opened)[0]
        if freeze and weights is None and is_first():
            print("What is frozen keeps its fresh weights, as there are no --weights.", file=sys.stderr)
        if tunes and weights is None and is_first():
            print("The recipe is for fine-tuning, and without --weights it starts from nothing.", file=sys.stderr)
        result = run_training(run, resume=resume, force=force, progress=progress.for_people(), data=opened)
        listen()  # until its first step is done, a run leaves Ctrl-C as it was
        devices.part()
    if is_first():
        _print_result(chosen, result, by_steps_of(setup.recipe))


def _print_result(task: Task[Any, Any], result: Result, by_steps: bool) -> None:
    from affinear.train import progress

    last = result.records[-1]
    passes = f"{last.step:,} steps" if by_steps else progress.epochs(last.epoch)
    when = f"step {result.best_step:,}" if by_steps else f"epoch {result.best_epoch}"
    for name in result.skipped_names:
        print(f"Skipped, because it cannot be read: {name}", file=sys.stderr)
    known = [m for m in sorted(task.measures, key=lambda m: m.name == "loss") if m.name in result.score]
    numbers = ", ".join(f"{measure.title} {measure.told(result.score[measure.name])}" for measure in known)
    skipped = f" {task.samples.capitalize()} that could not be read: {result.skipped}." if result.skipped else ""
    print(
        f"{numbers} after {passes}; best {task.metric.title} {task.metric.told(result.best)} "
        f"after {when}. {progress.pace(result.per_second)} {task.unit}/s.{skipped}"
    )
    print(f"Best weights: {result.weights}")
    print(f"Report: {result.weights.with_name('report.html')}")


def _print_plan(run: Run, data: Any) -> None:
    from affinear.train import plan as plans

    planned = plans.plan(run, data)
    if is_first():
        print(plans.in_words(planned))
        print(f"recipe         {planned.to_json()}")

"""`affinear train`: train a network, or go on where it was interrupted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import TRAINING, is_first, require, told_in_a_sentence

if TYPE_CHECKING:
    from affinear.train import Run


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
    require("train", *TRAINING)
    from affinear.tasks.classify import published
    from affinear.train import Run, devices, progress
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
    with told_in_a_sentence():
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
    if is_first():
        for name in result.skipped_names:
            print(f"Skipped, because it cannot be read: {name}", file=sys.stderr)
        skipped = f" Images that could not be read: {result.skipped}." if result.skipped else ""
        print(
            f"top-1 {result.top1:.2%}, top-5 {result.top5:.2%} after {len(result.epochs)} epochs; best "
            f"{result.best_top1:.2%} after epoch {result.best_epoch}. {result.images_per_second:,.0f} images/s."
            + skipped
        )
        print(f"Best weights: {result.weights}")


def _print_plan(run: Run) -> None:
    from affinear.train import plan as plans

    planned = plans.plan(run)
    if is_first():
        print(plans.in_words(planned))
        print(f"recipe         {planned.run.recipe.to_json()}")

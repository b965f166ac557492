"""`affinear distil`: a trained softmax network becomes a linear one, in two stages."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import TRAINING, changes_of, is_first, listen, require, told_in_a_sentence
from .plugins import Plugins, load_plugins


def distil(
    teacher: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run, or file of weights, of a softmax network; or a folder of transformers' with a "
            "causal language model or a Whisper."
        ),
    ],
    data: Annotated[str, typer.Option(help="What to learn from, as affinear train takes it.")],
    mechanism: Annotated[str, typer.Option(help="What softmax is swapped for.")] = "mala",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for both stages; runs/TEACHER-MECHANISM if not given.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The network, for weights that do not tell.")] = None,
    layer_epochs: Annotated[
        int | None, typer.Option(help="Passes in which each layer learns by itself; 0 for none. Else as recipes say.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes in which the whole network learns; 0 for none. Else as recipes say.")
    ] = None,
    layer_steps: Annotated[int | None, typer.Option(help="The same in steps: of the layers; 0 for none.")] = None,
    steps: Annotated[int | None, typer.Option(help="The same in steps: of the whole network; 0 for none.")] = None,
    leave: Annotated[
        int | None,
        typer.Option(help="So many layers stay softmax: those that are worth it, found by trying before it learns."),
    ] = None,
    leave_samples: Annotated[int, typer.Option(help="On how many training samples they are tried.")] = 16,
    image_size: Annotated[str | None, typer.Option(help="Side, or height x width, if not that of the teacher.")] = None,
    timing: Annotated[
        bool, typer.Option("--timing/--no-timing", help="Measure from which length on it is faster; some seconds.")
    ] = True,
    plugin: Plugins = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any field of recipe or task: field=value; may be given again.")
    ] = None,
) -> None:
    """Swap the attention of a trained network, and let it learn from the network it was.

    Classifiers of images, causal language models, and Whisper's encoder. Run the same command again to continue after
    any interruption. The report of each stage tells every layer's error. At the end teacher and student are told beside
    each other, and it is measured, on this machine, from which length on the linear attention is faster, if it is.
    """
    require("distil", *TRAINING)
    from affinear import tasks
    from affinear.tasks.distil.quiet import without_bars
    from affinear.tasks.distil.stages import HUGGING, plan_for
    from affinear.train import Result, Run, devices, progress
    from affinear.train import train as run_training

    with told_in_a_sentence(), ExitStack() as held:
        load_plugins(plugin)
        plan = plan_for(teacher, model)
        task = plan.task
        if task.name in HUGGING:
            held.enter_context(without_bars())
        given: dict[str, Any] = changes_of(task, setting, image_size=image_size)
        where = output or Path("runs") / f"{teacher.resolve().stem}-{mechanism}"
        done: list[tuple[Run, Result]] = []
        listen()
        if leave is not None:
            whole = tasks.recipe_for(task, plan.model, "whole", **given, teacher=str(teacher), mechanism=mechanism)
            trial = Run(plan.model, data, where, whole, plan.model_args)
            given["leave"] = _chosen(trial, leave, leave_samples)
        for stage, length in (("layers", _length(layer_epochs, layer_steps)), ("whole", _length(epochs, steps))):
            if 0 in length.values():
                continue
            changes = {**length, **given, "teacher": str(teacher), "mechanism": mechanism}
            setup = tasks.recipe_for(task, plan.model, stage, **changes)
            run = Run(plan.model, data, where / stage, setup, plan.model_args, done[-1][1].last if done else None)
            result = run_training(run, progress=progress.for_people())
            done.append((run, result))
            if is_first():
                best = task.metric.told(result.best)
                print(f"Stage {stage}: best {task.metric.title} {best}. Report: {where / stage / 'report.html'}")
        if done:
            _compare(*done[-1], where)
        if done and is_first():
            last = done[-1][1].last
            if timing:
                _time(last)
            _write(last, where / "student")
        devices.part()


def _chosen(run: Any, count: int, samples: int) -> str:
    """The layers that are worth leaving, as the settings spell them beside those that were named."""
    from affinear.tasks.distil.choosing import layers_left
    from affinear.train import progress

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            "--leave: layers are chosen by one process; run without torchrun first, and then give --set leave= with "
            "the numbers that it prints"
        )
    found = layers_left(run, count, samples, progress=progress.for_people())
    for left in found:
        print(f"Layer {left.name} stays softmax: the loss before learning is {left.cost:.4f} with it.")
    numbers = ",".join([*filter(None, [run.setup.settings.leave]), *(left.name for left in found)])
    print(f"The same another time: --set leave={numbers}")
    return numbers


def _compare(run: Any, result: Any, folder: Path) -> None:
    """Say what the teacher scores, and what is left of that in the weights after the student's last step."""
    from affinear.tasks.distil.judging import teacher_score
    from affinear.train import progress

    metric = run.setup.task.metric
    teacher = metric.told(teacher_score(run, folder, progress=progress.for_people())[metric.name])
    if is_first():
        print(f"Teacher: {metric.title} {teacher}. Student: {metric.title} {metric.told(result.value)}.")


def _length(epochs: int | None, steps: int | None) -> dict[str, int]:
    """Fields of a recipe that say how long a stage is; none where it says so itself."""
    if epochs is not None and steps is not None:
        raise ValueError("steps: expected passes or steps of a stage, got both")
    if min(epochs or 0, steps or 0) < 0:
        raise ValueError("steps: expected 0 or more")
    if steps is not None:
        return {"steps": steps}
    return {} if epochs is None else {"epochs": epochs}


def _time(weights: Path) -> None:
    """Say from which length on the student is faster."""
    import torch

    from affinear import tasks
    from affinear.linearizing.crossover import crossovers

    network = tasks.load_trained(weights).network
    cuda = torch.cuda.is_available()
    place, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    print("Linear attention beside torch's softmax, one input at a time:")
    for found in crossovers(network, device=place, dtype=dtype, seconds=8.0):
        print(f"  {found}")


def _write(weights: Path, folder: Path) -> None:
    """Write a student as transformers would, where it is theirs."""
    from affinear.tasks.distil.stages import is_transformers, write_hugging

    if not is_transformers(weights):
        return
    if folder.exists():
        print(f"{folder} is there already and stays as it is; remove it to have it written anew.")
    else:
        print(f"For transformers: {write_hugging(weights, folder)}")

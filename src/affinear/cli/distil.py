"""`affinear distil`: a trained softmax classifier becomes a linear one, in two stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import TRAINING, changes_of, is_first, listen, require, told_in_a_sentence
from .plugins import Plugins, load_plugins


def distil(
    teacher: Annotated[Path, typer.Argument(help="Folder of a run, or file of weights, of a softmax network.")],
    data: Annotated[str, typer.Option(help="What to learn from, as affinear train takes it.")],
    mechanism: Annotated[str, typer.Option(help="What softmax is swapped for.")] = "mala",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder for both stages; runs/TEACHER-MECHANISM if not given.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The network, for weights that do not tell.")] = None,
    layer_epochs: Annotated[int, typer.Option(help="Passes in which each layer learns by itself.")] = 5,
    epochs: Annotated[int, typer.Option(help="Passes in which the whole network learns.")] = 25,
    image_size: Annotated[str | None, typer.Option(help="Side, or height x width, if not that of the teacher.")] = None,
    plugin: Plugins = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any field of recipe or task: field=value; may be given again.")
    ] = None,
) -> None:
    """Swap the attention of a trained classifier, and let it learn from the network it was.

    Run the same command again to continue after any interruption. The report of each stage tells every layer's error.
    """
    require("distil", *TRAINING)
    from affinear import tasks
    from affinear.train import Run, devices, progress
    from affinear.train import train as run_training
    from affinear.train.checkpoint import BEST, LAST

    with told_in_a_sentence():
        load_plugins(plugin)
        task = tasks.find("distil")
        trained = tasks.load_trained(teacher, model)
        given: dict[str, Any] = changes_of(task, setting, image_size=image_size)
        where = output or Path("runs") / f"{teacher.resolve().stem}-{mechanism}"
        weights = teacher / BEST if teacher.is_dir() else teacher
        listen()
        for stage, length in (("layers", layer_epochs), ("whole", epochs)):
            if not length:
                continue
            changes = {"epochs": length, **given, "teacher": str(teacher), "mechanism": mechanism}
            setup = tasks.recipe_for(task, trained.job.model, stage, **changes)
            run = Run(trained.job.model, data, where / stage, setup, trained.job.model_args, weights)
            result = run_training(run, progress=progress.for_people())
            weights = where / stage / LAST
            if is_first():
                best = task.metric.told(result.best)
                print(f"Stage {stage}: best {task.metric.title} {best}. Report: {where / stage / 'report.html'}")
        devices.part()

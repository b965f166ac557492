"""`affinear eval`: how well trained weights do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import TRAINING, changes_of, is_first, listen, require, told_in_a_sentence
from .plugins import Plugins, load_plugins

if TYPE_CHECKING:
    from affinear.train import Score, Task


def evaluate(
    source: Annotated[Path, typer.Argument(help="Folder of a run, or a file of weights.")],
    data: Annotated[
        str,
        typer.Option(help="As for `affinear train`; the test half is taken, or all of class folders without one."),
    ],
    task: Annotated[str | None, typer.Option(help="The task, for weights that do not tell; else classify.")] = None,
    model: Annotated[str | None, typer.Option(help="The network, for weights that do not tell.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples at a time.")] = None,
    image_size: Annotated[str | None, typer.Option(help="Side, or height x width, if not that of training.")] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting of the task: field=value; may be given again.")
    ] = None,
    plugin: Plugins = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Of class folders, only what `affinear train` holds out.")
    ] = False,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read samples.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure trained weights on a test set: the numbers of the task, and each class by itself.

    The test half of the data is taken. Class folders without halves are measured whole, images that the network has
    learned from among them, unless --held-out.
    """
    require("train", *TRAINING)
    import json

    from affinear import tasks
    from affinear.train import confused

    with told_in_a_sentence("it was not measured to the end"):
        load_plugins(plugin)
        # Settings are spelled as their task says, so the weights are asked first which one it is.
        trained = tasks.load_trained(source, model, task=task)
        changes = changes_of(trained.task, setting, image_size=image_size)
        if changes:
            trained = tasks.load_trained(source, model, task=task, **changes)
        listen()
        judge = trained.task.open_to_judge if not held_out else trained.task.open_held_out
        opened, which = judge(data, trained.job.settings)
        score = tasks.evaluate(trained, opened, batch_size=batch_size, workers=workers)
    if not is_first():
        return
    for name in score.skipped:
        print(f"Skipped, because it cannot be read: {name}", file=sys.stderr)
    if as_json:
        print(json.dumps({"data": which, **_content(trained.task, score)}, indent=2, ensure_ascii=False))
        return
    for part in score.parts:
        value = part.numbers.get(trained.task.metric.name)
        shown = "-" if value is None else trained.task.metric.told(value)
        print(f"{shown:>9}  of {part.count:6}  {part.name}")
    for line in confused.lines([part.name for part in score.parts], score.confusion):
        print(line)
    known = [measure for measure in trained.task.measures if measure.name in score.numbers]
    known.sort(key=lambda measure: measure.name == "loss")
    numbers = [f"{measure.title} {measure.told(score[measure.name])}" for measure in known]
    print(", ".join([*numbers, f"{score.count} {score.counted or trained.task.samples}"]))
    print(f"Measured on {which}.")


def _content(task: Task[Any, Any], score: Score) -> dict[str, Any]:
    """For machines: the numbers beside each other, and those of each class."""
    parts = [{"name": part.name, part.counted or task.samples: part.count, **part.numbers} for part in score.parts]
    taken = {"confusion": score.confusion} if score.confusion else {}
    count = {score.counted or task.samples: score.count}
    return {**score.numbers, **count, task.parts: parts, **taken, "skipped": list(score.skipped)}

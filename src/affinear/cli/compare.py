"""`affinear compare`: the same network once per attention and seed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..stopping import INTERRUPTED
from .common import TRAINING, changes_of, listen, require, told_in_a_sentence
from .plugins import Plugins, load_plugins

if TYPE_CHECKING:
    from affinear.compare import Results


SMALLEST = {
    "classify": "affinear_trunk_micro",
    "segment": "mavit_tiny",
    "detect": "mavit_tiny",
    "language": "affinear_tiny",
    "ranges": "sequence_small",
    "speech": "conformer_small",
    "generate": "dit_s_2",
    "upscale": "upscaler_light",
}


def compare(
    data: Annotated[str, typer.Option(help="As for `affinear train`; 'digits' are always at hand.")] = "digits",
    task: Annotated[str, typer.Option(help="What to train for, as for `affinear train`.")] = "classify",
    model: Annotated[
        str | None,
        typer.Option(
            help="affinear_trunk_micro, affinear_trunk_cifar, or any network of ours or timm's; several with commas, "
            "such as mavit_tiny,ravlt_tiny,swin_tiny_patch4_window7_224, are compared as they are. If not given, a "
            "small one of the task."
        ),
    ] = None,
    mechanisms: Annotated[
        str | None, typer.Option(help="What to compare, with commas, such as softmax,mala+rotary,mala_layer.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="How many, such as 3, or which, such as 0,1,2.")] = "2",
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the samples.")] = None,
    image_size: Annotated[str | None, typer.Option(help="Side, or height x width: 64 or 64x96.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of the comparison; runs/compare if not given.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Any field of recipe or task: field=value; may be given again.")
    ] = None,
    model_arg: Annotated[
        list[str] | None,
        typer.Option(help="What the network is made with: name=value, such as depth=6; may be given again."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many samples of each half.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=0, help="Networks trained at a time; one per core if not given, 0: in this process."),
    ] = None,
    plugin: Plugins = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be trained, and stop.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, two epochs: whether it works.")] = False,
) -> None:
    """Train the same network once per attention and seed, and say which differences are real: the papers' experiment.

    With several networks, each is trained as it is, with one recipe on the same data: the papers' tables.

    Without options: scikit-learn's digits, six attentions with and without rotary positions, two seeds. The same
    command goes on after an interruption, and does not train again what is through.
    """
    require("train", *TRAINING)
    from affinear import compare as comparisons
    from affinear import tasks
    from affinear.compare import screen as screens
    from affinear.compare.workers import end_fork_server
    from affinear.train import spelling

    with told_in_a_sentence():
        load_plugins(plugin)
        changes = changes_of(tasks.find(task), setting, image_size=image_size)
        changes |= {"epochs": epochs} if epochs else {}
        chosen = 1 if quick else comparisons.parse_seeds(seeds)
        where = output or Path("runs", "compare-quick" if quick else "compare")
        names = None if mechanisms is None else mechanisms.split(",")
        if quick:
            changes = {"epochs": comparisons.QUICK_EPOCHS, **changes}
        made = spelling.parse_model_args(model_arg or [])
        plan = comparisons.prepare(
            data,
            model or SMALLEST.get(task, SMALLEST["classify"]),
            names,
            chosen,
            where,
            task=task,
            model_args=made,
            limit=limit,
            jobs=jobs,
            plugins=plugin or (),
            **changes,
        )
        if dry_run:
            print("\n".join(comparisons.outline(plan)))
            return
        listen()
        results = comparisons.run(plan, screens.for_people())
    if results.outcomes:
        _print_results(results)
    if results.interrupted:
        print(_stopped(results))
        end_fork_server()
        sys.exit(INTERRUPTED)


def _stopped(results: Results) -> str:
    """How far an interrupted comparison came, and what of it is on the disk."""
    from affinear.compare.cells import RUN
    from affinear.train.checkpoint import latest

    through = {(outcome.variant, outcome.seed) for outcome in results.outcomes}
    cells = results.comparison.cells
    begun = [cell for cell in cells if (cell.variant, cell.seed) not in through]
    saved = [cell.title for cell in begun if latest(cell.folder / RUN) is not None]
    left = f"saved on the way: {'; '.join(saved)}" if saved else "of the others nothing is saved yet"
    return f"Stopped after {len(through)} of {len(cells)} cells; {left}. The same command goes on."


def _print_results(results: Results) -> None:
    from rich.console import Console

    from affinear import compare as comparisons
    from affinear.compare import screen as screens

    told, task = comparisons.conclusions(results), results.comparison.task
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    whole = results.comparison.whole
    console.print(screens.table(told.summaries, task, whole))
    known = screens.legend(task, whole, screens.looked_into(told.summaries))
    console.print(known, style="dim", width=min(console.width, 120))
    print()
    for finding in told.findings:
        if finding.decided:
            console.print(finding.sentence, markup=False)
    for sentence in told.limits:
        console.print(sentence, markup=False)
    print(f"Report: {results.comparison.output / comparisons.REPORT}")

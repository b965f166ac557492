"""The evidence: the experiments of results/README.md on CIFAR-10, on one GPU, within a given time.

    PYTHONPATH=src python evidence/attention.py --data cifar-10 --output outputs --part score --seeds 3 --epochs 20 \
        --parallel 4 --minutes 9

trains every cell of a part that is not trained yet, several at a time, prints the table and writes `score.json` and
`score.html` into the output folder. When the time is over it saves everything and stops; the same command goes on. All
parts share their cells: what `score` has trained, `ablation` does not train again.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from affinear import compare
from affinear.compare.screen import Lines, table
from affinear.tasks.classify import ClassifySettings
from affinear.tasks.classify.variants import ABLATION, LAYERS, ROTARY, SCORE
from affinear.train import Recipe
from affinear.train.spelling import parse, parse_model_args

PARTS = {
    "score": SCORE,
    "layers": LAYERS,
    "ablation": ABLATION,
    "rotary": tuple(name for name in SCORE if name.endswith(ROTARY)),
    "controls": ("softmax", "linear", "mala", "linear+rotary", "mala+rotary"),
}
SETTINGS: dict[str, Any] = {
    "batch_size": 256,
    "lr": 1e-3,
    "log_every": 1000,
    "eval_every": 2,
    "compile": torch.cuda.is_available(),  # a third faster on an H200; on a CPU it would take longer than a trial
}


def main() -> int:
    """Run a part, print what came out, and return 1 if something is left to do."""
    given = arguments().parse_args()
    settings = {**SETTINGS, "epochs": given.epochs, **parse(given.set or [], Recipe, ClassifySettings)}
    names = given.variants.split(",") if given.variants else PARTS[given.part]
    plan = compare.prepare(
        given.data,
        compare.CIFAR,
        names,
        compare.parse_seeds(given.seeds),
        given.output / "comparison",
        model_args=parse_model_args(given.model_arg or []),
        limit=given.limit,
        jobs=given.parallel,
        **settings,
    )
    began = time.monotonic()
    screen = Lines()
    results = compare.run(plan, screen, None if given.minutes is None else 60 * given.minutes)
    for name, kind in ((compare.RESULTS, "json"), (compare.REPORT, "html")):
        shutil.copyfile(plan.output / name, given.output / f"{given.part}.{kind}")
    tell(results, time.monotonic() - began, trained=len(results.outcomes) - screen.before)
    return int(results.interrupted)


def tell(results: compare.Results, seconds: float, trained: int) -> None:
    """Print table, findings, and how fast it went."""
    plan, told = results.comparison, compare.conclusions(results)
    console = Console(highlight=False, width=150)
    console.print(table(told.summaries, plan.task))
    for sentence in (*(finding.sentence for finding in told.findings), *told.limits):
        console.print(sentence, markup=False, soft_wrap=True)
    images = trained * plan.recipe.epochs * plan.opened.sizes[0]
    console.print(
        f"{trained} cells in {seconds:.0f} s with {plan.jobs} at a time: {images / seconds:,.0f} images/s over all, "
        f"starting and looking included."
    )
    if results.interrupted:
        left = len(plan.cells) - len(results.outcomes)
        console.print(f"The time is over: {left} cells are left. The same command goes on.")


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with the standard files of CIFAR-10")
    parser.add_argument("--output", required=True, type=Path, help="folder for cells, JSON and reports")
    parser.add_argument("--part", required=True, choices=PARTS, help="which experiment")
    parser.add_argument("--seeds", default="3", help="how many, or which: 0,1,2")
    parser.add_argument("--epochs", default=20, type=int, help="passes over the images")
    parser.add_argument("--parallel", default=1, type=int, help="cells at a time, each a process")
    parser.add_argument("--minutes", type=float, help="save and stop after so many")
    parser.add_argument("--limit", type=int, help="at most so many images of each half, for a trial")
    parser.add_argument("--variants", help="some of the part's variants, with commas")
    parser.add_argument("--set", action="append", help="any field of the recipe: field=value; may be given again")
    parser.add_argument("--model-arg", action="append", help="what networks are made with: name=value; likewise")
    return parser


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except ValueError as error:  # of what was asked for: a sentence, which needs no traceback
        raise SystemExit(f"{error}.") from None

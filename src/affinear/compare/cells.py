"""One cell of a comparison: one variant, one seed. Train it, look into it, and write down what came out."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from affinear.bench.timing import held_bytes
from affinear.lens.files import place
from affinear.lens.glance import Attention, Map

from ..tasks import load_trained
from ..train.before import upgraded_record
from ..train.blame import named_tensors
from ..train.engine import Run, ready, train
from ..train.faults import Interrupted
from ..train.progress import Progress
from ..train.records import Record
from ..train.seeding import kept_random_state, seed_step
from ..train.task import Setup, Task, Trained

CELL, RUN = "cell.json", "run"

Tell = Callable[[Record], None]


@dataclass(frozen=True)
class Cell:
    """One variant with one seed.

    Attributes:
        variant: Its name.
        setup: The task, and how it is trained, the seed included.
        model: Name of the network.
        model_args: What the network is made with.
        data: What the task opens.
        limit: At most so many samples of each half; None for all.
        folder: For all that the cell writes.
        threads: Of the processor, for this cell alone; 0 leaves them as they are.
        plugins: What a process of its own has to run first, as `affinear.plugins` takes it.
    """

    variant: str
    setup: Setup
    model: str
    model_args: Mapping[str, Any]
    data: str
    limit: int | None
    folder: Path
    threads: int = 0
    plugins: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        """Of everything random about it."""
        return self.setup.recipe.seed

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.variant}, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What a cell came to.

    Attributes:
        variant: Its name.
        seed: Of everything random.
        error: Why there is nothing else, in a sentence; empty if it went well.
        value: The task's metric of the last weights.
        parameters: Trained numbers.
        per_second: Units of the task, such as images, in training, in the fastest epoch: whatever else the machine does
            can only slow it down.
        step_memory: Bytes that one training step holds at its worst moment; see `step_memory`.
        seconds: From the beginning to the end, of the process that finished it.
        curve: Every epoch in numbers.
        attention: Numbers of the trained network's attention.
        macs: Multiply-adds for one sample; 0 where nobody counted them.
    """

    variant: str
    seed: int
    error: str = ""
    value: float = math.nan
    parameters: int = 0
    per_second: float = 0.0
    step_memory: int = 0
    seconds: float = 0.0
    curve: tuple[Record, ...] = ()
    attention: Attention = field(default_factory=Attention)
    macs: int = 0

    @staticmethod
    def read(path: Path) -> Outcome | None:
        """The outcome that a cell wrote; None if it is not there, not whole, or says that the cell failed."""
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            if told["error"]:
                return None
            for old, new in (("top1", "value"), ("images_per_second", "per_second")):  # from before there were tasks
                if old in told:
                    told[new] = told.pop(old)
            told["curve"] = [upgraded_record(record) for record in told["curve"]]
            if not _plain(told):
                return None
            curve = tuple(Record(**record) for record in told.pop("curve"))
            attention = told.pop("attention")
            maps = tuple(
                Map(one["image"], one["layer"], one["query"], tuple(one["grid"]), tuple(one["weights"]))
                for one in attention.pop("maps")
            )
            return Outcome(**told, curve=curve, attention=Attention(**attention, maps=maps))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


def _plain(told: Mapping[str, Any]) -> bool:
    """Whether a file that anybody may have changed has numbers where an outcome has them."""
    numbers = (told["value"], told["per_second"], told["seconds"])
    counts = (told["seed"], told["parameters"], told["step_memory"], told.get("macs", 0))
    curve = [value for record in told["curve"] for value in tree_leaves(record) if value is not None]
    maps = [value for one in told["attention"]["maps"] for value in (*one["grid"], *one["weights"], one["query"])]
    measured = [value for name, value in told["attention"].items() if name != "maps" and value is not None]
    return (
        all(type(number) in (int, float) for number in (*numbers, *curve, *maps, *measured))
        and all(type(count) is int and count >= 0 for count in counts)
        and all(isinstance(one["layer"], str) for one in told["attention"]["maps"])
    )


class Listener(Progress):
    """Passes every epoch on."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell

    def stretch(self, record: Record) -> None:
        """An epoch is over."""
        self.tell(record)


def run_cell(cell: Cell, tell: Tell = lambda record: None, data: Any = None) -> Outcome:
    """Train a cell, or go on where it was interrupted, and write its outcome.

    A cell that cannot be trained, because its numbers ran away for example, has an outcome too: it says why.

    Args:
        cell: What to train.
        tell: Hears of every epoch.
        data: The data set, if it is open already.

    Raises:
        Interrupted: If a signal asked to stop; the run was saved.
    """
    began = time.perf_counter()
    try:
        task = cell.setup.task
        data = opened(task, cell.data, cell.setup, cell.limit) if data is None else data
        run = Run(cell.model, cell.data, cell.folder / RUN, cell.setup, dict(cell.model_args))
        result = train(run, progress=Listener(tell), data=data)
        trained = load_trained(result.last)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        trained.network.to(device)
        outcome = Outcome(
            variant=cell.variant,
            seed=cell.seed,
            value=result.value,
            parameters=result.parameters,
            per_second=max(record.per_second for record in result.records),
            step_memory=step_memory(trained, data, device),
            seconds=time.perf_counter() - began,
            curve=result.records,
            attention=task.inspect(trained, data),
            macs=task.macs(trained.job) or 0,
        )
    except (Interrupted, KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:  # one cell that fails leaves the others to go on
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        outcome = Outcome(cell.variant, cell.seed, error=said, seconds=time.perf_counter() - began)
    cell.folder.mkdir(parents=True, exist_ok=True)
    place(json.dumps(asdict(outcome)).encode(), cell.folder / CELL, force=True)
    return outcome


def opened(task: Task[Any, Any], data: str, setup: Setup, limit: int | None) -> Any:
    """The data set, or so many samples of each half."""
    found = task.open(data, setup.settings)
    return found if limit is None else task.limited(found, limit)


def step_memory(trained: Trained[Any, Any], data: Any, device: torch.device) -> int:
    """Bytes that one training step of AdamW holds at its worst moment: weights, gradients, optimizer, activations.

    Tensors alone are counted, on a CPU by torch's profiler, on a GPU by its allocator. What Python, libraries and the
    rest of the process take is not in it, so that it tells the variants apart.
    """
    network, recipe = trained.network.train(), trained.job.recipe
    job = dataclasses.replace(trained.job, recipe=recipe.changed(workers=0))
    work = trained.task.work(job, data, device)
    dtype = torch.float16 if recipe.precision == "fp16" else torch.bfloat16
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.0)
    with kept_random_state():
        seed_step(recipe.seed, 0, 0, 0, device)
        batch = work.vary(next(ready(moved(work.train_loader(), device), work)))

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=recipe.precision != "no"):
            loss = work.loss(network, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # the first makes the optimizer's state
    try:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            step()
            return torch.cuda.max_memory_allocated(device)
        return held_bytes(network, optimizer, tuple(named_tensors(batch).values())) + _allocated(step)
    finally:
        network.eval()


def moved(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Batches, brought to a device."""
    return (send_to_device(batch, device) for batch in batches)


def _allocated(step: Callable[[], None]) -> int:
    """The most bytes that tensors made in a step have held at once, on a CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    results: Any = profiled.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most

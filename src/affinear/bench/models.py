"""Networks at work: images per second and memory of ours and of timm's, which take turns, so that both drift alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import count, groupby, pairwise

import timm
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from affinear.bench import machine, timing
from affinear.bench.judge import finite
from affinear.bench.measure import why
from affinear.bench.models_plan import (
    COMPARED_WITH,
    EAGER,
    GRAPHED,
    INFERENCE,
    Cell,
    Images,
    ModelPlan,
    baseline_of,
    prepare,
)
from affinear.bench.models_report import (
    ModelReport,
    ModelRow,
    ModelVerdict,
    as_json,
    heading,
    legend,
    summary,
    table,
    verdicts,
)

__all__ = [
    "COMPARED_WITH",
    "Images",
    "ModelPlan",
    "ModelReport",
    "ModelRow",
    "ModelVerdict",
    "as_json",
    "begin",
    "measure",
    "prepare",
    "run",
    "table",
    "verdicts",
    "watch",
]

CLASSES = 1000
PACKAGES = ("affinear", "torch", "timm", "triton")
LONGEST_SENTENCE = 200

Step = Callable[[], Sequence[Tensor]]


def begin(plan: ModelPlan) -> ModelReport:
    """An empty report of a plan on this machine."""
    settings = {
        "models": list(plan.models),
        "sizes": [{"height": one.height, "width": one.width, "batch": one.batch} for one in plan.sizes],
        "directions": list(plan.directions),
        "ways": list(plan.ways),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "channels_last": plan.channels_last,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": True,
        "seconds_per_row": plan.clock.seconds,
        "turns": plan.turns,
    }
    return ModelReport(machine.describe(plan.clock.device), _versions(), settings)


def run(
    plan: ModelPlan,
    report: ModelReport,
    on_row: Callable[[ModelRow], object] = lambda row: None,
    told: Callable[[str], None] = lambda said: None,
    finished: Callable[[Images, str], None] = lambda images, direction: None,
) -> None:
    """Measure a plan into a report. Ctrl-C ends it early; what was measured until then is in the report.

    Args:
        plan: What to measure.
        report: Where rows go: those of networks that take turns all at once, as soon as they are through.
        on_row: Hears every row when it is in the report.
        told: Hears of every network that is about to be made, compiled and measured.
        finished: Hears each size and direction when its last row is in or it was cut short.
    """
    start = time.perf_counter()

    def measure_all(cells: Iterable[Cell]) -> None:
        for cell in cells:
            rows = measure(cell, plan, told)
            report.rows += rows
            report.seconds = time.perf_counter() - start
            for row in rows:
                on_row(row)

    try:
        with _tuned_convolutions():
            for (images, direction), cells in groupby(plan.cells, key=lambda cell: (cell.images, cell.direction)):
                try:
                    measure_all(cells)
                finally:
                    finished(images, direction)
    except KeyboardInterrupt:
        report.interrupted = True
    finally:
        report.seconds = time.perf_counter() - start


def watch(plan: ModelPlan, found: ModelReport, page: Console, margin: Console, keep: Callable[[bytes], object]) -> None:
    """Measure a plan, show it, and keep it.

    Args:
        plan: What to measure.
        found: Where rows go.
        page: Gets the tables and the summary.
        margin: Gets a line for every network that is about to be measured, with the time that is left.
        keep: Gets the whole report as JSON after every row, so that a run that is killed leaves what it has.
    """
    start, begun, total = time.perf_counter(), count(), sum(len(cell.names) for cell in plan.cells)

    def told(said: str) -> None:
        progress = _progress(next(begun), total, time.perf_counter() - start)
        margin.print(f"{progress}  {said}", style="dim", markup=False, soft_wrap=True)

    def finished(images: Images, direction: str) -> None:
        for grid in table(found, images, direction):
            page.print(grid)

    page.print(heading(found), legend(), sep="\n", markup=False, soft_wrap=True)
    run(plan, found, lambda row: keep(as_json(found)), told, finished)
    for sentence in summary(found):
        page.print(sentence, soft_wrap=True)


def measure(cell: Cell, plan: ModelPlan, told: Callable[[str], None] = lambda said: None) -> list[ModelRow]:
    """Let the networks of a cell take turns; one that fails leaves the others to go on.

    Args:
        cell: Who, and at what.
        plan: Where, how precisely and for how long.
        told: Hears of every network before it is made.

    Returns:
        A row for each, in order.
    """
    if cell.way == EAGER:
        rows = _turns(cell, plan, told)
    else:
        with _fresh_compiler(len(cell.names)):
            rows = _turns(cell, plan, told)
    _free()
    return rows


def _turns(cell: Cell, plan: ModelPlan, told: Callable[[str], None]) -> list[ModelRow]:
    entrants = [Entrant(name, cell, plan) for name in cell.names]
    for entrant in entrants:
        told(f"{entrant.name}, {cell}")
        entrant.attempt(entrant.start)
    for _ in range(plan.turns):
        for entrant in entrants:
            entrant.attempt(entrant.take_turn)
    return [entrant.row() for entrant in entrants]


class Entrant:
    """A network in a cell, and what it took so far.

    Args:
        name: Of the network.
        cell: What it has to do.
        plan: Where and how.
    """

    def __init__(self, name: str, cell: Cell, plan: ModelPlan) -> None:
        self.name, self.cell, self.plan = name, cell, plan
        self.work: Work | None = None
        self.error, self.samples = "", list[float]()
        self.parameters: int | None = None
        self.peak: int | None = None
        self.first_call_s: float | None = None
        self.rough_ms = 0.0

    def attempt(self, do: Callable[[], None]) -> None:
        """Do it, or note in words why not; nothing is tried again after that."""
        if self.error:
            return
        try:
            do()
        except Exception as error:
            self.error = in_words(error, self.cell.images.batch)
        # Outside of the clause above, whose exception still holds the frames and with them the memory.
        if self.error:
            self.work = None
            _free()

    def start(self) -> None:
        """Make the network and run it until it is warm; the first step compiles."""
        device = self.plan.clock.device
        self.work = Work.prepare(self.name, self.cell, self.plan)
        self.parameters = sum(weight.numel() for weight in self.work.network.parameters())
        begun = time.perf_counter()
        results = self.work.step()
        timing.synchronize(device)
        self.first_call_s = time.perf_counter() - begun
        if not finite(results):
            raise ArithmeticError("its result is not finite")
        del results
        self.rough_ms = timing.time_once(self.work.step, device)
        if device.type == "cuda" or self.rough_ms <= timing.SLOW_MS:  # the second step may still have been tuning
            self.rough_ms = min(timing.time_once(self.work.step, device) for _ in range(3))
        if self.cell.way != GRAPHED:  # graphs have memory of their own, taken before any step
            beyond = timing.peak_bytes(self.work.bare_step, device)
            self.peak = None if beyond is None else beyond + self.work.resident

    def take_turn(self) -> None:
        """Time some steps, at least one."""
        assert self.work is not None
        seconds = self.plan.clock.seconds / self.plan.turns
        repeats = max(1, min(timing.MOST, int(1e3 * seconds / max(self.rough_ms, 1e-6))))
        if repeats > 1:  # after another network's turn nothing is in the caches
            self.work.step()
        self.samples += sample(self.work.step, self.plan.clock.device, repeats)

    def row(self) -> ModelRow:
        """What came out."""
        cell = self.cell
        return ModelRow(
            model=self.name,
            baseline=baseline_of(self.name),
            images=cell.images,
            direction=cell.direction,
            way=cell.way,
            error=self.error,
            parameters=self.parameters,
            first_call_s=self.first_call_s,
            peak=None if self.error else self.peak,
            step=None if self.error else timing.collect(self.samples),
        )


@dataclass(frozen=True)
class Work:
    """A network with all that a step needs, on the device.

    Attributes:
        network: As it was made, not compiled.
        optimizer: Of its weights; None at inference.
        inputs: Images and labels.
        step: Does everything once and returns logits, or the loss.
    """

    network: nn.Module
    optimizer: torch.optim.Optimizer | None
    inputs: tuple[Tensor, Tensor]
    step: Step

    @staticmethod
    def prepare(name: str, cell: Cell, plan: ModelPlan) -> Work:
        """Make the network, its inputs and its step."""
        device, images = plan.clock.device, cell.images
        layout = torch.channels_last if plan.channels_last else torch.contiguous_format
        network = create(name, images).to(device).train(cell.direction != INFERENCE)
        network.to(memory_format=layout)  # pyright: ignore[reportCallIssue]  # which torch leaves out of its types
        pixels = torch.randn(images.batch, 3, images.height, images.width, device=device)
        inputs = pixels.contiguous(memory_format=layout), torch.randint(CLASSES, (images.batch,), device=device)
        called = network if cell.way == EAGER else compiled(network, graphed=cell.way == GRAPHED)
        if cell.direction == INFERENCE:
            return Work(network, None, inputs, inference_step(called, inputs[0], plan.dtype))
        optimizer = torch.optim.AdamW(network.parameters(), fused=device.type == "cuda")
        return Work(network, optimizer, inputs, training_step(called, optimizer, inputs, plan.dtype))

    @property
    def resident(self) -> int:
        """Bytes that are held between steps: weights, buffers, the optimizer's state and the inputs."""
        return timing.held_bytes(self.network, self.optimizer, self.inputs)

    def bare_step(self) -> Sequence[Tensor]:
        """A step whose results count as memory of its own."""
        self.step()
        return ()


def create(name: str, images: Images) -> nn.Module:
    """The network, made for a size of image where it wants to know.

    Examples:
        >>> create("mavit_tiny", Images(64, 96, 1)).num_classes
        1000
    """
    try:
        return timm.create_model(name, num_classes=CLASSES, img_size=(images.height, images.width))
    except TypeError as error:
        if "img_size" not in str(error):
            raise
    return timm.create_model(name, num_classes=CLASSES)


def compiled(network: nn.Module, graphed: bool) -> Callable[[Tensor], Tensor]:
    """The network compiled whole; graphed, its kernels are then launched as CUDA graphs."""
    # Never with sizes left open: the kernels are to be those of the size that is measured.
    return torch.compile(network, fullgraph=True, dynamic=False, mode="reduce-overhead" if graphed else "default")


def inference_step(network: Callable[[Tensor], Tensor], images: Tensor, dtype: torch.dtype) -> Step:
    """A step that computes logits."""

    def step() -> Sequence[Tensor]:
        with torch.inference_mode(), _precision(images.device, dtype):
            return (network(images),)

    return step


def training_step(
    network: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    inputs: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> Step:
    """A step that goes forward, backward and downhill."""
    images, labels = inputs

    def step() -> Sequence[Tensor]:
        with _precision(images.device, dtype):
            loss = cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return (loss.detach(),)

    return step


def sample(step: Step, device: torch.device, repeats: int) -> list[float]:
    """Milliseconds of so many steps: of the GPU between events, or of the host without a GPU."""
    if device.type != "cuda":
        return [timing.time_once(step, device) for _ in range(repeats)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    timing.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    timing.synchronize(device)
    return [start.elapsed_time(end) for start, end in pairwise(marks)]


def in_words(error: Exception, batch: int) -> str:
    """Why a network has no times, in a sentence.

    Examples:
        >>> in_words(AssertionError("Input height (64) doesn't match model (224)."), batch=8)
        "It cannot run: Input height (64) doesn't match model (224) (AssertionError)."
        >>> in_words(MemoryError(), batch=8)
        'Out of memory with a batch of 8; a smaller one may fit.'
    """
    text = str(error).strip()
    # What goes wrong while compiling comes wrapped.
    if why(error) == "out of memory" or "out of memory" in text.lower():
        return f"Out of memory with a batch of {batch}; a smaller one may fit."
    kind, said = type(error).__name__, text.partition("\n")[0][:LONGEST_SENTENCE].rstrip(". ")
    return f"It cannot run: {said} ({kind})." if said else f"It cannot run: {kind}."


def _precision(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype != torch.float32)


@contextmanager
def _fresh_compiler(networks: int) -> Generator[None]:
    """Forget what was compiled, before and after; and let so many networks be, though they share their code.

    Past the limit torch would go on without compiling, and with fullgraph it raises: either way not what is measured.
    """
    import torch._dynamo.config as dynamo  # takes seconds, and an eager run does without

    torch.compiler.reset()
    try:
        with dynamo.patch(recompile_limit=8 + 2 * networks):  # pyright: ignore[reportAttributeAccessIssue]
            yield
    finally:
        torch.compiler.reset()


def _free() -> None:
    if torch.cuda.is_available():  # a processor's memory goes back by itself
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def _tuned_convolutions() -> Generator[None]:
    """Let cuDNN try its kernels on the sizes that come, as whoever trains or serves at one size does."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__}  # with the part that names the CUDA it was built for


def _progress(done: int, total: int, seconds: float) -> str:
    """How far a run is, how fast it goes and how long it will still take, if all rows are alike.

    Examples:
        >>> _progress(10, 40, 120.0)
        '  120 s  row 11 of 40, 5.0 a minute, about 6 min left'
    """
    where = f"{seconds:5.0f} s  row {done + 1} of {total}"
    if not done:
        return where
    left = seconds / done * (total - done)
    return f"{where}, {60 * done / seconds:.1f} a minute, about {_spoken(left)} left"


def _spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"

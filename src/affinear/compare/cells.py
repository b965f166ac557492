"""One cell of a comparison: one variant, one seed. Train it, look into it, and write down what came out."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from affinear.bench.timing import held_bytes
from affinear.lens.files import place
from affinear.lens.reading import Around, Readers, read
from affinear.lens.watching import watch

from ..tasks.classify import trunk  # registers its names with timm
from ..tasks.classify.data import ArraySource, CorruptImage, Images, Source, as_tensor, open_data
from ..tasks.classify.evaluate import Trained, load_trained
from ..tasks.classify.images import Digest, mark_of
from ..tasks.classify.variants import ROTARY, NormedQueries, variant
from ..train.engine import Run, train
from ..train.faults import Interrupted
from ..train.progress import Progress
from ..train.recipe import Recipe
from ..train.records import EpochRecord

CELL, RUN = "cell.json", "run"
WATCHED, ROWS = 64, 64  # test images, and queries of each, that the numbers of attention are taken of
SHOWN = 4  # test images that maps are drawn of
LAYERS = 3  # layers that maps are drawn of: the first, the middle, the last

Tell = Callable[[EpochRecord], None]


@dataclass(frozen=True)
class Cell:
    """One variant with one seed.

    Attributes:
        variant: Its name.
        recipe: How it is trained, the seed included.
        model: Name of the network.
        model_args: What the network is made with.
        data: What `open_data` takes.
        limit: At most so many images of each half; None for all.
        folder: For all that the cell writes.
        threads: Of the processor, for this cell alone; 0 leaves them as they are.
    """

    variant: str
    recipe: Recipe
    model: str
    model_args: Mapping[str, Any]
    data: str
    limit: int | None
    folder: Path
    threads: int = 0

    @property
    def seed(self) -> int:
        """Of everything random about it."""
        return self.recipe.seed

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.variant}, seed {self.seed}"


@dataclass(frozen=True)
class Map:
    """What one patch of one test image looks at.

    Attributes:
        image: Number of the test image.
        layer: Name of the layer.
        query: Number of the patch.
        grid: Rows and columns of the patches.
        weights: Mean over heads, one for each patch, times the number of patches: 1 is what a uniform row has.
    """

    image: int
    layer: str
    query: int
    grid: tuple[int, int]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Attention:
    """Numbers of the attention of a trained network, over some test images; None where there are none.

    Attributes:
        norm_correlation: Rank correlation of a row's entropy and its query's norm, mean over layers and heads.
        negative_share: Share of the weights below zero, mean over layers and heads.
        row_sum_error: The largest distance of any row's sum from one.
        maps: What some patches look at.
    """

    norm_correlation: float | None = None
    negative_share: float | None = None
    row_sum_error: float | None = None
    maps: tuple[Map, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a cell came to.

    Attributes:
        variant: Its name.
        seed: Of everything random.
        error: Why there is nothing else, in a sentence; empty if it went well.
        top1: Share of test images told right by the last weights.
        parameters: Trained numbers.
        images_per_second: In training, the fastest epoch: whatever else the machine does can only slow it down.
        step_memory: Bytes that one training step holds at its worst moment; see `step_memory`.
        seconds: From the beginning to the end, of the process that finished it.
        curve: Every epoch in numbers.
        attention: Numbers of the trained network's attention.
    """

    variant: str
    seed: int
    error: str = ""
    top1: float = math.nan
    parameters: int = 0
    images_per_second: float = 0.0
    step_memory: int = 0
    seconds: float = 0.0
    curve: tuple[EpochRecord, ...] = ()
    attention: Attention = field(default_factory=Attention)

    @staticmethod
    def read(path: Path) -> Outcome | None:
        """The outcome that a cell wrote; None if it is not there, not whole, or says that the cell failed."""
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            if told["error"] or not _plain(told):
                return None
            curve = tuple(EpochRecord(**record) for record in told.pop("curve"))
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
    numbers = (told["top1"], told["images_per_second"], told["seconds"])
    counts = (told["seed"], told["parameters"], told["step_memory"])
    curve = [value for record in told["curve"] for value in record.values() if value is not None]
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

    def epoch(self, record: EpochRecord) -> None:
        """An epoch is over."""
        self.tell(record)


def run_cell(cell: Cell, tell: Tell = lambda record: None, images: Images | None = None) -> Outcome:
    """Train a cell, or go on where it was interrupted, and write its outcome.

    A cell that cannot be trained, because its numbers ran away for example, has an outcome too: it says why.

    Args:
        cell: What to train.
        tell: Hears of every epoch.
        images: The data set, if it is open already.

    Raises:
        Interrupted: If a signal asked to stop; the run was saved.
    """
    began = time.perf_counter()
    try:
        images = first_of(open_data(cell.data), cell.limit) if images is None else images
        run = Run(cell.model, cell.data, cell.folder / RUN, cell.recipe, dict(cell.model_args))
        result = train(run, progress=Listener(tell), images=images)
        trained = load_trained(result.last)
        outcome = Outcome(
            variant=cell.variant,
            seed=cell.seed,
            top1=result.top1,
            parameters=result.parameters,
            images_per_second=max(record.images_per_second for record in result.epochs),
            step_memory=step_memory(trained, cell.recipe),
            seconds=time.perf_counter() - began,
            curve=result.epochs,
            attention=look(trained, images),
        )
    except (Interrupted, KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:  # one cell that fails leaves the others to go on
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        outcome = Outcome(cell.variant, cell.seed, error=said, seconds=time.perf_counter() - began)
    cell.folder.mkdir(parents=True, exist_ok=True)
    place(json.dumps(asdict(outcome)).encode(), cell.folder / CELL, force=True)
    return outcome


def look(trained: Trained, images: Images) -> Attention:
    """Numbers and maps of a trained network's attention on test images, the same ones for every variant."""
    network, readers = trained.network, Readers()
    if not any(readers.find(layer) is not None for layer in network.modules()):
        return Attention()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = network.to(device)
    pixels = torch.stack([as_tensor(image, trained.batching) for _, image in chosen(images.test, WATCHED)]).to(device)
    with watch(network, rows=ROWS) as watched, torch.no_grad():
        network(pixels)
    layers = watched.layers
    known = [layer.norm_correlation.mean().item() for layer in layers if layer.norm_correlation is not None]
    normed = any(isinstance(layer, NormedQueries) for layer in network.modules())  # nothing goes along with a constant
    return Attention(
        norm_correlation=_rounded(statistics.fmean(known)) if known and not normed else None,
        negative_share=_rounded(statistics.fmean(layer.negative_share.mean().item() for layer in layers)),
        row_sum_error=_rounded(max(layer.row_sum_error.max().item() for layer in layers)),
        maps=draw_maps(network, trained, images, readers),
    )


def draw_maps(network: nn.Module, trained: Trained, images: Images, readers: Readers) -> tuple[Map, ...]:
    """What the most striking patch of some test images looks at, in a few layers whose keys lie on one grid."""
    found: list[Map] = []
    every = [(name, layer) for name, layer in network.named_modules() if readers.find(layer) is not None]
    some = [every[i] for i in sorted({0, len(every) // 2, len(every) - 1})][:LAYERS]
    device = next(network.parameters()).device
    for number, image in chosen(images.test, SHOWN):
        pixels = as_tensor(image, trained.batching)[None].to(device)
        hooks = [
            layer.register_forward_hook(_map(pixels, number, name, readers, found), with_kwargs=True)
            for name, layer in some
        ]
        try:
            with torch.no_grad():
                network(pixels)
        finally:
            for hook in hooks:
                hook.remove()
    return tuple(found)


def _map(pixels: Tensor, number: int, name: str, readers: Readers, found: list[Map]) -> Callable[..., None]:
    """A hook that adds the map of a layer, if it has one, to what was found."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        reader = readers.find(module)
        assert reader is not None
        seen, *others = read(reader, module, args, kwargs, Around(images=len(pixels)))
        grid, first = seen.scene.grid, seen.scene.prefix_tokens
        if others or seen.windows > 1 or grid is None:
            return  # windows and stripes are no map of the image
        query = striking(pixels[0], grid)
        rows = torch.tensor([first + query], device=pixels.device)
        weights = seen.weights(rows)[0, :, 0, first:].mean(0) * math.prod(grid)
        found.append(Map(number, name, query, grid, tuple(_rounded(value) for value in weights.tolist())))

    return hook


def striking(pixels: Tensor, grid: tuple[int, int]) -> int:
    """Number of the patch that differs most from the mean of the image (channels, height, width)."""
    away = (pixels - pixels.mean((1, 2), keepdim=True)).abs().mean(0)
    return int(F.adaptive_avg_pool2d(away[None], grid).flatten().argmax())


def step_memory(trained: Trained, recipe: Recipe) -> int:
    """Bytes that one training step of AdamW holds at its worst moment: weights, gradients, optimizer, activations.

    Tensors alone are counted, on a CPU by torch's profiler, on a GPU by its allocator. What Python, libraries and the
    rest of the process take is not in it, so that it tells the variants apart.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, batch = trained.network.to(device).train(), recipe.batch_size // recipe.accumulate
    precision = recipe.precision or ("bf16" if device.type == "cuda" else "no")  # as the engine decides
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    size = (batch, trained.batching.channels, *trained.batching.image_size)
    images, targets = torch.zeros(size, device=device), torch.zeros(batch, dtype=torch.long, device=device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.0)

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=precision != "no"):
            loss = F.cross_entropy(network(images).float(), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # the first makes the optimizer's state
    try:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            step()
            return torch.cuda.max_memory_allocated(device)
        return held_bytes(network, optimizer, (images, targets)) + _allocated(step)
    finally:
        network.eval()


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


@dataclass(frozen=True, eq=False)
class Chosen:
    """Some images of a source."""

    source: Source
    numbers: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return self.source[self.numbers[index]]

    def path(self, index: int) -> str:
        """What the image is called."""
        return self.source.path(self.numbers[index])

    def mark(self, digest: Digest) -> None:
        """All of the source, and which of it."""
        mark_of(self.source, digest)
        digest.update(str(self.numbers).encode())


def first_of(images: Images, limit: int | None) -> Images:
    """The data set, or so many images of each half, taken evenly."""
    if limit is None:
        return images
    return replace(images, train=_some(images.train, limit), test=_some(images.test, limit))


def _some(source: Source, limit: int) -> Source:
    numbers = evenly(len(source), limit)
    if isinstance(source, ArraySource):
        return ArraySource(source.name, source.pixels[numbers], source.labels[numbers])
    return Chosen(source, tuple(numbers))


def chosen(source: Source, count: int) -> list[tuple[int, Image.Image]]:
    """Numbers and images of so many that can be read, evenly among all."""
    found: list[tuple[int, Image.Image]] = []
    for number in evenly(len(source), count):
        try:
            found.append((number, source[number][0]))
        except CorruptImage:
            continue
    return found


def evenly(total: int, count: int) -> list[int]:
    """So many numbers below a total, evenly spread; all if there are fewer.

    Example:
        >>> evenly(10, 4)
        [1, 3, 6, 8]
    """
    count = min(total, count)
    return ((np.arange(count) + 0.5) * total / max(count, 1)).astype(int).tolist()


def arguments(model: str, name: str) -> dict[str, Any]:
    """What a network is made with to have the attention of this name.

    Raises:
        ValueError: If the network cannot have it.
    """
    if model in trunk.SIZES:
        return {"mechanism": variant(name).name}
    if name == "own":
        return {}
    if name.endswith(ROTARY) or not isinstance(variant(name).parts.mechanism, str):
        raise ValueError(
            f"mechanisms: {name!r} is for the trunks ({', '.join(trunk.SIZES)}); {model} takes the names of mechanisms "
            "alone, as its positions are its own"
        )
    return {"mechanism": name}


def _rounded(value: float) -> float:
    """Three digits that count are more than any of these numbers has."""
    return float(f"{value:.4g}")

"""Classification as a task of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from accelerate import Accelerator
from PIL import Image
from timm.data.mixup import Mixup
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ...lens.glance import Attention
from ...models import making
from ...models.checkpoints import read, room_for, shape_of_ends, translated
from ...models.making import MOST_NUMBERS
from ...train.examples import COUNT
from ...train.page import Section
from ...train.recipe import Recipe
from ...train.settings import Settings
from ...train.task import Answer, Job, Measure, Score, Setup, Task, Trained, Work, unknown_recipe
from ...train.weights import fill
from ..images.batching import Normalize, as_tensor
from ..images.labelled.folder import FileSource, unreadable
from ..images.labelled.images import Images
from ..images.labelled.opening import open_data, open_whole
from ..images.labelled.some import chosen, first_of
from . import network as networks
from . import pictures, trial, trunk, variants
from .loading import test_loader, train_loader
from .predict import Options, predict
from .published import RECIPES, family_of, of_size
from .samples import Batch
from .score import LOSS, TOP1, TOP5, score
from .settings import ClassifySettings

LARGEST = 2**13  # side of the images that a file of weights may ask for
MOST_AT_ONCE, MOST_CLASSES = 2**16, 2**20


class ClassifyWork(Work[Images, ClassifySettings]):
    """Classification at work on one job."""

    def __init__(self, job: Job[ClassifySettings], data: Images, device: torch.device) -> None:
        super().__init__(job, data, device)
        self.batching = networks.batching(job)
        self.normalize = Normalize(self.batching, device)
        self.mixup = _mixup(job)
        self.criterion = _criterion(job.settings)

    def train_loader(self) -> DataLoader[Any]:
        """Batches of images as bytes, and their classes."""
        return train_loader(self.data, self.batching, self.skipped)

    def test_loader(self) -> DataLoader[Any]:
        """Batches of images as bytes, all full, with `NO_IMAGE` where there is none."""
        return test_loader(self.data, self.batching, self.skipped, full=True)

    def look_through(self) -> None:
        """Images in files: each of a thousand decoded, of many the beginning."""
        halves = {"train": self.data.train, "test": self.data.test}
        for name, source in halves.items():
            if isinstance(source, FileSource):
                self.skipped.tally(name, source)
        found = [(n, i) for n, s in halves.items() if isinstance(s, FileSource) for i in unreadable(s)]
        self.skipped.absorb(found)

    def ready(self, batch: Batch) -> Batch:
        """Images in numbers."""
        images, targets = batch
        return Batch(self.normalize(images), targets)

    def vary(self, batch: Batch) -> Batch:
        """Images mixed, and their targets with them."""
        return batch if self.mixup is None else Batch(*self.mixup(*batch))

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy."""
        images, targets = batch
        return self.criterion(network(images).float(), targets)

    def score(self, network: nn.Module, batches: Iterable[Batch], accelerator: Accelerator) -> Score:
        """Top-1, top-5 and loss, and each class by itself."""
        return score(network, batches, tuple(self.job.facts["class_names"]) or self.data.class_names, accelerator)

    def names(self, indices: Sequence[int]) -> list[str]:
        """Their files."""
        return [self.data.train.path(index) for index in indices]

    def examples(self) -> Mapping[str, Tensor]:
        """Test images, evenly among all."""
        found = [as_tensor(image, self.batching) for _, image in chosen(self.data.test, COUNT)]
        return {"images": torch.stack(found).half()} if found else {}

    def report(self, network: nn.Module) -> list[Section]:
        """Each class by itself, and the test images that are told worst."""
        return pictures.sections(network, self.data, self.batching, self.device)


class Classify(Task[Images, ClassifySettings]):
    """Telling what an image shows: one class for each."""

    name: ClassVar[str] = "classify"
    about: ClassVar[str] = "what an image shows, one class for each"
    unit: ClassVar[str] = "images"
    parts: ClassVar[str] = "classes"
    measures: ClassVar[tuple[Measure, ...]] = (LOSS, TOP1, TOP5)
    metric: ClassVar[Measure] = TOP1
    fits_few: ClassVar[bool] = True
    settings = ClassifySettings
    options: ClassVar[type[Settings]] = Options

    @property
    def recipes(self) -> Mapping[str, Setup]:
        """Those of the papers, and two for every day."""
        plain = Setup(self, Recipe(), ClassifySettings())
        return {name: plain.changed(**fields) for name, fields in RECIPES.items()}

    def preset(self, model: str, name: str | None) -> Setup:
        """The family's published recipe, or the one of this name; trunks get "tiny", networks of others "finetune"."""
        family = family_of(model)
        chosen = name or family or ("tiny" if model in trunk.SIZES else "finetune")
        if chosen not in RECIPES:
            raise unknown_recipe(chosen, RECIPES)
        found = self.recipes[chosen]
        return found.changed(**of_size(model, family)) if family is not None and chosen == family else found

    def open(self, spec: str, settings: ClassifySettings) -> Images:
        """Images in folders, CIFAR, idx files, HuggingFace datasets, shards, or digits."""
        return open_data(spec)

    def open_to_judge(self, spec: str, settings: ClassifySettings) -> tuple[Images, str]:
        """The test half, or all images of class folders that have none."""
        whole = open_whole(spec)
        return (whole, whole.name) if whole is not None else super().open_to_judge(spec, settings)

    def settle(self, job: Job[ClassifySettings], data: Images) -> Job[ClassifySettings]:
        """The size of images and their statistics, and the names of classes."""
        return networks.settle(job, data)

    def network(self, job: Job[ClassifySettings], *, room: int = MOST_NUMBERS) -> nn.Module:
        """Any network of ours or of timm's."""
        return networks.create(job, room=room)

    def work(self, job: Job[ClassifySettings], data: Images, device: torch.device) -> ClassifyWork:
        """A settled job at work."""
        return ClassifyWork(job, data, device)

    def predict(
        self, trained: Trained[Images, ClassifySettings], sources: Sequence[str], options: Options
    ) -> Iterator[Answer]:
        """The likeliest classes of image files."""
        return predict(trained, sources, options)

    def summary(self, job: Job[ClassifySettings], data: Images) -> str:
        """Images, classes and size."""
        assert job.settings.image_size is not None
        height, width = job.settings.image_size
        return f"{super().summary(job, data)}, {len(data.class_names)} classes, shown at {height} x {width}"

    def start(self, network: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
        """All weights but a classifier of another number of classes."""
        networks.begin(network, tensors, source)

    def check_parts(self, job: Job[ClassifySettings], part: int) -> None:
        """Mixup pairs images."""
        if (job.settings.mixup or job.settings.cutmix) and part % 2:
            raise ValueError(f"batch_size: mixup pairs images, and {part} at a time is odd; take an even number")

    def check_job(self, job: Job[ClassifySettings]) -> None:
        """Names of classes, channels, and sizes within bounds."""
        names, channels, settings = job.facts.get("class_names"), job.facts.get("channels"), job.settings
        listed = cast("list[Any]", names) if isinstance(names, list) else []
        if not 0 < len(listed) <= MOST_CLASSES or not all(isinstance(name, str) for name in listed):
            raise ValueError(f"class_names: expected names in a list, got {making.short(names)}")
        if isinstance(channels, bool) or channels not in (1, 3):
            raise ValueError(f"channels: expected 1 or 3, got {making.short(channels)}")
        for name in ("image_size", "mean", "std", "interpolation", "crop_pct"):
            if getattr(settings, name) is None:
                raise ValueError(f"recipe: {name}: expected what the weights were trained with, got none")
        if max(settings.image_size or ()) > LARGEST or job.recipe.batch_size > MOST_AT_ONCE:
            raise ValueError(
                f"recipe: expected sides of at most {LARGEST} and batches of at most {MOST_AT_ONCE}, got "
                f"{settings.image_size} and {job.recipe.batch_size}"
            )

    def check_data(self, trained: Trained[Images, ClassifySettings], data: Images) -> None:
        """The same classes in the same order; bare weights have no names for theirs."""
        ours, theirs = trained.job.facts["class_names"], data.class_names
        outputs = len(ours) or int(getattr(trained.network, "num_classes", len(theirs)))
        if outputs != len(theirs):
            raise ValueError(f"data: the network tells {outputs} classes apart, {data.name} has {len(theirs)}")
        for number, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            if one != other:
                raise ValueError(f"data: class {number} is {one!r} for the network and {other!r} in {data.name}")

    def bare(
        self, path: Path, model: str | None, model_args: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> Trained[Images, ClassifySettings]:
        """A network whose name the user gives; how it wants images, its configuration tells."""
        if model is None:
            raise ValueError(f"{path}: the file does not tell which network it belongs to; name it with --model")
        tensors, size = read(path).tensors, changes.get("image_size")
        sized = {"img_size": size} if size and "img_size" in making.takes(model) else {}
        given: dict[str, Any] = {**model_args, **sized}
        ends: dict[str, Any] = shape_of_ends(tensors, making.outline(model, {}))
        network = making.make(model, {**ends, **given}, room=room_for(tensors))
        fill(network, translated(tensors, network), str(path))
        settings, channels = networks.own_settings(network)
        facts = {"class_names": [], "channels": channels}
        job = Job(model, given, Recipe(batch_size=64), settings.changed(**changes), facts)
        return Trained(self, job, network.eval())

    def limited(self, data: Images, limit: int) -> Images:
        """At most so many images of each half, evenly among all."""
        return first_of(data, limit)

    def variants(self, model: str) -> Mapping[str, Mapping[str, Any]]:
        """Six rules with and without rotary positions in a trunk, five mechanisms in networks that take one."""
        if model in trunk.SIZES:
            return {name: self.variant(model, name) for name in variants.DEFAULT}
        return super().variants(model) if "mechanism" in making.takes(model) else {"own": {}}

    def variant(self, model: str, name: str) -> Mapping[str, Any]:
        """One of `variants`, in a trunk, or a mechanism."""
        return trial.arguments(model, name)

    def variant_about(self, name: str) -> str:
        """What a variant is, in a few words."""
        return "the network as it is" if name == "own" else variants.variant(name).about

    def trial(self, model: str, data: Images) -> Setup:
        """What `affinear compare` trains with: decided here, so that it is the same on every machine."""
        return trial.setup(self, model, data)

    def trial_of(self, models: Sequence[str], data: Images) -> Setup:
        """The same for several networks, which then see the same pixels."""
        return trial.setup_of(self, models, data)

    def macs(self, job: Job[ClassifySettings]) -> int | None:
        """Multiply-adds for one image of the job's size."""
        return networks.macs(job)

    def inspect(self, trained: Trained[Images, ClassifySettings], data: Images) -> Attention:
        """Numbers and maps of the trained network's attention on test images."""
        return trial.look(trained, data)

    def picture(self, data: Images, number: int) -> tuple[Image.Image, str]:
        """A test image and the name of its class."""
        image, label = data.test[number]
        return image, data.class_names[label]


def _mixup(job: Job[ClassifySettings]) -> Mixup | None:
    chosen = job.settings
    if not chosen.mixup and not chosen.cutmix:
        return None
    return Mixup(
        mixup_alpha=chosen.mixup,
        cutmix_alpha=chosen.cutmix,
        prob=chosen.mixup_prob,
        switch_prob=chosen.mixup_switch_prob,
        label_smoothing=chosen.smoothing,
        num_classes=len(job.facts["class_names"]),
    )


def _criterion(chosen: ClassifySettings) -> nn.Module:
    if chosen.mixup or chosen.cutmix:
        return SoftTargetCrossEntropy()
    return LabelSmoothingCrossEntropy(chosen.smoothing) if chosen.smoothing else nn.CrossEntropyLoss()


TASK = Classify()

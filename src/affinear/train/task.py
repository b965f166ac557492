"""What a task is: the contract between the engine and what it trains. `docs/tasks.md` tells how to write one.

A `Task` is a value without state. For a run, or an evaluation, it makes a `Work`, which has the data open and knows the
device: loaders, the loss of a batch, the score of a test set, and what a report shows. The engine knows neither images
nor classes; it knows batches (any nest of tensors), losses and scores.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..lens.glance import Attention
from ..models.making import MOST_NUMBERS
from .corrupt import Skipped
from .page import Section
from .recipe import Recipe
from .settings import Settings, check_fields
from .weights import fill

if TYPE_CHECKING:
    from PIL import Image

Batch = Any  # any nest of tensors in tuples, named tuples, lists and dicts; accelerate brings it to the device


class Data(Protocol):
    """A data set that is open: both halves, by whatever names the task has for them."""

    @property
    def name(self) -> str:
        """For people, such as "digits" or "CIFAR-10 in /data/cifar"."""
        ...

    @property
    def fingerprint(self) -> str:
        """A few letters that are others for other samples or labels, so that a run is not continued on other data."""
        ...

    @property
    def sizes(self) -> tuple[int, int]:
        """How many samples there are to learn from, and to be judged by."""
        ...


@dataclass(frozen=True)
class Measure:
    """One of the numbers of a score, and how people read it.

    Attributes:
        name: As `Score.numbers` has it.
        title: For people, such as "top-1".
        higher_is_better: Whether more is better.
        form: How it is written: a format of Python's, such as ".1%" or ".3f".
        share: Whether it is a mean of yes and no over single samples, whose error of sampling is known.
    """

    name: str
    title: str
    higher_is_better: bool = True
    form: str = ".1%"
    share: bool = False

    def shown(self, value: float) -> str:
        """The value for people.

        Examples:
            >>> Measure("top1", "top-1").shown(0.625), Measure("loss", "loss", False, ".3f").shown(1.25)
            ('62.5 %', '1.250')
        """
        return format(value, self.form).replace("%", " %")

    def told(self, value: float) -> str:
        """The value where there is room for one digit more, as people write it in running text; whole numbers stay.

        Examples:
            >>> Measure("top1", "top-1").told(0.625), Measure("loss", "loss", False, ".3f").told(1.25)
            ('62.50%', '1.2500')
            >>> Measure("cap", "cap of detections", form=".0f").told(400)
            '400'
        """
        if self.form == ".0f":
            return format(value, self.form)
        whole, dot, rest = self.form.partition(".")
        digits = "".join(sign for sign in rest if sign.isdecimal())
        return format(value, f"{whole}.{int(digits) + 1}{rest[len(digits) :]}" if dot and digits else self.form)

    def better(self, one: float, other: float | None) -> bool:
        """Whether one value is better than another, or than none; a number that is none is better than nothing.

        Examples:
            >>> Measure("top1", "top-1").better(0.5, 0.4), Measure("wer", "WER", False).better(0.5, 0.4)
            (True, False)
        """
        if other is None or one == other:
            return other is None
        return one > other if self.higher_is_better else one < other

    @property
    def scale(self) -> float:
        """What a value is multiplied with to be drawn: 100 for percent."""
        return 100.0 if self.form.endswith("%") else 1.0

    @property
    def points(self) -> str:
        """What a difference of two drawn values is counted in."""
        return "points" if self.form.endswith("%") else self.title


@dataclass(frozen=True)
class Part:
    """A part of a test set by itself, such as one class.

    Attributes:
        name: Of the part.
        count: Samples of it.
        numbers: By name.
        counted: What `count` counts where that is not the task's samples, such as "tokens".
    """

    name: str
    count: int
    numbers: Mapping[str, float]
    counted: str | None = None


@dataclass(frozen=True)
class Score:
    """How a network did on a test set: named numbers, over all processes.

    Attributes:
        numbers: By name; the task's metric is among them.
        count: Samples that were looked at.
        parts: Parts of the test set by themselves, such as each class.
        skipped: Names of samples that could not be read.
        confusion: Of the samples of each part, a row, how many were taken for each, a column; none if a task does not
            tell.
        counted: What `count` counts where that is not the task's samples, such as "rows".

    Examples:
        >>> Score({"top1": 0.5}, 8)["top1"]
        0.5
    """

    numbers: Mapping[str, float]
    count: int
    parts: tuple[Part, ...] = ()
    skipped: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    counted: str | None = None

    def __getitem__(self, name: str) -> float:
        return self.numbers[name]


@dataclass(frozen=True)
class Answer:
    """What `affinear predict` says to one thing it was asked about.

    Attributes:
        source: What it was: a file, a text.
        text: For people, in a line or a few; empty where there is an error.
        content: For machines; fields that JSON can hold.
        files: What to write where the user names a folder: content by name.
        error: Why there is no answer; None if there is.
    """

    source: str
    text: str = ""
    content: Mapping[str, Any] = field(default_factory=dict[str, Any])
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    error: str | None = None


D = TypeVar("D", bound=Data)
S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Job(Generic[S]):
    """What a network is made and trained with. All of it can be written as JSON and stands beside trained weights.

    Attributes:
        model: Name of the network.
        model_args: What it is made with beside what recipe, settings and data say.
        recipe: The engine's settings.
        settings: The task's own.
        facts: What the data told that network and users must know: names of classes, size of a vocabulary ...
    """

    model: str
    model_args: Mapping[str, Any]
    recipe: Recipe
    settings: S
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Trained(Generic[D, S]):
    """A trained network with what it needs to be used.

    Attributes:
        task: What it was trained for.
        job: What it was made with.
        network: In evaluation mode.
    """

    task: Task[D, S]
    job: Job[S]
    network: nn.Module


class Work(ABC, Generic[D, S]):
    """A task at work on one job: the data is open, the device known. One run or one evaluation has one.

    All randomness in it must follow from where the run is: what a loader draws from the `Draw`s of `train.draws`, what
    `vary` and `loss` draw from torch's, numpy's and Python's generators, which the engine seeds for each step. Then a
    run that was killed goes on to the same bits.

    Args:
        job: With nothing left open.
        data: Open.
        device: Where batches will be.
    """

    def __init__(self, job: Job[S], data: D, device: torch.device) -> None:
        self.job, self.data, self.device = job, data, device
        self.skipped = Skipped(job.recipe.unreadable)

    @property
    def per_step(self) -> float:
        """How many of the task's units, such as images or tokens, one optimizer step sees, over all processes."""
        return float(self.job.recipe.batch_size)

    @abstractmethod
    def train_loader(self) -> DataLoader[Any]:
        """Batches to learn from, made by `train.loading.shuffled`: each of all processes together.

        Raises:
            ValueError: If there are fewer samples than a batch has.
        """

    @abstractmethod
    def test_loader(self) -> DataLoader[Any]:
        """Batches to be judged by, made by `train.loading.in_order`; rows that only fill up are marked as such."""

    def look_through(self) -> None:
        """Before a run begins: note in `skipped` what of the data cannot be read, as far as that is found quickly.

        Raises:
            TooManyCorrupt: If that is too much; all that was found is named.
        """

    def ready(self, batch: Batch) -> Batch:
        """A batch as the network wants it, once it is on the device: without randomness, for training and test."""
        return batch

    def vary(self, batch: Batch) -> Batch:
        """What happens at random to a batch that is learnt from, beyond what the loader did, such as mixup."""
        return batch

    @abstractmethod
    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch, a scalar. The network is to be called, not its methods: processes talk in its call."""

    @abstractmethod
    def score(self, network: nn.Module, batches: Iterable[Batch], accelerator: Accelerator) -> Score:
        """Look at all batches of the test loader, in all processes, and count.

        Args:
            network: In evaluation mode; call it under `torch.no_grad()` and `accelerator.autocast()`.
            batches: Of this process, ready.
            accelerator: Adds up what processes counted: `accelerator.reduce(sums)`, `gather_object(list)`.

        Returns:
            The same score in every process.
        """

    @abstractmethod
    def names(self, indices: Sequence[int]) -> list[str]:
        """What training samples are called, for a message about a bad batch."""

    def glimpse(self, network: nn.Module) -> bytes | None:
        """A picture of what a network in evaluation mode does, a PNG file, kept at every evaluation; None for none.

        Only one process asks.
        """
        return None

    def examples(self) -> Mapping[str, Tensor]:
        """A few test samples as the network wants them, which the run keeps; none unless a task has some."""
        return {}

    def report(self, network: nn.Module) -> list[Section]:
        """What the run's report shows beside the curves, of a network in evaluation mode; only one process asks."""
        return []


class Task(ABC, Generic[D, S]):
    """What can be trained: data, networks, loss, metrics, recipes, answers, and what a report shows.

    Attributes:
        name: What `--task` calls it.
        about: What it does, in a few words.
        unit: What training is counted in: "images", "tokens", "seconds of audio".
        samples: What one of the data set is called, in the plural: "images", "texts", "recordings".
        parts: What the parts of a score are called: "classes".
        measures: The numbers of a score that people are shown, in this order.
        metric: The one that decides which weights are best, one of the measures.
        settings: The class of the task's own settings.
        options: The class of what `affinear predict` can be told.
        prompted: Whether it is asked by texts themselves, which are neither files nor folders.
        endings: Of the names of files that it is asked about where a folder is named, in small letters; none for those
            of images.
        between: What stands between two pieces of what `follow` gives.
        pace: What a comparison tells the speed in: the task's units per second, or milliseconds of a step.
        fits_few: Whether a recipe may be made to fit where samples do not fill its batch; the samples that a task
            counts are then those that its loader draws.
        judged: Whether both the last and the averaged weights are scored, or the averaged ones alone where there are
            any.
        draws: Whether the files of an answer are the answer, so that they are written where nobody names a folder.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    unit: ClassVar[str] = "images"
    samples: ClassVar[str] = "images"
    parts: ClassVar[str] = "parts"
    measures: ClassVar[tuple[Measure, ...]]
    metric: ClassVar[Measure]
    settings: type[S]
    options: ClassVar[type[Settings]] = Settings
    prompted: ClassVar[bool] = False
    endings: ClassVar[tuple[str, ...]] = ()
    between: ClassVar[str] = " "
    pace: ClassVar[Literal["units", "steps"]] = "units"
    fits_few: ClassVar[bool] = False
    judged: ClassVar[Literal["both", "averaged"]] = "both"
    draws: ClassVar[bool] = False

    @property
    @abstractmethod
    def recipes(self) -> Mapping[str, Setup]:
        """The published recipes by name."""

    @abstractmethod
    def preset(self, model: str, name: str | None) -> Setup:
        """The recipe of a network, or the one of this name, as it was published: rates not scaled, nothing changed.

        Raises:
            ValueError: If there is no such recipe; `unknown_recipe` makes the sentence.
        """

    def named(self, name: str) -> Setup:
        """The recipe of this name.

        Raises:
            ValueError: If there is none.
        """
        known = self.recipes
        if name not in known:
            raise unknown_recipe(name, known)
        return known[name]

    @abstractmethod
    def open(self, spec: str, settings: S) -> D:
        """What `--data` says, open.

        Raises:
            ValueError: If it is not there, not recognised or damaged: what was looked for, what was found.
        """

    def open_to_judge(self, spec: str, settings: S) -> tuple[D, str]:
        """What `affinear eval --data` says, open: its test half is judged by; and which samples that are, in words.

        Raises:
            ValueError: As `open` does.
        """
        return self.open_held_out(spec, settings)

    def open_held_out(self, spec: str, settings: S) -> tuple[D, str]:
        """What `--data` says, open, as training has it; and its test half in words."""
        data = self.open(spec, settings)
        return data, f"the test half of {data.name}"

    @abstractmethod
    def settle(self, job: Job[S], data: D) -> Job[S]:
        """The job with nothing left open: what data and network decide is decided, and the facts are there.

        The engine has decided what the machine decides: precision, compile, channels_last.

        Raises:
            ValueError: If the network is not known or does not fit the data.
        """

    @abstractmethod
    def network(self, job: Job[S], *, room: int = MOST_NUMBERS) -> nn.Module:
        """The network of a settled job, with fresh weights, by `models.making` where a name comes from a file.

        Args:
            job: Its model, arguments, settings and facts. There is no data here.
            room: How many numbers its weights may have together. What asks for more, as a file of weights might, is
                refused before any memory is taken.

        Raises:
            ValueError: If it does not know an argument.
        """

    @abstractmethod
    def work(self, job: Job[S], data: D, device: torch.device) -> Work[D, S]:
        """A settled job at work."""

    @abstractmethod
    def predict(self, trained: Trained[D, S], sources: Sequence[str], options: Any) -> Iterator[Answer]:
        """Answer, one after the other, what a trained network says to files or texts.

        Whatever cannot be read gets an answer with an error, and the others are answered all the same.

        Args:
            trained: On the device where it shall compute.
            sources: As the user gave them.
            options: Of the class `options`.
        """

    def follow(self, trained: Trained[D, S], source: str, options: Any) -> Iterator[str]:
        """What a trained network says to a source, word by word as it comes, in memory of one size.

        Args:
            trained: On the device where it shall compute.
            source: As the user gave it.
            options: Of the class `options`.

        Raises:
            ValueError: If the task, or this network, answers in one piece alone.
        """
        raise ValueError(f"--stream: --task {self.name} answers in one piece")

    def check_parts(self, job: Job[S], part: int) -> None:
        """Raise ValueError if a process cannot work on so many samples at a time."""

    def check_job(self, job: Job[S]) -> None:
        """Raise ValueError if a job that was read from a file lacks a fact, or asks for what no user would."""

    def summary(self, job: Job[S], data: D) -> str:
        """The data set in a line, for `--dry-run`."""
        train, test = data.sizes
        return f"{train:,} training and {test:,} test {self.samples}"

    def check_data(self, trained: Trained[D, S], data: D) -> None:
        """Raise ValueError if a trained network does not go with a data set that it is to be judged by."""

    def start(self, network: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
        """Load the weights that `--weights` names into a fresh network: all of them, or else a ValueError."""
        fill(network, tensors, source)

    def begin(self, network: nn.Module, job: Job[S]) -> None:
        """What happens to a fresh network where `--weights` names none: nothing, unless a task knows better weights."""

    def rate_of(self, name: str, job: Job[S]) -> float:
        """What the learning rate of a parameter of this name is multiplied with; one, unless a task knows better."""
        return 1.0

    def bare(
        self, path: Path, model: str | None, model_args: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> Trained[D, S]:
        """A network out of a file of weights that does not tell what it belongs to.

        Raises:
            ValueError: If the task cannot do so.
        """
        raise ValueError(f"{path}: the file does not tell which network it belongs to; give the folder of a run")

    def limited(self, data: D, limit: int) -> D:
        """At most so many samples of each half, evenly among all, for trials."""
        raise ValueError(f"limit: --task {self.name} takes all samples")

    def variants(self, model: str) -> Mapping[str, Mapping[str, Any]]:
        """What `affinear compare` compares unless told otherwise: arguments of the network by the variant's name."""
        names = ("softmax", "linear", "inline", "nala", "mala")
        return {name: self.variant(model, name) for name in names}

    def variant(self, model: str, name: str) -> Mapping[str, Any]:
        """What a network is made with to be the variant of this name.

        Raises:
            ValueError: If the network cannot be it.
        """
        return {} if name == "own" else {"mechanism": name}

    def variant_about(self, name: str) -> str:
        """What a variant is, in a few words."""
        return "the network as it is" if name == "own" else name

    def trial(self, model: str, data: D) -> Setup:
        """The recipe of `affinear compare`; the network's own unless a task knows better."""
        return self.preset(model, None)

    def trial_of(self, models: Sequence[str], data: D) -> Setup:
        """The one recipe of `affinear compare` for several networks; that of the first unless a task knows better."""
        return self.trial(models[0], data)

    def macs(self, job: Job[S]) -> int | None:
        """Multiply-adds of a settled job's network for one sample, found without memory; None if nobody counts them.

        Raises:
            ValueError: If the network does not take such a sample.
        """
        return None

    def inspect(self, trained: Trained[D, S], data: D) -> Attention:
        """Numbers and maps of a trained network's attention, for the comparison; none unless a task looks."""
        return Attention()

    def picture(self, data: D, number: int) -> tuple[Image.Image, str] | None:
        """The test image that a map of `inspect` is about, and what it shows; None if there is no such thing."""
        return None


@dataclass(frozen=True)
class Setup:
    """A task with the settings of a run: the engine's and its own. What a recipe's name stands for.

    Attributes:
        task: What is trained.
        recipe: The engine's settings.
        settings: The task's own.
    """

    task: Task[Any, Any]
    recipe: Recipe
    settings: Settings

    def changed(self, **changes: Any) -> Setup:
        """The same with some fields set, in recipe or settings, whichever has the field.

        Raises:
            ValueError: If neither has one; those that come near are named.
        """
        check_fields(changes, (*Recipe.names(), *self.settings.names()), f"recipe of {self.task.name}")
        engine = {name: value for name, value in changes.items() if name in Recipe.names()}
        own = {name: value for name, value in changes.items() if name not in engine}
        return dataclasses.replace(self, recipe=self.recipe.changed(**engine), settings=self.settings.changed(**own))

    def fields(self) -> dict[str, Any]:
        """Every field of recipe and settings by its name."""
        return {**self.recipe.as_dict(), **self.settings.as_dict()}

    def to_json(self) -> str:
        """All of it as JSON; `affinear.tasks.read_setup` reads it."""
        told = {"task": self.task.name, "recipe": self.recipe.as_dict(), "settings": self.settings.as_dict()}
        return json.dumps(told, indent=2)


def chosen_setup(task: Task[Any, Any], model: str, name: str | None, changes: Mapping[str, Any]) -> Setup:
    """The recipe of a network with some fields set, and its rates as plain numbers.

    Rates are given for the batch that results: the published ones are scaled with it, one that is set here is taken as
    it is. Of a run that is made shorter or longer, warm-up and milestones keep their share, unless they are set too.
    """
    preset = task.preset(model, name)
    given = {**in_proportion(preset.recipe, changes), **changes}
    for rate, batch in (("lr", "lr_batch"), ("ema_decay", "ema_batch")):
        if rate in given and batch not in given:
            given[batch] = 0
    found = preset.changed(**given)
    return dataclasses.replace(found, recipe=found.recipe.scaled())


def in_proportion(before: Recipe, changes: Mapping[str, Any]) -> dict[str, Any]:
    """What goes along when the length of a run is changed."""
    unit = "steps" if changes.get("steps") is not None else "epochs" if "epochs" in changes else None
    if unit is None or not isinstance(changes[unit], int):
        return {}
    old = "epochs" if before.steps is None else "steps"
    factor = changes[unit] / getattr(before, old)
    found: dict[str, Any] = {"steps": None, "eval_steps": None} if unit == "epochs" and old == "steps" else {}
    rise = before.warmup_epochs if old == "epochs" else before.warmup_steps
    if rise is not None:
        found |= {"warmup_steps": round(rise * factor)} if unit == "steps" else {"warmup_epochs": rise * factor}
    if unit == "epochs" and old == "steps":
        found["warmup_steps"] = None
    if before.milestones is not None:
        found["milestones"] = tuple(where * factor for where in before.milestones)
    return found


def unknown_recipe(name: str, known: Iterable[str]) -> ValueError:
    """The error for a recipe that does not exist, with those that come near."""
    known = list(known)
    near = get_close_matches(name, known, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    return ValueError(f"recipe: expected one of {', '.join(known)}, got {name!r}{hint}")

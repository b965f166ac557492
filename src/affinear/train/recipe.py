"""Recipe: every setting of a training run, checked when it is made, and readable as JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, TypeGuard

PRECISIONS = ("no", "bf16", "fp16")
SCHEDULES = ("cosine", "tanh", "poly", "step")
AUGMENTS = ("none", "simple", "timm")
ERASERS = ("const", "rand", "pixel")
# They change how fast a run goes or what is written, not what comes out of it.
FREE = ("compile", "log_every", "save_every", "workers")


@dataclass(frozen=True)
class Check:
    """What a field may hold.

    Attributes:
        expected: In words, for the error.
        good: Whether a value will do.
    """

    expected: str
    good: Callable[[Any], bool]


@dataclass(frozen=True)
class Recipe:
    """Every setting of a training run.

    None stands for what is found out when the run begins: the kind of machine decides `precision`, `compile`,
    `channels_last`; data and network decide `image_size`, `mean`, `std`, `interpolation`, `crop_pct`. The recipe in a
    run's folder has them all.

    Attributes:
        epochs: Passes over the images.
        batch_size: Images of one optimizer step, over all processes and accumulated parts.
        accumulate: Parts in which a batch is worked off, where it does not fit at once.
        opt: Name of the optimizer, any of timm's.
        lr: Peak learning rate.
        lr_batch: Batch that `lr` is meant for; it is scaled in proportion to `batch_size`. 0: taken as it is.
        scale_all_lr: Whether `warmup_lr` and `min_lr` are scaled with `lr`.
        layer_decay: Factor of the learning rate from layer to layer towards the input; None for none.
        weight_decay: Of everything but biases, norms and what the network exempts.
        betas: Of Adam and its kin.
        eps: Of Adam and its kin.
        sched: Shape of the learning rate after the warm-up: cosine, tanh, poly or step.
        warmup_epochs: Epochs in which the learning rate rises from `warmup_lr`; may be a fraction.
        warmup_lr: Where it starts.
        min_lr: Where it ends.
        clip_grad: Largest norm of the gradient; None for no limit.
        smoothing: Share of the target that is spread over all classes.
        mixup: Alpha of mixup; 0 turns it off.
        cutmix: Alpha of cutmix; 0 turns it off.
        mixup_prob: Share of batches that are mixed.
        mixup_switch_prob: Share of them that get cutmix, if both are on.
        drop_path: Stochastic depth of the last block.
        ema_decay: Decay of the averaged weights that are kept beside the trained ones; None for none.
        ema_batch: Batch that `ema_decay` is meant for; it is raised to `batch_size` over this. 0: taken as it is.
        augment: "none", "simple" (pad, crop, flip) or "timm" (crops of any scale, RandAugment, erasing).
        auto_augment: RandAugment's settings, as timm spells them; None for none.
        color_jitter: How far colours vary.
        reprob: Share of images in which a rectangle is erased.
        remode: What it is filled with: const, rand or pixel.
        recount: Rectangles at most.
        scale: Smallest and largest share of an image that a crop takes.
        ratio: Narrowest and widest shape of a crop.
        hflip: Share of images that are mirrored left to right.
        vflip: Share of images that are mirrored top to bottom.
        pad: Pixels around an image before "simple" crops it; None for an eighth of its shorter side.
        repeats: Variants of an image in one epoch, of which repeated augmentation uses 3.
        image_size: Height and width.
        mean: Of each channel, taken off.
        std: Of each channel, divided by.
        interpolation: How images are resized: bilinear, bicubic ...
        crop_pct: Share of an image that evaluation keeps.
        precision: "no" for float32, "bf16" or "fp16" for mixed precision.
        compile: Whether torch.compile makes the training step faster.
        channels_last: Whether images keep their channels last in memory.
        sync_bn: Whether batch norms share their statistics among GPUs.
        seed: Of everything random.
        workers: Processes that read images; 0 reads in the training process.
        save_every: Steps between checkpoints, beside the one after each epoch; 0 for that one alone.
        log_every: Steps between lines of the log.
        eval_every: Epochs between evaluations; the last one is always evaluated.

    Examples:
        >>> Recipe(epochs=10, batch_size=64).epochs
        10
        >>> Recipe(epochs=0)
        Traceback (most recent call last):
        ValueError: epochs: expected a whole number of at least 1, got 0
    """

    epochs: int = 300
    batch_size: int = 1024
    accumulate: int = 1
    opt: str = "adamw"
    lr: float = 5e-4
    lr_batch: int = 0
    scale_all_lr: bool = False
    layer_decay: float | None = None
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    sched: str = "cosine"
    warmup_epochs: float = 5.0
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    clip_grad: float | None = None
    smoothing: float = 0.1
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    mixup_switch_prob: float = 0.5
    drop_path: float = 0.0
    ema_decay: float | None = None
    ema_batch: int = 0
    augment: str = "timm"
    auto_augment: str | None = None
    color_jitter: float = 0.0
    reprob: float = 0.0
    remode: str = "pixel"
    recount: int = 1
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    hflip: float = 0.5
    vflip: float = 0.0
    pad: int | None = None
    repeats: int = 1
    image_size: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: str | None = None
    crop_pct: float | None = None
    precision: str | None = None
    compile: bool | None = None
    channels_last: bool | None = None
    sync_bn: bool = False
    seed: int = 0
    workers: int = 2
    save_every: int = 0
    log_every: int = 10
    eval_every: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value, check = getattr(self, field.name), CHECKS[field.name]
            if not check.good(value):
                raise ValueError(f"{field.name}: expected {check.expected}, got {value!r}")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate: expected a divisor of the batch of {self.batch_size}, got {self.accumulate}; "
                "batch_size counts all parts of a step together"
            )

    def changed(self, **changes: Any) -> Recipe:
        """The recipe with some fields set; one that does not exist is an error that names those that come near.

        Examples:
            >>> Recipe().changed(epoch=3)
            Traceback (most recent call last):
            ValueError: recipe: no field is called 'epoch'; did you mean 'epochs'...?
        """
        check_fields(changes)
        return dataclasses.replace(self, **{name: _tidy(value) for name, value in changes.items()})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all fields."""
        return tuple(field.name for field in fields(cls))

    def as_dict(self) -> dict[str, Any]:
        """Every field by its name."""
        return dataclasses.asdict(self)

    def scaled(self) -> Recipe:
        """The recipe with the learning rates and the decay that its batch asks for, as plain numbers.

        Examples:
            >>> Recipe(batch_size=1024, lr=5e-4, lr_batch=512).scaled().lr
            0.001
        """
        factor = self.batch_size / self.lr_batch if self.lr_batch else 1.0
        others = factor if self.scale_all_lr else 1.0
        decay = self.ema_decay
        if decay is not None and self.ema_batch:
            decay = decay ** (self.batch_size / self.ema_batch)
        return dataclasses.replace(
            self,
            lr=self.lr * factor,
            warmup_lr=self.warmup_lr * others,
            min_lr=self.min_lr * others,
            ema_decay=decay,
            lr_batch=0,
            ema_batch=0,
            scale_all_lr=False,
        )

    def to_json(self) -> str:
        """The recipe as JSON, one field per line.

        Examples:
            >>> Recipe.from_json(Recipe(seed=3).to_json()) == Recipe(seed=3)
            True
        """
        return json.dumps(dataclasses.asdict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> Recipe:
        """The recipe that `to_json` wrote.

        Raises:
            ValueError: If it is not JSON, or a field is unknown or holds what it may not.
        """
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"recipe: expected JSON, got what cannot be read as such ({error})") from None
        if not isinstance(content, dict):
            raise ValueError(f"recipe: expected an object of fields in JSON, got {type(content).__name__}")
        return Recipe().changed(**content)


def check_fields(names: Mapping[str, Any]) -> None:
    """Raise ValueError for the first name that is no field, with those that come near."""
    known = [field.name for field in fields(Recipe)]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"recipe: no field is called {name!r}; {hint}")


def check_values(changes: Mapping[str, Any]) -> None:
    """Raise ValueError for the first change that is no field, or holds what the field may not.

    Examples:
        >>> check_values({"epochs": "x"})
        Traceback (most recent call last):
        ValueError: epochs: expected a whole number of at least 1, got 'x'
    """
    check_fields(changes)
    for name, value in changes.items():
        if not CHECKS[name].good(_tidy(value)):
            raise ValueError(f"{name}: expected {CHECKS[name].expected}, got {value!r}")


def parse(settings: list[str]) -> dict[str, Any]:
    """Changes as the command line spells them: field=value, with commas or an x between the numbers of a pair.

    Examples:
        >>> parse(["epochs=20", "image_size=192x256", "clip_grad=none", "betas=0.9,0.95", "auto_augment=rand-m9"])
        {'epochs': 20, 'image_size': (192, 256), 'clip_grad': None, 'betas': (0.9, 0.95), 'auto_augment': 'rand-m9'}
    """
    found: dict[str, Any] = {}
    for setting in settings:
        name, text = named_value(setting, "--set: expected field=value, such as epochs=20")
        check_fields({name: text})
        found[name] = parse_size(text) if name == "image_size" else parse_value(text.strip())
    return found


def parse_model_args(given: list[str]) -> dict[str, Any]:
    """What a network is made with as the command line spells it: name=value.

    Examples:
        >>> parse_model_args(["depth=6", "mechanism=mala"])
        {'depth': 6, 'mechanism': 'mala'}
    """
    pairs = (named_value(text, "--model-arg: expected name=value, such as depth=6") for text in given)
    return {name: parse_value(value.strip()) for name, value in pairs}


def named_value(text: str, expected: str) -> tuple[str, str]:
    """Name and value of what the command line spells name=value, or a ValueError that begins with what was expected.

    Examples:
        >>> named_value("clip-grad=1.0", "")
        ('clip_grad', '1.0')
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{expected}, got {text!r}")
    return name.strip().replace("-", "_"), value


def parse_size(text: str) -> tuple[int, int] | None:
    """Height and width, written as 192x256, or as one number for both.

    Examples:
        >>> parse_size("224"), parse_size("192x256")
        ((224, 224), (192, 256))
    """
    if text.strip().lower() == "none":
        return None
    sides = text.lower().replace(",", "x").split("x")
    if len(sides) > 2 or not all(side.strip().isdecimal() and int(side) > 0 for side in sides):
        raise ValueError(f"image_size: expected a side such as 224, or height and width such as 192x256, got {text!r}")
    return int(sides[0]), int(sides[-1])


def parse_value(text: str) -> Any:
    """None, a truth, a number, several numbers with commas, or else the text itself.

    Examples:
        >>> [parse_value(text) for text in ("none", "true", "3", "1e-3", "0.9,0.95", "adamw")]
        [None, True, 3, 0.001, (0.9, 0.95), 'adamw']
    """
    words: dict[str, Any] = {"none": None, "true": True, "yes": True, "false": False, "no": "no"}
    if text.lower() in words:
        return words[text.lower()]
    if "," in text:
        return tuple(parse_value(part.strip()) for part in text.split(",") if part.strip())
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _tidy(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(least: int, optional: bool = False) -> Check:
    def good(value: Any) -> bool:
        if value is None:
            return optional
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    return Check(f"a whole number of at least {least}{' or none' if optional else ''}", good)


def _at_least_0(optional: bool = False) -> Check:
    return Check(
        f"a number of at least 0{' or none' if optional else ''}",
        lambda value: optional if value is None else _number(value) and value >= 0,
    )


def _more_than_0(optional: bool = False) -> Check:
    return Check(
        f"a number above 0{' or none' if optional else ''}",
        lambda value: optional if value is None else _number(value) and value > 0,
    )


def _share(below: bool = False, optional: bool = False) -> Check:
    def good(value: Any) -> bool:
        if value is None:
            return optional
        return _number(value) and 0 <= value <= 1 and not (below and value == 1)

    text = "a number from 0 to 1" + (", and less than 1" if below else "") + (", or none" if optional else "")
    return Check(text, good)


def _numbers(count: int | None, optional: bool, above: float = -math.inf) -> Check:
    def good(value: Any) -> bool:
        if value is None:
            return optional
        fits = isinstance(value, tuple) and (len(value) == count if count else len(value) > 0)
        return fits and all(_number(x) and x > above for x in value)

    text = f"{count or 'as many'} numbers{' above 0' if above == 0 else ''}{' or none' if optional else ''}"
    return Check(text, good)


def _below_one() -> Check:
    def good(value: Any) -> bool:
        return isinstance(value, tuple) and len(value) == 2 and all(_number(x) and 0 <= x < 1 for x in value)

    return Check("two numbers from 0 to below 1", good)


def _one_of(choices: tuple[str, ...], optional: bool = False) -> Check:
    named = ", ".join(choices) + (" or none" if optional else "")
    return Check(f"one of {named}", lambda value: value in choices or (optional and value is None))


def _size(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value)


_TRUTH = Check("true or false", lambda value: isinstance(value, bool))
_MAYBE = Check("true, false or none", lambda value: value is None or isinstance(value, bool))
_TEXT = Check("a name", lambda value: isinstance(value, str) and bool(value))
_MAYBE_TEXT = Check("a name or none", lambda value: value is None or (isinstance(value, str) and bool(value)))

CHECKS: Mapping[str, Check] = {
    "epochs": _whole(1),
    "batch_size": _whole(1),
    "accumulate": _whole(1),
    "opt": _TEXT,
    "lr": _more_than_0(),
    "lr_batch": _whole(0),
    "scale_all_lr": _TRUTH,
    "layer_decay": _more_than_0(optional=True),
    "weight_decay": _at_least_0(),
    "betas": _below_one(),
    "eps": _more_than_0(),
    "sched": _one_of(SCHEDULES),
    "warmup_epochs": _at_least_0(),
    "warmup_lr": _at_least_0(),
    "min_lr": _at_least_0(),
    "clip_grad": _more_than_0(optional=True),
    "smoothing": _share(below=True),
    "mixup": _at_least_0(),
    "cutmix": _at_least_0(),
    "mixup_prob": _share(),
    "mixup_switch_prob": _share(),
    "drop_path": _share(below=True),
    "ema_decay": _share(below=True, optional=True),
    "ema_batch": _whole(0),
    "augment": _one_of(AUGMENTS),
    "auto_augment": _MAYBE_TEXT,
    "color_jitter": _at_least_0(),
    "reprob": _share(),
    "remode": _one_of(ERASERS),
    "recount": _whole(1),
    "scale": _numbers(2, False, above=0),
    "ratio": _numbers(2, False, above=0),
    "hflip": _share(),
    "vflip": _share(),
    "pad": _whole(0, optional=True),
    "repeats": _whole(1),
    "image_size": Check("height and width in pixels, or none", _size),
    "mean": _numbers(None, True),
    "std": _numbers(None, True, above=0),
    "interpolation": _MAYBE_TEXT,
    "crop_pct": _more_than_0(optional=True),
    "precision": _one_of(PRECISIONS, optional=True),
    "compile": _MAYBE,
    "channels_last": _MAYBE,
    "sync_bn": _TRUTH,
    "seed": _whole(0),
    "workers": _whole(0),
    "save_every": _whole(0),
    "log_every": _whole(1),
    "eval_every": _whole(1),
}

"""Recipe: every setting of a run that is the engine's, whatever is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from . import settings
from .corrupt import SHARE
from .settings import Check, Settings

PRECISIONS = ("no", "bf16", "fp16")
SCHEDULES = ("cosine", "tanh", "poly", "step", "multistep")


def _read_freeze(text: str) -> str | None:
    return None if text.lower() == "none" else text  # commas stay


def _is_freeze(value: object) -> bool:
    return value is None or (isinstance(value, str) and bool(value))


@dataclass(frozen=True)
class Recipe(Settings):
    """Every setting of a run that is the engine's, whatever is trained. A task has settings of its own beside it.

    None stands for what is found out when the run begins: the kind of machine decides `precision`, `compile`,
    `channels_last`. The recipe in a run's folder has them all.

    Attributes:
        epochs: Passes over the training samples.
        steps: Optimizer steps of the whole run, instead of `epochs`; None for epochs.
        batch_size: Samples of one optimizer step, over all processes and accumulated parts.
        accumulate: Parts in which a batch is worked off, where it does not fit at once.
        opt: Name of the optimizer, any of timm's.
        lr: Peak learning rate.
        lr_batch: Batch that `lr` is meant for; it is scaled in proportion to `batch_size`. 0: taken as it is.
        scale_all_lr: Whether `warmup_lr` and `min_lr` are scaled with `lr`.
        layer_decay: Factor of the learning rate from layer to layer towards the input; None for none.
        weight_decay: Of everything but biases, norms and what the network exempts.
        betas: Of Adam and its kin.
        eps: Of Adam and its kin.
        sched: Shape of the learning rate after the warm-up: cosine, tanh, poly, step or multistep.
        power: Of "poly".
        milestones: Where "multistep" multiplies the rate by `decay_rate`: epochs, or steps where `steps` is set.
        decay_rate: Factor of "step", at each third of the run, and of "multistep".
        warmup_epochs: Epochs in which the learning rate rises from `warmup_lr`; may be a fraction.
        warmup_steps: The same in steps, instead of `warmup_epochs`; None for epochs.
        warmup_lr: Where it starts.
        min_lr: Where it ends.
        freeze: What keeps its weights: "body" for all but the head, or how names of parameters begin, with commas; None
            for nothing.
        clip_grad: Largest norm of the gradient; None for no limit.
        ema_decay: Decay of the averaged weights that are kept beside the trained ones; None for none.
        ema_batch: Batch that `ema_decay` is meant for; it is raised to `batch_size` over this. 0: taken as it is.
        precision: "no" for float32, "bf16" or "fp16" for mixed precision.
        compile: Whether torch.compile makes the training step faster.
        channels_last: Whether images keep their channels last in memory.
        sync_bn: Whether batch norms share their statistics among GPUs.
        context_parallel: Processes that share every image, each with a strip of it; 1 for none that do.
        checkpointing: Whether activations are computed anew in the backward pass, which takes less memory.
        seed: Of everything random.
        workers: Processes that read samples; 0 reads in the training process.
        save_every: Steps between checkpoints, beside the one after each epoch or evaluation; 0 for that one alone.
        log_every: Steps between lines of the log.
        eval_every: Epochs between evaluations; the end of the run is always evaluated.
        eval_steps: Steps between evaluations, instead of `eval_every`; None for epochs.
        unreadable: Share of the samples of a half that may be unreadable and are passed over; beyond it a run stops.

    Examples:
        >>> Recipe(epochs=10, batch_size=64).epochs
        10
        >>> Recipe(epochs=0)
        Traceback (most recent call last):
        ValueError: epochs: expected a whole number of at least 1, got 0
        >>> Recipe().changed(epoch=3)
        Traceback (most recent call last):
        ValueError: recipe: no field is called 'epoch'; did you mean 'epochs'...?
        >>> Recipe.from_json(Recipe(seed=3).to_json()) == Recipe(seed=3)
        True
    """

    kind: ClassVar[str] = "recipe"
    free: ClassVar[tuple[str, ...]] = (
        "compile",
        "context_parallel",
        "log_every",
        "save_every",
        "unreadable",
        "workers",
    )

    epochs: int = 300
    steps: int | None = None
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
    power: float = 0.9
    milestones: tuple[float, ...] | None = None
    decay_rate: float = 0.1
    warmup_epochs: float = 5.0
    warmup_steps: int | None = None
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    freeze: str | None = None
    clip_grad: float | None = None
    ema_decay: float | None = None
    ema_batch: int = 0
    precision: str | None = None
    compile: bool | None = None
    channels_last: bool | None = None
    sync_bn: bool = False
    context_parallel: int = 1
    checkpointing: bool = False
    seed: int = 0
    workers: int = 2
    save_every: int = 0
    log_every: int = 10
    eval_every: int = 1
    eval_steps: int | None = None
    unreadable: float = SHARE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"accumulate: expected a divisor of the batch of {self.batch_size}, got {self.accumulate}; "
                "batch_size counts all parts of a step together"
            )
        if self.sched == "multistep" and not self.milestones:
            raise ValueError("milestones: expected where multistep lowers the learning rate, such as 8,11, got none")

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

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run.

        Examples:
            >>> Recipe(epochs=3).total_steps(10), Recipe(steps=25).total_steps(10)
            (30, 25)
        """
        return self.epochs * steps_per_epoch if self.steps is None else self.steps

    checks: ClassVar[Mapping[str, Check]] = {
        "epochs": settings.whole(1),
        "steps": settings.whole(1, optional=True),
        "batch_size": settings.whole(1),
        "accumulate": settings.whole(1),
        "opt": settings.text(),
        "lr": settings.more_than_0(),
        "lr_batch": settings.whole(0),
        "scale_all_lr": settings.truth(),
        "layer_decay": settings.more_than_0(optional=True),
        "weight_decay": settings.at_least_0(),
        "betas": Check(
            "two numbers from 0 to below 1",
            lambda value: settings.numbers(2, False).good(value) and all(0 <= x < 1 for x in value),
        ),
        "eps": settings.more_than_0(),
        "sched": settings.one_of(SCHEDULES),
        "power": settings.more_than_0(),
        "milestones": settings.numbers(None, True, above=0),
        "decay_rate": settings.more_than_0(),
        "warmup_epochs": settings.at_least_0(),
        "warmup_steps": settings.whole(0, optional=True),
        "warmup_lr": settings.at_least_0(),
        "min_lr": settings.at_least_0(),
        "freeze": Check("body, or beginnings of names, or none", _is_freeze, _read_freeze),
        "clip_grad": settings.more_than_0(optional=True),
        "ema_decay": settings.share(below=True, optional=True),
        "ema_batch": settings.whole(0),
        "precision": settings.one_of(PRECISIONS, optional=True),
        "compile": settings.truth(optional=True),
        "channels_last": settings.truth(optional=True),
        "sync_bn": settings.truth(),
        "context_parallel": settings.whole(1),
        "checkpointing": settings.truth(),
        "seed": settings.whole(0),
        "workers": settings.whole(0),
        "save_every": settings.whole(0),
        "log_every": settings.whole(1),
        "eval_every": settings.whole(1),
        "eval_steps": settings.whole(1, optional=True),
        "unreadable": settings.share(),
    }

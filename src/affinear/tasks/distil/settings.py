"""The settings of distilling, whatever the network is: the teacher, the swap, and what the loss counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, get_args

from ...linearizing.choices import Bias, Choices, FeatureMap
from ...linearizing.distil import Weights
from ...ops import mechanisms
from ...train import settings
from ...train.settings import Check, Settings

STAGES = ("layers", "whole")
ATTENTION = "attention"


def _is_string(value: object) -> bool:
    return isinstance(value, str)


def _is_text(value: object) -> bool:
    return _is_string(value) and bool(value)


def _linear() -> list[str]:
    """Mechanisms with a state that are registered now, and a window alone."""
    return [*(name for name, rule in mechanisms().items() if rule.gain is not None), "none"]


def _is_linear(value: object) -> bool:
    return value in _linear()


@dataclass(frozen=True)
class SwapSettings(Settings):
    """How a linearized network is made and taught.

    Attributes:
        teacher: Folder of the run, or file of weights, of the softmax network; a folder of transformers' for language
            and speech. Read while the student learns.
        stage: "layers": each swapped layer learns to answer as the one it replaced, on the teacher's inputs, and
            nothing else changes. "whole": the network learns to say what its teacher says.
        mechanism: What softmax is swapped for; "none" for a window alone.
        feature_map: "own", "learned" or "hedgehog", as `Choices` has them.
        gain: Whether each head learns a factor of what it adds to the mean value.
        norm: Whether each head learns to normalise its answer.
        window: Latest tokens that causal layers still see by softmax; an encoder's see as many after each token, too.
        sinks: First tokens that they see as well.
        convolution: Side of a depthwise convolution of the values, added; 0 for none.
        bias: What becomes of a bias of position: "position", "leave" or "drop".
        keep_every: One layer in so many stays softmax, the last of each; 0 for none.
        leave: Layers that stay softmax as well: their numbers from 0, or patterns of their names, with commas.
        low_rank: Rank of updates of linear layers, which then learn alone, beside what the swap added; 0 for none: all
            weights of the stage learn.
        low_rank_on: Which linear layers have one: "attention" for those of the swapped layers, or patterns of their
            names, with commas.
        added_rate: What the learning rate of what the swap added is multiplied with.
        logit_weight: What divergence from the teacher's distribution counts in stage "whole".
        hidden_weight: What the relative error of the final features counts.
        label_weight: What cross entropy with the labels counts.
        temperature: Of both distributions.
    """

    bound: ClassVar[tuple[str, ...]] = (
        "mechanism",
        "feature_map",
        "gain",
        "norm",
        "window",
        "sinks",
        "convolution",
        "bias",
        "keep_every",
        "leave",
        "low_rank",
        "low_rank_on",
    )

    teacher: str | None = None
    stage: str = "whole"
    mechanism: str = "mala"
    feature_map: str = "own"
    gain: bool = False
    norm: bool = False
    window: int = 0
    sinks: int = 0
    convolution: int = 0
    bias: str = "position"
    keep_every: int = 0
    leave: str = ""
    low_rank: int = 0
    low_rank_on: str = ATTENTION
    added_rate: float = 1.0
    logit_weight: float = 1.0
    hidden_weight: float = 1.0
    label_weight: float = 0.0
    temperature: float = 1.0

    checks: ClassVar[Mapping[str, Check]] = {
        "teacher": settings.text(optional=True),
        "stage": settings.one_of(STAGES),
        "mechanism": Check(f"one of {', '.join(_linear())}, or another that is registered and linear", _is_linear, str),
        "feature_map": settings.one_of(get_args(FeatureMap)),
        "gain": settings.truth(),
        "norm": settings.truth(),
        "window": settings.whole(0),
        "sinks": settings.whole(0),
        "convolution": settings.whole(0),
        "bias": settings.one_of(get_args(Bias)),
        "keep_every": settings.whole(0),
        "leave": Check("numbers or names of layers, with commas", _is_string, str),
        "low_rank": settings.whole(0),
        "low_rank_on": Check("attention, or patterns of names with commas", _is_text, str),  # commas stay
        "added_rate": settings.more_than_0(),
        "logit_weight": settings.at_least_0(),
        "hidden_weight": settings.at_least_0(),
        "label_weight": settings.at_least_0(),
        "temperature": settings.more_than_0(),
    }

    def choices(self) -> Choices:
        """How the swapped layers compute."""
        return Choices(
            self.mechanism,
            self.feature_map,  # pyright: ignore[reportArgumentType]  # checked by the settings
            self.gain,
            self.norm,
            self.window,
            self.sinks,
            self.convolution,
            self.bias,  # pyright: ignore[reportArgumentType]
        )

    def left(self) -> list[int | str]:
        """What `leave` names, as `affinear.linearize` takes it."""
        parts = [part.strip() for part in self.leave.split(",") if part.strip()]
        return [int(part) if part.isdecimal() else part for part in parts]

    def weights(self) -> Weights:
        """What the parts of the second stage's loss count."""
        return Weights(self.logit_weight, self.hidden_weight, self.label_weight, self.temperature)


def told_of(own: str, others: type[Settings]) -> str:
    """The documentation of settings that are two kinds' together: `own`, ending with attributes, and those of both."""
    parts = [SwapSettings.__doc__ or "", others.__doc__ or ""]
    return own + "".join(part.partition("    Attributes:\n")[2].partition("\n\n")[0].rstrip() + "\n" for part in parts)

"""The settings of distilling: those of classification, the teacher, the swap, and what the loss counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, get_args

from ...linearizing.choices import Bias, Choices, FeatureMap
from ...ops import mechanisms
from ...train import settings
from ...train.settings import Check
from ..classify.settings import ClassifySettings

STAGES = ("layers", "whole")
OWN = """How a linearized network is made and taught; images are shown as classification shows them.

    Attributes:
        teacher: Folder of the run, or file of weights, of the softmax network. Read while the student learns.
        stage: "layers": each swapped layer learns to answer as the one it replaced, on the teacher's inputs, and
            nothing else changes. "whole": the network learns to say what its teacher says, with all its weights.
        mechanism: What softmax is swapped for.
        feature_map: "own", "learned" or "hedgehog", as `Choices` has them.
        gain: Whether each head learns a factor of what it adds to the mean value.
        norm: Whether each head learns to normalise its answer.
        convolution: Side of a depthwise convolution of the values, added; 0 for none.
        bias: What becomes of a bias of position: "position", "leave" or "drop".
        keep_every: One layer in so many stays softmax, the last of each; 0 for none.
        logit_weight: What divergence from the teacher's distribution counts in stage "whole".
        hidden_weight: What the relative error of the final features counts.
        label_weight: What cross entropy with the labels counts.
        temperature: Of both distributions.
"""


@dataclass(frozen=True)
class DistilSettings(ClassifySettings):
    """Replaced below, by what all its fields are."""

    teacher: str | None = None
    stage: str = "whole"
    mechanism: str = "mala"
    feature_map: str = "own"
    gain: bool = False
    norm: bool = False
    convolution: int = 0
    bias: str = "position"
    keep_every: int = 0
    logit_weight: float = 1.0
    hidden_weight: float = 1.0
    label_weight: float = 0.0
    temperature: float = 1.0

    checks: ClassVar[Mapping[str, Check]] = {
        **ClassifySettings.checks,
        "teacher": settings.text(optional=True),
        "stage": settings.one_of(STAGES),
        "mechanism": settings.one_of(tuple(name for name, rule in mechanisms().items() if rule.gain is not None)),
        "feature_map": settings.one_of(get_args(FeatureMap)),
        "gain": settings.truth(),
        "norm": settings.truth(),
        "convolution": settings.whole(0),
        "bias": settings.one_of(get_args(Bias)),
        "keep_every": settings.whole(0),
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
            convolution=self.convolution,
            bias=self.bias,  # pyright: ignore[reportArgumentType]
        )


DistilSettings.__doc__ = OWN + (ClassifySettings.__doc__ or "").partition("    Attributes:\n")[2].partition("\n\n")[0]

"""What the user chooses of a linearized network: the mechanism, and what is learned or kept beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from .. import ops

FeatureMap = Literal["own", "learned", "hedgehog"]
Bias = Literal["position", "leave", "drop"]
WIDEST_WINDOW = 2**16


@dataclass(frozen=True)
class Choices:
    """How the swapped layers compute. All of it can be written as JSON.

    Attributes:
        mechanism: A registered name with a state, or "none", which needs a window: the window then stands alone.
        feature_map: "own" is the mechanism's. "learned" puts a matrix per head before it, which begins as the identity.
            "hedgehog" takes the softmax over the channels of such a matrix's answer and of its negative
            (arXiv 2402.04347) in place of the mechanism's map, and keeps its gain.
        gain: Whether each head learns a factor of what it adds to the mean value; it begins as one.
        norm: Whether each head learns how far its answer is brought to length one; it begins as not at all.
        window: How many of the latest tokens, its own among them, a query sees by softmax; where attention is not
            causal, as many of those after it. Tokens have to lie in a line, not on a grid.
        sinks: How many of the first tokens stay in sight of that softmax. Needs a window.
        convolution: Side of a depthwise convolution of the values, added to the answer; odd, 0 for none. It begins as
            zeros. In causal layers it sees a value and those before it, so many in all.
        bias: What becomes of a bias of position, which no state can hold: "position" keeps it as attention by position
            alone, of size N x N; "leave" leaves such layers as they are; "drop" takes it away.

    Example:
        >>> from affinear.linearizing import Choices
        >>> Choices(window=64, sinks=4).mechanism
        'mala'
    """

    mechanism: str = "mala"
    feature_map: FeatureMap = "own"
    gain: bool = False
    norm: bool = False
    window: int = 0
    sinks: int = 0
    convolution: int = 0
    bias: Bias = "position"

    def __post_init__(self) -> None:
        if self.mechanism != "none":
            rule = ops.find(self.mechanism)
            if rule.gain is None:
                raise ValueError(
                    f"mechanism: expected one that is linear, got {self.mechanism!r}; "
                    "to keep some layers as they are, name the others in layers="
                )
        elif not self.window:
            raise ValueError('mechanism: expected a window where it is "none", as nothing else would be left')
        for name, kinds in (("feature_map", FeatureMap), ("bias", Bias)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(f"{name}: expected one of {', '.join(get_args(kinds))}, got {getattr(self, name)!r}")
        for name in ("window", "sinks", "convolution"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= WIDEST_WINDOW:
                raise ValueError(f"{name}: expected a whole number from 0 to {WIDEST_WINDOW}, got {value!r}")
        for name in ("gain", "norm"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected true or false, got {getattr(self, name)!r}")
        if self.sinks and not self.window:
            raise ValueError(f"sinks: expected a window beside {self.sinks} sinks, got none")
        if self.convolution and not self.convolution % 2:
            raise ValueError(f"convolution: expected an odd side, got {self.convolution}")

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Choices:
        """What `as_dict` gave, checked.

        Raises:
            ValueError: If a field is not known or its value is none it can have.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"choices: expected {', '.join(known)}, got {name!r}")
        if not isinstance(given.get("mechanism", "mala"), str):
            raise ValueError(f"mechanism: expected a name, got {type(given['mechanism']).__name__}")
        return cls(**given)

"""Which mechanisms the kernels know: those made of the library's own feature maps and gains."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F

from ..mechanisms import (
    Mechanism,
    elu_plus_one,
    focused,
    identity,
    nala_cosine_key,
    nala_cosine_query,
    nala_key,
    nala_query,
    one,
    one_plus_reciprocal,
    reciprocal,
    released_mala_mean,
    released_nala_mean,
    released_one_plus_reciprocal,
    released_reciprocal,
)

_MAPS = {
    (identity, identity): "identity",
    (elu_plus_one, elu_plus_one): "elu",
    (F.relu, F.relu): "relu",
    (focused, focused): "focused",
    (nala_query, nala_key): "nala",
    (nala_cosine_query, nala_cosine_key): "nala_cosine",
}
_GAINS = {
    (one, None): ("one", False),
    (reciprocal, None): ("reciprocal", False),
    (one_plus_reciprocal, None): ("one_plus_reciprocal", False),
    (released_reciprocal, released_nala_mean): ("reciprocal", True),
    (released_one_plus_reciprocal, released_mala_mean): ("one_plus_reciprocal", True),
}


@dataclass(frozen=True)
class Rule:
    """A mechanism as the kernels are compiled for it.

    Attributes:
        map: Name of the feature map: "identity", "elu", "relu", "focused", "nala" or "nala_cosine".
        gain: "one", "reciprocal" or "one_plus_reciprocal".
        released: Whether the mean value is weighed as the released networks do.
    """

    map: str
    gain: str
    released: bool

    @property
    def blocks(self) -> int:
        """Features per channel."""
        return 2 if self.map in ("nala", "nala_cosine") else 1


def rule_of(mechanism: Mechanism) -> Rule | None:
    """The kernels' name for a mechanism, or None where they do not know it."""
    feature_map = _MAPS.get((mechanism.query_map, mechanism.key_map))
    gain = _GAINS.get((mechanism.gain, mechanism.mean_weight))
    return None if feature_map is None or gain is None else Rule(feature_map, *gain)

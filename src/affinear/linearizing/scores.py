"""What layers of transformers do to their scores beyond a scale: biases, caps, sinks, choices of keys.

Such things reach an attention function as arguments of their own, each under one name in all of transformers. Which of
them a layer passes only its source tells.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn

BIAS, CAP = "position_bias", "softcap"
IMPOSSIBLE = {
    "s_aux": "its softmax has a sink of its own beside the keys, which takes weight away from all of them",
    "indices": "it chooses keys for each query, and is linear in tokens as it is",
    "block_indices": "it chooses keys for each query, and is linear in tokens as it is",
}
EXTRAS = (BIAS, CAP, *IMPOSSIBLE)


@cache
def _source(kind: type[nn.Module]) -> str:
    try:
        return inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return ""


def uses_interface(kind: type[nn.Module]) -> bool:
    """Whether a class attends through transformers' interface."""
    return "ALL_ATTENTION_FUNCTIONS" in _source(kind)


def asks_more_than_once(kind: type[nn.Module]) -> bool:
    """Whether a class attends several times for the same tokens."""
    return _source(kind).count("attention_interface(") > 1


def computes_softmax(kind: type[nn.Module]) -> bool:
    """Whether a class without the interface computes an attention itself, and is no shell around another."""
    if "Attention" not in kind.__name__:
        return False
    own = [base for base in kind.__mro__ if base.__module__.startswith("transformers.")]
    try:
        sources = "".join(inspect.getsource(base) for base in own).lower()
    except (OSError, TypeError):
        return False
    return any(name in sources for name in ("softmax", "scaled_dot_product_attention", "multi_head_attention_forward"))


def _passes(kind: type[nn.Module], name: str) -> bool:
    """Whether a class hands an argument of that name to the attention function."""
    return re.search(rf"\b{name}=", _source(kind)) is not None


def impossible(module: nn.Module) -> str:
    """Why the scores of a layer cannot be linear's; empty where they can."""
    return next((reason for name, reason in IMPOSSIBLE.items() if _passes(type(module), name)), "")


def slides(module: nn.Module) -> bool:
    """Whether a layer sees a sliding window of tokens."""
    width = getattr(module, "sliding_window", None)
    if width is None and 'sliding_window=getattr(self.config, "sliding_window"' in _source(type(module)):
        width = getattr(getattr(module, "config", None), "sliding_window", None)
    return width is not None and bool(getattr(module, "is_sliding", True))


def is_chunked(module: nn.Module) -> bool:
    """Whether a layer sees the tokens of a chunk alone, as some of Llama 4's do."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    place = getattr(module, "layer_idx", None)
    return isinstance(kinds, list | tuple) and isinstance(place, int) and kinds[place] == "chunked_attention"


def is_biased(module: nn.Module) -> bool:
    """Whether a layer adds a bias of position to its scores."""
    return _passes(type(module), BIAS) or _bias_is_mask(module)


def _bias_is_mask(module: nn.Module) -> bool:
    """BEiT's way: the bias comes in the mask's place."""
    config = getattr(module, "config", None)
    names = ("use_relative_position_bias", "use_shared_relative_position_bias")
    return any(bool(getattr(config, name, False)) for name in names)


def cap_of(module: nn.Module) -> float | None:
    """What a layer's scores cannot exceed; None where there is no such thing."""
    cap = getattr(module, "attn_logit_softcapping", None)
    return cap if _passes(type(module), CAP) and isinstance(cap, float) else None


def bias_of(module: nn.Module, mask: Tensor | None, given: Mapping[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """The bias of position, (1 or B, H, N, M) or None, and the mask without it."""
    if mask is not None and mask.ndim == 4 and mask.is_floating_point() and _bias_is_mask(module):
        return mask, None
    return given.get(BIAS), mask

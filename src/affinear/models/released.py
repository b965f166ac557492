"""The released networks: built from their configurations, filled from their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ._names import misfits, translate
from .inline_cswin import InLineCSwin
from .inline_deit import InLineDeiT
from .inline_pvt import InLinePVT
from .inline_swin import InLineSwin
from .mavit import MAViT
from .mila import MILA
from .nalaformer import NaLaFormer
from .ravlt import RAVLT
from .rmt import RMT
from .secvit import SECViT

FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "mavit": MAViT,
    "nalaformer": NaLaFormer,
    "inline_deit": InLineDeiT,
    "inline_pvt": InLinePVT,
    "inline_swin": InLineSwin,
    "inline_cswin": InLineCSwin,
    "ravlt": RAVLT,
    "mila": MILA,
    "rmt": RMT,
    "secvit": SECViT,
}
# What the released code asks for and ours does not need: the windows of CSwin's linear blocks, which it can only run as
# large as the map, and the one size of images that MILA takes there.
IGNORED = {"inline_cswin": {"linear_split_size"}, "mila": {"img_size"}}


def build(family: str, config: Mapping[str, Any]) -> nn.Module:
    """A network of a released family from a configuration in the released code's terms.

    Args:
        family: "mavit", "nalaformer", "inline_deit", "inline_pvt", "inline_swin", "inline_cswin", "ravlt", "mila",
            "rmt" or "secvit".
        config: Arguments of the family's class in `affinear.models`.

    Example:
        >>> from affinear.models import released
        >>> sizes = {"embed_dims": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 3, 4]}
        >>> model = released.build("mavit", {**sizes, "projection": 24, "stage_types": "llvv"})
        >>> model.num_features
        32
    """
    if family not in FAMILIES:
        raise ValueError(f"family: expected one of {', '.join(FAMILIES)}, got {family!r}")
    ignored = IGNORED.get(family, set())
    return FAMILIES[family](**{name: value for name, value in config.items() if name not in ignored})


def load(model: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Read weights under the released names, or our own, into a network; all of them or none.

    Raises:
        ValueError: If names or shapes do not fit; it lists every one, and the network stays as it was.
    """
    own = model.state_dict()
    try:
        given = translate(state_dict, model)
    except (RuntimeError, IndexError, ValueError) as error:  # shapes that no release has
        said = str(error).partition("\n")[0]
        raise ValueError(f"state_dict: does not fit {type(model).__name__}: {said}") from None
    wrong = misfits(own, given)
    if wrong:
        raise ValueError(
            f"state_dict: {len(wrong)} of its tensors do not fit {type(model).__name__}; is it of another variant or "
            "number of classes?\n  " + "\n  ".join(wrong)
        )
    model.load_state_dict(given)

"""Released segmenters, read into ours: from the names of mmsegmentation to those of `Segmenter`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .._names import Rule, misfits, rename, translate
from .segmenter import Segmenter

BACKBONE = "backbone."
# A convolution, and the norm behind it, stand in a module of their own there as here.
NORM: tuple[Rule, ...] = ((r"\.bn\.", ".norm."),)
SEMANTIC_FPN: tuple[Rule, ...] = (
    (r"^neck\.lateral_convs\.(\d)\.conv\.", r"head.neck.lateral.\1."),
    (r"^neck\.fpn_convs\.(\d)\.conv\.", r"head.neck.output.\1."),
    (r"^decode_head\.scale_heads\.", "head.levels."),
    (r"^decode_head\.conv_seg\.", "head.classifier.conv."),
    *NORM,
)
UPERNET: tuple[Rule, ...] = (
    (r"^decode_head\.psp_modules\.(\d)\.1\.", r"head.pooling.pools.\1.1."),
    (r"^decode_head\.bottleneck\.", "head.pooling.join."),
    (r"^decode_head\.lateral_convs\.", "head.lateral."),
    (r"^decode_head\.fpn_convs\.", "head.output."),
    (r"^decode_head\.fpn_bottleneck\.", "head.join."),
    (r"^decode_head\.conv_seg\.", "head.classifier.conv."),
    (r"^auxiliary_head\.convs\.0\.", "helper.conv."),
    (r"^auxiliary_head\.conv_seg\.", "helper.classifier.conv."),
    *NORM,
)
RULES = {"semantic_fpn": SEMANTIC_FPN, "upernet": UPERNET}


def head_of(tensors: Mapping[str, Tensor]) -> str | None:
    """The head of a released segmenter, by the names of its weights; None if it is no segmenter."""
    if any(name.startswith("decode_head.psp_modules.") for name in tensors):
        return "upernet"
    return "semantic_fpn" if any(name.startswith("decode_head.scale_heads.") for name in tensors) else None


def read(tensors: Mapping[str, Tensor], model: str, model_args: Mapping[str, Any] | None = None) -> Segmenter:
    """A released segmenter over a backbone of ours.

    Args:
        tensors: Under the names of mmsegmentation: backbone, neck, decode_head, auxiliary_head.
        model: The backbone's name, such as "mavit_tiny".
        model_args: Its arguments, where they are not the released ones.

    Returns:
        The segmenter in evaluation mode, of as many classes as the weights. It does not mask padding, as it was trained
        without.

    Raises:
        ValueError: If it is no segmenter, or a tensor is missing, unexpected or of another shape; each is named.
    """
    head, last = head_of(tensors), tensors.get("decode_head.conv_seg.weight")
    if head is None or last is None:
        raise ValueError(
            "checkpoint: expected a segmenter with SemanticFPN or UperNet in mmsegmentation's names, which begin with "
            f"backbone. and decode_head., got {', '.join(list(tensors)[:3])} ..."
        )
    args = dict(model_args or {})
    network = Segmenter(model, head, num_classes=last.shape[0], masked=False, norms=True, model_args=args)
    load(network, tensors, head)
    return network.eval()


def load(network: Segmenter, tensors: Mapping[str, Tensor], head: str) -> None:
    """Read weights under mmsegmentation's names into a segmenter; all of them or none.

    Raises:
        ValueError: If names or shapes do not fit; it lists every one, and the segmenter stays as it was.
    """
    own, given = network.state_dict(), translated(network, tensors, head)
    wrong = misfits(own, given)
    if wrong:
        raise ValueError(
            f"checkpoint: {len(wrong)} of its tensors do not fit {network.backbone.name} under {head}; is it of "
            "another backbone?\n  " + "\n  ".join(wrong)
        )
    network.load_state_dict(given)


def translated(network: Segmenter, tensors: Mapping[str, Tensor], head: str) -> dict[str, Tensor]:
    """The weights under our names; those that no rule knows keep theirs, for the caller to complain about."""
    body: Any = network.backbone.body
    inner = {
        name.removeprefix(BACKBONE): tensor
        for name, tensor in tensors.items()
        if name.startswith(BACKBONE) and not name.startswith("backbone.extra_norms.")
    }
    out = {f"backbone.body.model.{name}": tensor for name, tensor in translate(inner, body.model).items()}
    for name, tensor in tensors.items():
        if name.startswith("backbone.extra_norms."):
            out[name.replace("backbone.extra_norms.", "backbone.norms.").replace(".norm.", ".")] = tensor
        elif not name.startswith(BACKBONE):
            found = rename(name, RULES[head])
            if found is not None:
                out[found] = tensor
    return out

"""Released detectors, read into ours: from the names and the order of classes of mmdetection to torchvision's.

What differs beside names: mmdetection counts background as the last class of a region, torchvision as class 0, and only
torchvision has boxes and masks for it, which nobody asks for. Numbers of boxes and the order of anchors are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._names import Rule, misfits, rename, translate
from .detector import Detector
from .settings import DetectorSettings, Kind

BACKBONE = "backbone."
NORMS = "backbone.extra_norms."

_NECK: tuple[Rule, ...] = (
    (r"^neck\.lateral_convs\.(\d)\.conv\.", r"neck.inner_blocks.\1.0."),
    (r"^neck\.fpn_convs\.(\d)\.conv\.", r"neck.layer_blocks.\1.0."),
)
_PROPOSALS: tuple[Rule, ...] = (
    (r"^rpn_head\.rpn_conv\.", "regions.rpn.head.conv.0.0."),
    (r"^rpn_head\.rpn_cls\.", "regions.rpn.head.cls_logits."),
    (r"^rpn_head\.rpn_reg\.", "regions.rpn.head.bbox_pred."),
)
# Of one stage; {} stands for what leads to it.
_STAGE: tuple[tuple[str, str], ...] = (
    (r"shared_fcs\.0\.", "box_head.fc6."),
    (r"shared_fcs\.1\.", "box_head.fc7."),
    (r"fc_cls\.", "box_predictor.cls_score."),
    (r"fc_reg\.", "box_predictor.bbox_pred."),
)
_CONV_STAGE: tuple[tuple[str, str], ...] = (
    (r"shared_convs\.(\d)\.conv\.", r"box_head.\g<1>.0."),
    (r"shared_convs\.(\d)\.bn\.", r"box_head.\g<1>.1."),
    (r"shared_fcs\.0\.", "box_head.5."),
    *_STAGE[2:],
)
_MASK_STAGE: tuple[tuple[str, str], ...] = (
    (r"convs\.(\d)\.conv\.", r"mask_head.\g<1>.0."),
    (r"upsample\.", "mask_predictor.conv5_mask."),
    (r"conv_logits\.", "mask_predictor.mask_fcn_logits."),
)
_DENSE: tuple[Rule, ...] = (
    (r"^neck\.layer_blocks\.3\.0\.", "neck.p6."),
    (r"^neck\.layer_blocks\.4\.0\.", "neck.p7."),
    (r"^bbox_head\.cls_convs\.(\d)\.conv\.", r"dense.head.classification_head.conv.\1.0."),
    (r"^bbox_head\.reg_convs\.(\d)\.conv\.", r"dense.head.regression_head.conv.\1.0."),
    (r"^bbox_head\.retina_cls\.", "dense.head.classification_head.cls_logits."),
    (r"^bbox_head\.retina_reg\.", "dense.head.regression_head.bbox_reg."),
)


def kind_of(tensors: Mapping[str, Tensor]) -> Kind | None:
    """The kind of a released detector, by the names of its weights; None if it is none."""
    if "bbox_head.retina_cls.weight" in tensors:
        return "retinanet"
    if "rpn_head.rpn_conv.weight" not in tensors:
        return None
    masks = any(name.startswith("roi_head.mask_head.") for name in tensors)
    if "roi_head.bbox_head.0.fc_cls.weight" in tensors:
        return "cascade_mask_rcnn" if masks else "cascade_rcnn"
    return "mask_rcnn" if masks else "faster_rcnn"


def read(tensors: Mapping[str, Tensor], model: str, model_args: Mapping[str, Any] | None = None) -> Detector:
    """A released detector over a backbone of ours.

    Args:
        tensors: Under the names of mmdetection: backbone, neck, rpn_head, roi_head or bbox_head.
        model: The backbone's name, such as "mavit_tiny".
        model_args: Its arguments, where they are not the released ones.

    Returns:
        The detector in evaluation mode, of as many classes as the weights. It does not mask padding, as it was trained
        without.

    Raises:
        ValueError: If it is no detector, or a tensor is missing, unexpected or of another shape; each is named.
    """
    kind = kind_of(tensors)
    if kind is None:
        raise ValueError(
            "checkpoint: expected a detector in mmdetection's names, which begin with backbone., neck., rpn_head., "
            f"roi_head. or bbox_head., got {', '.join(list(tensors)[:3])} ..."
        )
    network = Detector(model, _classes(tensors, kind), settings_of(tensors, kind), model_args)
    load(network, tensors)
    return network.eval()


def settings_of(tensors: Mapping[str, Tensor], kind: Kind) -> DetectorSettings:
    """What the released detectors are made with, as far as names and shapes tell; the rest is MALA's configuration."""
    given: dict[str, Any] = {"norm": "none", "masked": False, "sampling": 0, "relu_between": False}
    if kind.startswith("cascade"):
        last = tensors["roi_head.bbox_head.0.fc_reg.weight"]
        given["class_aware"] = last.shape[0] != 4
        if "roi_head.bbox_head.0.shared_convs.0.conv.weight" in tensors:
            normed = "roi_head.bbox_head.0.shared_convs.0.bn.weight" in tensors
            given |= {"box_head": "4conv1fc", "box_norm": "batch" if normed else "none", "box_loss": "giou"}
    return DetectorSettings(kind, **given)


def load(network: Detector, tensors: Mapping[str, Tensor]) -> None:
    """Read weights under mmdetection's names into a detector; all of them or none.

    Raises:
        ValueError: If names or shapes do not fit; it lists every one, and the detector stays as it was.
    """
    own, given = network.state_dict(), translated(network, tensors)
    wrong = misfits(own, given)
    if wrong:
        raise ValueError(
            f"checkpoint: {len(wrong)} of its tensors do not fit {network.backbone.features.name} under "
            f"{network.settings.kind}; is it of another backbone?\n  " + "\n  ".join(wrong)
        )
    network.load_state_dict(given)


def translated(network: Detector, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under our names and in our order; those that no rule knows keep their names, to be complained of."""
    top = "dense." if network.dense is not None else "regions."
    body: Any = network.backbone.features.body
    inner = {
        name.removeprefix(BACKBONE): tensor
        for name, tensor in tensors.items()
        if name.startswith(BACKBONE) and not name.startswith(NORMS)
    }
    trunk = f"{top}backbone.features."
    out = {f"{trunk}body.model.{name}": tensor for name, tensor in translate(inner, body.model).items()}
    first = len(tensors_of(tensors, NORMS)) - len(network.backbone.features.channels)  # RetinaNet leaves the finest out
    for name, tensor in tensors_of(tensors, NORMS).items():
        for part in ("weight", "bias"):
            number = int(name) - first
            if number >= 0:
                out[f"{trunk}norms.{number}.{part}"] = tensor[part]
    rules = _rules(network)
    for name, tensor in tensors.items():
        found = None if name.startswith(BACKBONE) else rename(name, rules)
        if found is not None:
            found = f"{top}backbone.{found}" if found.startswith("neck.") else found
            out[found] = _with_background(found, tensor, network)
    return out


def tensors_of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, dict[str, Tensor]]:
    """Weight and bias of norms by their number, of names such as "backbone.extra_norms.0.norm.weight"."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            number, _, part = name.removeprefix(prefix).partition(".norm.")
            found.setdefault(number, {})[part] = tensor
    return found


def _rules(network: Detector) -> tuple[Rule, ...]:
    settings = network.settings
    if settings.kind == "retinanet":
        return (*_NECK, *_DENSE)
    stage = _CONV_STAGE if settings.box_head == "4conv1fc" else _STAGE
    here: str
    if settings.cascade:
        numbered, here = r"(?P<stage>\d)\.", r"regions.roi_heads.stages.\g<stage>."
    else:
        numbered, here = "", "regions.roi_heads."
    rules: list[Rule] = [*_NECK, *_PROPOSALS]
    for part, names in (("bbox_head", stage), ("mask_head", _MASK_STAGE)):
        for old, new in names:
            # The stage is a group before those of the name.
            shifted = new.replace(r"\g<1>", r"\g<2>") if settings.cascade else new
            rules.append((rf"^roi_head\.{part}\.{numbered}{old}", here + shifted))
    return tuple(rules)


def _with_background(name: str, tensor: Tensor, network: Detector) -> Tensor:
    """Rows of a region's last layers as torchvision has them: background first."""
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "box_predictor.cls_score": lambda rows: rows.roll(1, dims=0),
        "mask_predictor.mask_fcn_logits": lambda rows: _behind(rows, 1),
    }
    if network.settings.aware:
        changes["box_predictor.bbox_pred"] = lambda rows: _behind(rows, 4)
    change = next((change for part, change in changes.items() if f"{part}." in name), None)
    return tensor if change is None else change(tensor)


def _behind(rows: Tensor, count: int) -> Tensor:
    """Rows behind so many of zeros."""
    return torch.cat((rows.new_zeros(count, *rows.shape[1:]), rows))


def _classes(tensors: Mapping[str, Tensor], kind: Kind) -> int:
    if kind == "retinanet":
        boxes = tensors["bbox_head.retina_reg.weight"].shape[0] // 4
        return tensors["bbox_head.retina_cls.weight"].shape[0] // boxes
    stage = "0." if kind.startswith("cascade") else ""
    return tensors[f"roi_head.bbox_head.{stage}fc_cls.weight"].shape[0] - 1

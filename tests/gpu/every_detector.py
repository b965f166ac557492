"""Let small Mask R-CNNs learn from a batch of mixed sizes and look at another, backbone after backbone.

For tools that watch a whole process, such as compute-sanitizer; backbones may be named as arguments. Stages have one
block each, and the widths that the networks of their names have, as kernels differ by width and not by depth.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from affinear.models.detectors import Detector, DetectorSettings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = ((72, 104), (64, 64), (40, 88))  # maps of odd sides, and padding beside two of them
SHORT: dict[str, Any] = {"depths": (1, 1, 1, 1)}
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("mavit_tiny", {**SHORT, "mechanism": "softmax", "stage_types": "llll"}),
    "linear": ("mavit_tiny", {**SHORT, "mechanism": "linear", "stage_types": "llll"}),
    "mala": ("mavit_tiny", {**SHORT, "stage_types": "llll"}),
    "none": ("mavit_tiny", {**SHORT, "mechanism": "none", "stage_types": "llll"}),
    "swin": ("swin_tiny_patch4_window7_224", SHORT),
    "resnet": ("resnet18", {}),
}


def targets(height: int, width: int, count: int) -> dict[str, torch.Tensor]:
    """Objects at random places of an image, each with its mask."""
    low = torch.rand(count, 2) * torch.tensor((width - 12, height - 12))
    boxes = torch.cat((low, low + 4 + 8 * torch.rand(count, 2)), dim=1)
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.long().tolist(), strict=True):
        mask[top : bottom + 1, left : right + 1] = 1
    told = {"boxes": boxes, "labels": torch.zeros(count, dtype=torch.int64), "masks": masks}
    return {name: value.to(DEVICE) for name, value in told.items()}


def run(backbone: str, model_args: dict[str, Any]) -> float:
    """One step and one look; give the loss."""
    few: dict[str, Any] = {"rois": 16, "proposals": (100, 100), "detections": 10, "channels": 64}
    settings = DetectorSettings("mask_rcnn", min_size=0, anchor_sizes=(8, 16, 32, 64, 96), **few)
    network = Detector(backbone, 1, settings, model_args)
    network.to(DEVICE, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    images = [torch.rand(3, *size, device=DEVICE) for size in SIZES]
    learned = [targets(*size, count) for size, count in zip(SIZES, (5, 0, 2), strict=True)]
    with torch.autocast(DEVICE, torch.bfloat16):
        losses: dict[str, torch.Tensor] = network.train()(images, learned)
    loss = torch.stack([one.float() for one in losses.values()]).sum()
    loss.backward()
    with torch.inference_mode(), torch.autocast(DEVICE, torch.bfloat16):
        network.eval()(images)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return loss.item()


def main(names: list[str]) -> None:
    """All backbones, or those that are named; a line for each that went through."""
    for name in names or BACKBONES:
        torch.manual_seed(0)
        begun = time.monotonic()
        loss = run(*BACKBONES[name])
        print(json.dumps({"ran": name, "loss": loss, "seconds": time.monotonic() - begun}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])

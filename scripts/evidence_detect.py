"""The evidence of detection: nuclei and blood cells from random weights, on one GPU, within a given time.

    PYTHONPATH=src python scripts/evidence_detect.py --data DATA --out detect --minutes 7

trains every cell that is not there yet, several at a time on one GPU, the first seed of all before the second of any,
and writes `cells/NAME.json` as each is done; when the time is over nothing new is begun, and the same command goes on.
`--part table` prints what came out. It needs torch, torchvision, timm, accelerate, safetensors and numpy.

Nuclei: crops of 256 x 256 at their own scale, so that no batch has padding, Mask R-CNN and Cascade Mask R-CNN, judged
on whole images of the validation half with at most 400 detections an image. Blood cells: RetinaNet on whole images,
zoomed and mirrored, learned from the training and the validation half (nothing is chosen by it), judged on the test
half.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from affinear.models.detectors import Detector, DetectorSettings
from affinear.tasks.detect.coco import Half
from affinear.tasks.detect.finding import found_of
from affinear.tasks.detect.opening import Reading, open_coco
from affinear.tasks.detect.precision import match, summarize

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "mavit_tiny": ("mavit_tiny", {}),
    "mavit_tiny_linear": ("mavit_tiny_linear", {}),
    "softmax": ("mavit_tiny", {"mechanism": "softmax", "stage_types": "llll"}),
    "linear": ("mavit_tiny", {"mechanism": "linear", "stage_types": "llll"}),
    "none": ("mavit_tiny", {"mechanism": "none", "stage_types": "llll"}),
    "swin_tiny": ("swin_tiny_patch4_window7_224", {}),
    "resnet50": ("resnet50", {}),
}
SMALL_ANCHORS = (8.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True)
class Plan:
    """How a data set is learned and judged.

    Attributes:
        data: Its folder.
        kinds: Detectors.
        arms: Backbones.
        settings: Of the detectors.
        crop: Height and width of a training crop; None for whole images, zoomed.
        batch: Images of a step.
        steps: In all.
        lr: Peak of the learning rate.
        cap: Detections of an image.
        judged: The split.
        extra: Splits that are learned from beside the training half.
    """

    data: str
    kinds: tuple[str, ...]
    arms: tuple[str, ...]
    settings: dict[str, Any]
    crop: tuple[int, int] | None
    batch: int
    steps: int
    lr: float
    cap: int
    judged: str
    extra: tuple[str, ...] = ()


PLANS = {
    "bccd": Plan(
        "bccd",
        ("retinanet",),
        ("mavit_tiny",),
        {"anchor_sizes": (24.0, 48.0, 96.0, 192.0, 384.0)},
        None,
        8,
        1200,
        6e-4,
        100,
        "test",
        ("val",),
    ),
    "nuclei": Plan(
        "nuclei",
        ("mask_rcnn", "cascade_mask_rcnn"),
        tuple(ARMS),
        {"anchor_sizes": SMALL_ANCHORS, "rois": 256, "proposals": (1000, 1000)},
        (256, 256),
        16,
        400,
        8e-4,
        400,
        "val",
    ),
}


@dataclass(frozen=True)
class Cell:
    """One network to be trained."""

    plan: str
    kind: str
    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.plan}-{self.kind}-{self.arm}-{self.seed}"


# ------------------------------------------------------------------------------------------------ data


def pack(half: Half, masks: bool) -> list[dict[str, Tensor]]:
    """Images as bytes, boxes, labels, and masks as one map of numbers, 0 for none."""
    assert half.stored is not None
    rows: list[dict[str, Tensor]] = []
    for pixels, objects, size in zip(half.stored, half.objects, half.sizes, strict=True):
        single = objects.some(np.flatnonzero(~objects.crowd))
        row = {
            "image": torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))),
            "boxes": torch.from_numpy(single.boxes).float(),
            "labels": torch.from_numpy(single.labels),
        }
        if masks:
            numbers = np.zeros(size, np.int16)
            for i, mask in enumerate(single.truth(size, masks=True).masks or ()):
                numbers[mask.mask()] = i + 1
            row["numbers"] = torch.from_numpy(numbers)
        rows.append(row)
    return rows


def prepare(plan: Plan, folder: Path, cache: Path) -> None:
    """Decode everything once, for all processes."""
    if cache.is_file():
        return
    begun = time.monotonic()
    reading = Reading(memory=True)
    first = open_coco(str(folder / plan.data), test_split=plan.judged, reading=reading)
    train = pack(first.train, first.masks)
    for split in plan.extra:
        train += pack(open_coco(str(folder / plan.data), test_split=split, reading=reading).test, first.masks)
    partial = cache.with_suffix(".part")
    torch.save({"train": train, "names": first.class_names, "masks": first.masks}, partial)
    partial.rename(cache)
    print(f"{plan.data}: {len(train)} images to learn from, decoded in {time.monotonic() - begun:.0f} s", flush=True)


def cut(row: dict[str, Tensor], plan: Plan, random: np.random.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """A crop of an image, mirrored, its light changed; or the whole image, zoomed into."""
    image, boxes = row["image"], row["boxes"]
    height, width = image.shape[-2:]
    zoom = 1.0 if plan.crop is not None else float(random.uniform(0.6, 1.0))
    rows, columns = plan.crop or (round(height * zoom), round(width * zoom))
    top, left = int(random.integers(height - rows + 1)), int(random.integers(width - columns + 1))
    numbers = row.get("numbers")
    image = image[:, top : top + rows, left : left + columns].float() / 255
    boxes = (boxes - boxes.new_tensor((left, top, left, top))).clamp(min=0)
    boxes = torch.minimum(boxes, boxes.new_tensor((columns, rows, columns, rows)))
    inside = (boxes[:, 2:] - boxes[:, :2]).amin(1) >= 2
    if plan.crop is None:
        image = F.interpolate(image[None], size=(height, width), mode="bilinear", antialias=True)[0]
        boxes = boxes * boxes.new_tensor((width / columns, height / rows, width / columns, height / rows))
    gain = torch.tensor(random.uniform(0.8, 1.25, (3, 1, 1)), device=image.device, dtype=image.dtype)
    image = (image * gain + float(random.uniform(-0.1, 0.1))).clamp(0, 1)
    masks = None
    if numbers is not None:
        part = numbers[top : top + rows, left : left + columns]
        ids = torch.arange(1, len(boxes) + 1, device=part.device, dtype=part.dtype)[inside]
        masks = (part == ids[:, None, None]).to(torch.uint8)
    boxes, labels = boxes[inside], row["labels"][inside]
    for axis in (1, 2):
        if random.random() < 0.5:
            side = image.shape[axis]
            image = image.flip(axis)
            low, high = (1, 3) if axis == 1 else (0, 2)
            boxes = boxes.clone()
            boxes[:, low], boxes[:, high] = side - boxes[:, high].clone(), side - boxes[:, low].clone()
            masks = None if masks is None else masks.flip(axis)
    target = {"boxes": boxes, "labels": labels}
    if masks is not None:
        seen = masks.bool().flatten(1).any(1)  # a box may reach into the crop where its object does not
        target = {"boxes": boxes[seen], "labels": labels[seen], "masks": masks[seen]}
    return image, target


# ------------------------------------------------------------------------------------------------ one cell


def run(cell: Cell, plan: Plan, given: argparse.Namespace) -> None:
    """Train and judge a cell, and write its file."""
    out = given.out / "cells"
    begun = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = False  # the number of regions is another at every step
    torch.set_num_threads(2)
    kept = torch.load(given.out / f"{cell.plan}.pt", weights_only=True, mmap=True)
    rows = [{name: tensor.to(device) for name, tensor in row.items()} for row in kept["train"]]
    torch.manual_seed(cell.seed)
    name, model_args = ARMS[cell.arm]
    made: dict[str, Any] = {**plan.settings, "kind": cell.kind, "min_size": 0, "detections": plan.cap}
    network = Detector(name, len(kept["names"]), DetectorSettings(**made), {**model_args, "drop_path_rate": 0.1})
    network.to(device).train()
    told = learn(network, rows, plan, cell.seed, device)
    told |= judge(network, plan, given.data, device, given.limit)
    told |= {
        "cell": asdict(cell),
        "parameters": sum(one.numel() for one in network.parameters()),
        "wall_s": time.monotonic() - begun,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "plan": asdict(plan),
    }
    partial = out / f"{cell.name}.part"
    partial.write_text(json.dumps(told, indent=1))
    partial.rename(out / f"{cell.name}.json")


def learn(
    network: Detector, rows: list[dict[str, Tensor]], plan: Plan, seed: int, device: torch.device
) -> dict[str, Any]:
    """Train; the weights that are left are the averaged ones."""
    decayed = [one for one in network.parameters() if one.ndim > 1]
    others = [one for one in network.parameters() if one.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.lr, fused=device.type == "cuda")
    every = [one for one in (*network.parameters(), *network.buffers()) if one.is_floating_point()]
    mean = [one.detach().clone() for one in every]
    random, order, losses = np.random.default_rng(seed), list[int](), list[float]()
    warm = max(plan.steps // 12, 1)
    begun = time.monotonic()
    half, half_at = 0.0, 0
    for step in range(plan.steps):
        while len(order) < plan.batch:
            order += random.permutation(len(rows)).tolist()
        picked, order = order[: plan.batch], order[plan.batch :]
        images, targets = zip(*(cut(rows[i], plan, random) for i in picked), strict=True)
        share = min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(step - warm, 0) / max(plan.steps - warm, 1))))
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * share
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = torch.stack([one.float() for one in network(list(images), list(targets)).values()]).sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0, foreach=True)
        optimizer.step()
        with torch.no_grad():
            old = min(0.99, (step + 1) / (step + 10))
            torch._foreach_lerp_(mean, every, 1 - old)  # pyright: ignore[reportPrivateUsage]
        if step % 50 == 49 or step == plan.steps - 1:
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise RuntimeError(f"the loss is {losses[-1]} after {step + 1} steps")
            if not half_at:  # the first steps choose kernels and are not what a step takes
                half, half_at = time.monotonic(), step + 1
    took = time.monotonic()
    with torch.no_grad():
        torch._foreach_copy_(every, mean)  # pyright: ignore[reportPrivateUsage]
    rate = (took - half) / (plan.steps - half_at) if plan.steps > half_at else (took - begun) / plan.steps
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {"losses": losses, "step_s": rate, "train_s": took - begun, "peak_gib": peak}


@torch.no_grad()
def judge(network: Detector, plan: Plan, folder: Path, device: torch.device, limit: int | None) -> dict[str, Any]:
    """Average precision on whole images of the split, images of one size at a time so that none is padded."""
    begun = time.monotonic()
    data = open_coco(str(folder / plan.data), test_split=plan.judged)
    half, masks = data.test, network.settings.masks
    groups: dict[tuple[int, int], list[int]] = {}
    for i, size in enumerate(half.sizes[:limit]):
        groups.setdefault(size, []).append(i)
    kinds: Sequence[Any] = ("box", "mask") if masks else ("box",)
    matches: dict[str, list[Any]] = {kind: [] for kind in kinds}
    network.eval()
    for size, members in groups.items():
        at_once = max(1, 2**20 // (size[0] * size[1]))
        for first in range(0, len(members), at_once):
            some = members[first : first + at_once]
            images = [torch.from_numpy(np.asarray(half[i][0]).transpose(2, 0, 1).copy()).to(device) for i in some]
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                told = network(images)
            for i, one in zip(some, told, strict=True):
                truth, found = half.objects[i].truth(size, masks), found_of(one, size)
                for kind in kinds:
                    matches[kind] += match(i, truth, found, kind, plan.cap)
    out: dict[str, Any] = {"eval_s": time.monotonic() - begun, "images": sum(map(len, groups.values()))}
    for kind in kinds:
        score = asdict(summarize(matches[kind], len(data.class_names), plan.cap))
        out[kind] = {name: value for name, value in score.items() if value == value}
    return out


# ------------------------------------------------------------------------------------------------ all cells


def cells(plans: Sequence[str], seeds: int) -> list[Cell]:
    """All cells, the first seed of every arm before the second of any."""
    return [
        Cell(plan, kind, arm, seed)
        for seed in range(seeds)
        for plan in plans
        for arm in PLANS[plan].arms
        for kind in PLANS[plan].kinds
    ]


def train_all(given: argparse.Namespace, plans: dict[str, Plan]) -> None:
    """Start processes, so many at a time, until all is done or the time is over."""
    folder = given.out / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    for name, plan in plans.items():
        prepare(plan, given.data, given.out / f"{name}.pt")
    left = [cell for cell in cells(list(plans), given.seeds) if not (folder / f"{cell.name}.json").is_file()]
    print(f"{len(left)} cells to train, {given.parallel} at a time", flush=True)
    begun, running = time.monotonic(), dict[Cell, subprocess.Popen[bytes]]()
    total, done, failed = len(left), 0, list[str]()
    while left or running:
        late = time.monotonic() - begun > 60 * given.minutes
        while left and len(running) < given.parallel and not late:
            cell = left.pop(0)
            command = [sys.executable, __file__, *sys.argv[1:], "--cell", cell.name]
            log = (folder / f"{cell.name}.log").open("wb")
            running[cell] = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "2"}
            )
        if late and left:
            print(f"the time is over; {len(left)} cells are left for another call", flush=True)
            left = []
        for cell, process in list(running.items()):
            if process.poll() is None:
                continue
            del running[cell]
            done += 1
            passed = time.monotonic() - begun
            text = f"{done}/{total} after {passed:.0f} s, about {passed / done * (total - done):.0f} s to go:"
            if process.returncode:
                failed.append(cell.name)
                print(text, cell.name, f"FAILED, see {folder / cell.name}.log", flush=True)
            else:
                print(text, line(json.loads((folder / f"{cell.name}.json").read_text())), flush=True)
        time.sleep(0.2)
    if failed:
        print(f"{len(failed)} cells failed: {', '.join(failed)}", flush=True)


def line(told: dict[str, Any]) -> str:
    """A cell in a line."""
    cell = Cell(**told["cell"])
    kinds = [kind for kind in ("box", "mask") if kind in told]
    parts = [f"{kind} AP {100 * told[kind]['ap']:.1f} AP50 {100 * told[kind]['ap50']:.1f}" for kind in kinds]
    speed = f"{1e3 * told['step_s']:.0f} ms a step, {told['peak_gib']:.1f} GiB, judged in {told['eval_s']:.0f} s"
    return f"{cell.name}: {', '.join(parts)}; {speed}"


def table(out: Path) -> None:
    """All cells that are done, by detector and backbone: mean and spread over seeds."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for file in sorted((out / "cells").glob("*.json")):
        told = json.loads(file.read_text())
        cell = told["cell"]
        found.setdefault((cell["plan"], cell["kind"], cell["arm"]), []).append(told)
    print("| data | detector | backbone | seeds | box AP | AP50 | AP75 | mask AP | M params | s/step | GiB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for (plan, kind, arm), rows in found.items():
        cols = [spread([row.get(part, {}).get(name) for row in rows]) for part, name in COLUMNS]
        size, speed, peak = rows[0]["parameters"] / 1e6, rows[0]["step_s"], max(row["peak_gib"] for row in rows)
        print(f"| {plan} | {kind} | {arm} | {len(rows)} | {' | '.join(cols)} | {size:.1f} | {speed:.3f} | {peak:.1f} |")


COLUMNS = (("box", "ap"), ("box", "ap50"), ("box", "ap75"), ("mask", "ap"))


def spread(values: Sequence[float | None]) -> str:
    """Mean and standard deviation in percent."""
    known = [100 * value for value in values if value is not None]
    if not known:
        return ""
    return f"{statistics.mean(known):.1f}" + (f" ± {statistics.stdev(known):.1f}" if len(known) > 1 else "")


def main() -> None:
    """Train, time, or print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of nuclei/ and bccd/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=("train", "table"), default="train")
    parser.add_argument("--only", default="bccd,nuclei")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=7, help="after which nothing new is begun")
    parser.add_argument("--steps", type=int, help="instead of each plan's own; 2 for a trial")
    parser.add_argument("--batch", type=int, help="instead of each plan's own")
    parser.add_argument("--limit", type=int, help="images that are judged at most, for a trial")
    parser.add_argument("--cell", help="one cell, in this process")
    given = parser.parse_args()
    changes = {name: getattr(given, name) for name in ("steps", "batch") if getattr(given, name) is not None}
    plans = {name: Plan(**{**asdict(PLANS[name]), **changes}) for name in given.only.split(",")}
    given.out.mkdir(parents=True, exist_ok=True)
    if given.cell is not None:
        cell = next(one for one in cells(list(plans), given.seeds) if one.name == given.cell)
        run(cell, plans[cell.plan], given)
    elif given.part == "train":
        train_all(given, plans)
        table(given.out)
    else:
        table(given.out)


if __name__ == "__main__":
    main()

"""The evidence of detection: nuclei and blood cells from random weights, on one GPU, within a given time.

    PYTHONPATH=src python evidence/detect.py --data DATA --out detect --minutes 7 --page results/detection
    PYTHONPATH=src python evidence/detect.py --data DATA --out detect --part page --page results/detection

trains every cell that is not there yet, several at a time on one GPU, `mavit_tiny` with every seed, then the first seed
of all others, then the other seeds detector by detector, and writes `cells/NAME.json` as each is done; when the time is
over nothing new is begun, and the same command goes on. Cells that the page of `--page` has are taken from there.
`--part prepare` only decodes the images, which no GPU need wait for; `--part table` prints what came
out, `--part page` writes the page about it. `--steps 2 --limit 2 --only nuclei` is a trial. Where thirteen processes
shared an H200, a step of nuclei took 0.4 to 0.7 s in each of four, with 4 to 8 GB, and judging 10 to 25 s. It needs
torch, torchvision, timm, accelerate, safetensors and numpy.

Nuclei: crops of 256 x 256 at their own scale, so that no batch has padding, Mask R-CNN and Cascade Mask R-CNN, judged
on whole images of the validation half with at most 400 detections an image. Blood cells: RetinaNet on whole images,
zoomed and mirrored, learned from the training and the validation half (nothing is chosen by it), judged on the test
half.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from affinear.models.detectors import Detector, DetectorSettings
from affinear.tasks.detect.coco import Coco, Half
from affinear.tasks.detect.finding import found_of
from affinear.tasks.detect.opening import Reading, open_coco
from affinear.tasks.detect.precision import Truth, match, summarize
from pages.detection import known, name_of, written
from pages.words import percent
from running.cells import Cell, is_worker, serve, work_off
from running.files import keep
from running.options import how_of

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
        {"anchor_sizes": SMALL_ANCHORS, "rois": 128, "proposals": (1000, 1000)},
        (256, 256),
        16,
        200,
        8e-4,
        400,
        "val",
    ),
}


@dataclass(frozen=True)
class Training:
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


@dataclass(frozen=True)
class Cut:
    """A crop of an image, as it lies in memory.

    Attributes:
        image: (3, h, w), bytes.
        size: Height and width it is brought to.
        boxes: (N, 4), in that size.
        labels: (N,).
        numbers: (h, w), the object of each pixel; None where there are no masks.
        ids: (N,), the number of each object there.
        gain: (3, 1, 1), what each colour is multiplied with.
        shift: What is added to all.
    """

    image: NDArray[np.uint8]
    size: tuple[int, int]
    boxes: NDArray[np.float32]
    labels: NDArray[np.int64]
    numbers: NDArray[np.int16] | None
    ids: NDArray[np.int64]
    gain: NDArray[np.float64]
    shift: float


def cut(row: dict[str, Tensor], plan: Plan, random: np.random.Generator) -> Cut:
    """A crop of an image, mirrored, its light to be changed; or the whole image, to be zoomed into."""
    image, boxes, labels = row["image"].numpy(), row["boxes"].numpy(), row["labels"].numpy()
    height, width = image.shape[-2:]
    zoom = 1.0 if plan.crop is not None else float(random.uniform(0.6, 1.0))
    rows, columns = plan.crop or (round(height * zoom), round(width * zoom))
    top, left = int(random.integers(height - rows + 1)), int(random.integers(width - columns + 1))
    image = image[:, top : top + rows, left : left + columns]
    corner, rims = (np.array(pair * 2, np.float32) for pair in ((left, top), (columns, rows)))
    boxes = np.clip(boxes - corner, 0, rims)
    inside, numbers = (boxes[:, 2:] - boxes[:, :2]).min(axis=1, initial=np.inf) >= 2, None
    if "numbers" in row:
        numbers = row["numbers"].numpy()[top : top + rows, left : left + columns]
        # A box may reach into the crop where its object does not.
        inside &= np.bincount(numbers.ravel(), minlength=len(boxes) + 1)[1 : len(boxes) + 1] > 0
    size = (rows, columns) if plan.crop is not None else (height, width)
    boxes = boxes * np.array((size[1] / columns, size[0] / rows) * 2, np.float32)
    for axis in (0, 1):
        if random.random() < 0.5:
            image = np.flip(image, axis + 1)
            numbers = None if numbers is None else np.flip(numbers, axis)
            low, high = (1, 3) if axis == 0 else (0, 2)
            boxes[:, low], boxes[:, high] = size[axis] - boxes[:, high], size[axis] - boxes[:, low]
    gain = random.uniform(0.8, 1.25, (3, 1, 1))
    ids = np.flatnonzero(inside)
    return Cut(image, size, boxes[ids], labels[ids], numbers, ids + 1, gain, float(random.uniform(-0.1, 0.1)))


def shown(cuts: Sequence[Cut], device: torch.device) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Images and targets of a step, brought to the device in few pieces."""
    if all(one.image.shape[1:] == one.size for one in cuts):
        pixels = torch.from_numpy(np.stack([one.image for one in cuts])).to(device) / 255
    else:
        pixels = torch.stack([enlarged(one, device) for one in cuts])
    gain = torch.from_numpy(np.stack([one.gain for one in cuts])).to(device, torch.float32)
    shift = torch.tensor([one.shift for one in cuts], device=device)[:, None, None, None]
    images = list((pixels * gain + shift).clamp_(0, 1).unbind())
    counts = [len(one.boxes) for one in cuts]
    boxes = torch.from_numpy(np.concatenate([one.boxes for one in cuts])).to(device).split(counts)
    labels = torch.from_numpy(np.concatenate([one.labels for one in cuts])).to(device).split(counts)
    targets = [{"boxes": box, "labels": label} for box, label in zip(boxes, labels, strict=True)]
    if cuts[0].numbers is not None:
        numbers = torch.from_numpy(np.stack([one.numbers for one in cuts if one.numbers is not None])).to(device)
        ids = torch.from_numpy(np.concatenate([one.ids for one in cuts])).to(device, numbers.dtype).split(counts)
        for target, map_, number in zip(targets, numbers, ids, strict=True):
            target["masks"] = (map_ == number[:, None, None]).to(torch.uint8)
    return images, targets


def enlarged(one: Cut, device: torch.device) -> Tensor:
    """A crop (3, H, W) brought to its size."""
    pixels = torch.from_numpy(np.ascontiguousarray(one.image)).to(device)[None] / 255
    return F.interpolate(pixels, size=one.size, mode="bilinear", antialias=True)[0]


# ------------------------------------------------------------------------------------------------ one cell


@functools.cache
def opened(name: str, data: Path, out: Path) -> tuple[list[dict[str, Tensor]], Judged]:
    """What a data set is learned from and judged by, opened once for all cells of a process."""
    rows = [dict(row) for row in torch.load(out / f"{name}.pt", weights_only=True, mmap=True)["train"]]
    return rows, Judged(open_coco(str(data / PLANS[name].data), test_split=PLANS[name].judged))


def run(given: argparse.Namespace) -> None:
    """Train and judge a cell, and write its file."""
    begun = time.monotonic()
    one = {cell.name: cell for cell in trainings(given.only.split(","), given.seeds)}[given.cell]
    plan = plans_of(given)[one.plan]
    rows, judged = opened(one.plan, given.data, given.out)
    torch.backends.cudnn.benchmark = False  # the number of regions is another at every step
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(one.seed)
    name, model_args = ARMS[one.arm]
    made: dict[str, Any] = {**plan.settings, "kind": one.kind, "min_size": 0, "detections": plan.cap}
    network = Detector(name, judged.classes, DetectorSettings(**made), {**model_args, "drop_path_rate": 0.1})
    network.to(device, memory_format=torch.channels_last).train()  # pyright: ignore[reportCallIssue]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    told = learn(network, rows, plan, one.seed, device)
    told |= judge(network, plan, judged, device, given.limit)
    told |= {
        "cell": asdict(one),
        "parameters": sum(one.numel() for one in network.parameters()),
        "wall_s": time.monotonic() - begun,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "plan": asdict(plan),
    }
    keep(given.out / "cells" / f"{given.cell}.json", told)


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
        images, targets = shown([cut(rows[i], plan, random) for i in picked], device)
        share = min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * max(step - warm, 0) / max(plan.steps - warm, 1))))
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * share
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = torch.stack([one.float() for one in network(images, targets).values()]).sum()
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
            print(f"step {step + 1}, {time.monotonic() - begun:.0f} s, loss {losses[-1]:.3f}", flush=True)
            if not half_at:  # the first steps choose kernels and are not what a step takes
                half, half_at = time.monotonic(), step + 1
    took = time.monotonic()
    with torch.no_grad():
        torch._foreach_copy_(every, mean)  # pyright: ignore[reportPrivateUsage]
    rate = (took - half) / (plan.steps - half_at) if plan.steps > half_at else (took - begun) / plan.steps
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {"losses": losses, "step_s": rate, "train_s": took - begun, "peak_gib": peak}


class Judged:
    """The half that is judged by; what it shows is read once for all cells of a process."""

    def __init__(self, data: Coco) -> None:
        self.half, self.classes = data.test, len(data.class_names)
        self._kept: dict[tuple[int, bool], tuple[Tensor, Truth]] = {}

    def __call__(self, number: int, masks: bool) -> tuple[Tensor, Truth]:
        """Pixels (3, H, W) of an image, and what it shows."""
        if (number, masks) not in self._kept:
            pixels = np.ascontiguousarray(np.asarray(self.half[number][0]).transpose(2, 0, 1))
            truth = self.half.objects[number].truth(self.half.sizes[number], masks)
            self._kept[number, masks] = torch.from_numpy(pixels), truth
        return self._kept[number, masks]

    def batches(self, limit: int | None) -> Iterator[list[int]]:
        """Images of one size at a time, so that none is padded."""
        groups: dict[tuple[int, int], list[int]] = {}
        for number, size in enumerate(self.half.sizes[:limit]):
            groups.setdefault(size, []).append(number)
        for size, members in groups.items():
            at_once = max(1, 2**20 // (size[0] * size[1]))
            yield from (members[first : first + at_once] for first in range(0, len(members), at_once))


@torch.no_grad()
def judge(network: Detector, plan: Plan, judged: Judged, device: torch.device, limit: int | None) -> dict[str, Any]:
    """Average precision on whole images of the split."""
    begun, masks = time.monotonic(), network.settings.masks
    kinds: Sequence[Any] = ("box", "mask") if masks else ("box",)
    matches: dict[str, list[Any]] = {kind: [] for kind in kinds}
    count, asked = 0, 0.0
    network.eval()
    for some in judged.batches(limit):
        images = [judged(number, masks)[0].to(device) for number in some]
        before = time.monotonic()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            told = [{name: tensor.float().cpu() for name, tensor in one.items()} for one in network(images)]
        asked += time.monotonic() - before
        for number, one in zip(some, told, strict=True):
            found, count = found_of(one, judged.half.sizes[number]), count + 1
            for kind in kinds:
                matches[kind] += match(number, judged(number, masks)[1], found, kind, plan.cap)
    out: dict[str, Any] = {"eval_s": time.monotonic() - begun, "network_s": asked, "images": count}
    for kind in kinds:
        score = asdict(summarize(matches[kind], judged.classes, plan.cap))
        out[kind] = {name: value for name, value in score.items() if value == value}
    return out


# ------------------------------------------------------------------------------------------------ all cells


def trainings(plans: Sequence[str], seeds: int) -> list[Training]:
    """All of them: every seed of the first arm, as it has the bar, then the first of every other before the second."""
    every = [
        Training(plan, kind, arm, seed)
        for plan in plans
        for kind in PLANS[plan].kinds
        for seed in range(seeds)
        for arm in PLANS[plan].arms
    ]
    return sorted(every, key=lambda one: (one.arm != PLANS[one.plan].arms[0], one.seed > 0))


def plans_of(given: argparse.Namespace) -> dict[str, Plan]:
    """The plans of the data sets that are asked for, with what is to be other than their own."""
    changes = {name: getattr(given, name) for name in ("steps", "batch") if getattr(given, name) is not None}
    return {name: Plan(**{**asdict(PLANS[name]), **changes}) for name in given.only.split(",")}


def train_all(given: argparse.Namespace) -> None:
    """Let processes do all that is left, until the time is over; what has begun ends, as it could not go on."""
    plans = plans_of(given)
    prepare_all(given)
    if given.page is not None:
        take(given.page, given.out / "cells", plans)
    names = [one.name for one in trainings(list(plans), given.seeds)]
    cells = [Cell.in_files(name, given.out / "cells", (*sys.argv[1:], "--cell")) for name in names]
    left = work_off(__file__, cells, how_of(given, given.out, stop=False), lambda one: line(one.read() or {}))
    if left:
        print(f"{len(left)} cells are left: {', '.join(one.title for one in left)}", flush=True)


def take(page: Path, cells: Path, plans: Mapping[str, Plan]) -> None:
    """Put cells that a page has, and that were trained as these plans say, where those are that are done."""
    plainly = {name: json.loads(json.dumps(asdict(plan))) for name, plan in plans.items()}
    for told in known(page):
        if told["plan"] == plainly.get(told["cell"]["plan"]):
            keep(cells / f"{name_of(told)}.json", told)


def prepare_all(given: argparse.Namespace) -> None:
    """Decode the images of all data sets that are asked for."""
    for name, plan in plans_of(given).items():
        prepare(plan, given.data, given.out / f"{name}.pt")


def line(told: dict[str, Any]) -> str:
    """A cell in a line."""
    kinds = [kind for kind in ("box", "mask") if kind in told]
    parts = [f"{kind} AP {100 * told[kind]['ap']:.1f} AP50 {100 * told[kind]['ap50']:.1f}" for kind in kinds]
    speed = f"{1e3 * told['step_s']:.0f} ms a step, {told['peak_gib']:.1f} GiB, judged in {told['eval_s']:.0f} s"
    return f"{', '.join(parts)}; {speed}"


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
        cols = [percent([row.get(part, {}).get(name) for row in rows]) for part, name in COLUMNS]
        size, speed, peak = rows[0]["parameters"] / 1e6, rows[0]["step_s"], max(row["peak_gib"] for row in rows)
        print(f"| {plan} | {kind} | {arm} | {len(rows)} | {' | '.join(cols)} | {size:.1f} | {speed:.3f} | {peak:.1f} |")


COLUMNS = (("box", "ap"), ("box", "ap50"), ("box", "ap75"), ("mask", "ap"))


def main() -> int:
    """Train, time, or print what came out."""
    if is_worker():
        return serve(lambda told: run(arguments().parse_args(told)))
    given = arguments().parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.part == "page":
        if given.page is None:
            raise SystemExit("--page: expected a folder for the page, got none")
        done = [json.loads(file.read_text()) for file in sorted((given.out / "cells").glob("*.json"))]
        print(written(given.page, done))
        return 0
    if given.part == "prepare":
        prepare_all(given)
        return 0
    if given.part == "train":
        train_all(given)
    table(given.out)
    return 0


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of nuclei/ and bccd/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=("prepare", "train", "table", "page"), default="train")
    parser.add_argument("--page", type=Path, help="folder of README.md and the cells that it tells of")
    parser.add_argument("--only", default="bccd,nuclei")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=7, help="processes, each of which does cell after cell")
    parser.add_argument("--minutes", type=float, default=7, help="after which nothing new is begun")
    parser.add_argument("--mps", action="store_true", help="let processes share the GPU through NVIDIA's MPS")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help="instead of each plan's own; 2 for a trial")
    parser.add_argument("--batch", type=int, help="instead of each plan's own")
    parser.add_argument("--limit", type=int, help="images that are judged at most, for a trial")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

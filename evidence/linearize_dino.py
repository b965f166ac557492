"""What DINOv2 keeps when its attention becomes linear: features beside the teacher's, and neighbours among pets.

    PYTHONPATH=src python evidence/linearize_dino.py --weights dino/dino.safetensors --pets pets/images \
        --out dino --device cuda --minutes 8
    PYTHONPATH=src nice python evidence/linearize_dino.py --weights dino/dino.safetensors --pets pets/images \
        --out dino --pixels 98 --each 5 --batch 8 --steps 24 60 --lr 3e-4 3e-5 --minutes 45

takes what `evidence/packing/pack_teachers.py dino` packed. Rows: the teacher; swapped and not trained; after every
layer has learned to answer as its teacher's (the first number of --steps); after the final features, with all weights
free, have as well (the second). Students learn from the training half of the pets, without labels. Both halves'
features come from the same network: the training half is what is asked for neighbours, the validation half is judged.
Rows are in `dino.json` as they come; when the time is over everything is kept, and the same command goes on. `--probe`
times a step of each stage and a judgement.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.transforms.v2 import RandomResizedCrop
from torchvision.transforms.v2.functional import resized_crop

import affinear
from affinear.bench.timing import synchronize as wait
from affinear.linearizing.distil import relative_error
from packing.pack_teachers import dino_network
from running.stages import (
    MECHANISMS,
    Clock,
    Rows,
    Stage,
    layer_loss,
    layers_apart,
    layers_of,
    probed,
    stages_of,
    taught,
)

KEPT = 256  # pixels of an image as it is kept
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NEIGHBOURS, HEAT = 10, 0.07


class Pets:
    """Photos in the middle's square, uint8, and their breeds.

    Args:
        folder: With class folders in training and validation.
        pixels: Side that the network sees.
        each: Photos of a breed that are judged, at most; twice as many are known.
        device: Where they are.
    """

    def __init__(self, folder: Path, pixels: int, each: int, device: torch.device) -> None:
        self.pixels, self.device = pixels, device
        breeds = sorted(one.name for one in (folder / "training").iterdir())
        self.images, self.breeds = dict[str, Tensor](), dict[str, Tensor]()
        for half, most in (("training", 2 * each), ("validation", each)):
            found = [sorted((folder / half / name).iterdir()) for name in breeds]
            self.images[half] = torch.stack([_square(file) for files in found for file in files[:most]]).to(device)
            self.breeds[half] = torch.tensor([i for i, files in enumerate(found) for _ in files[:most]], device=device)
            if half == "training":
                self.learnt = torch.stack([_square(file) for files in found for file in files]).to(device)
        self.cut = RandomResizedCrop((pixels, pixels), scale=(0.35, 1.0), antialias=True)
        self.mean, self.std = (torch.tensor(x, device=device)[:, None, None] for x in (MEAN, STD))

    def seen(self, half: str, first: int, count: int) -> Tensor:
        """Some images as they are judged: the middle seven eighths."""
        edge = KEPT // 16
        side = KEPT - 2 * edge
        cut = resized_crop(self.images[half][first : first + count], edge, edge, side, side, [self.pixels] * 2)
        return (cut / 255 - self.mean) / self.std

    def drawn(self, count: int, step: int) -> Tensor:
        """Some training images, cut and mirrored at random, by the number of the step."""
        torch.manual_seed(step)
        images = self.learnt[torch.randint(len(self.learnt), (count,)).to(self.device)]
        cut = torch.stack([self.cut(image.flip(-1) if torch.rand(()) < 0.5 else image) for image in images])
        return (cut / 255 - self.mean) / self.std


def _square(file: Path) -> Tensor:
    """The middle of a photo, (3, KEPT, KEPT)."""
    with Image.open(file) as image:
        image = image.convert("RGB")
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    image = image.resize((KEPT, KEPT), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)


# ------------------------------------------------------------------------------------------------ judging


def tokens_of(network: Any, images: Tensor) -> Tensor:
    """What the last norm gives, (B, tokens, C); the class token is the first."""
    return network.forward_features(images)


@torch.no_grad()
def features(network: nn.Module, pets: Pets, half: str, batch: int) -> Tensor:
    """The tokens of all images of a half."""
    count = len(pets.images[half])
    return torch.cat([tokens_of(network, pets.seen(half, i, batch)) for i in range(0, count, batch)])


def judge(network: nn.Module, pets: Pets, batch: int, target: Tensor | None) -> tuple[dict[str, float], Tensor]:
    """Likeness to the teacher's features and accuracy of neighbours; and the features of the validation half."""
    network.eval()
    known, asked = (features(network, pets, half, batch) for half in ("training", "validation"))
    told: dict[str, float] = {}
    if target is not None:
        likeness = torch.cosine_similarity(asked, target, dim=-1)
        told["cosine_class"], told["cosine_patches"] = float(likeness[:, 0].mean()), float(likeness[:, 1:].mean())
        told["error"] = float(relative_error(asked, target))
    classes = pets.breeds["training"], pets.breeds["validation"]
    told["knn_class"] = neighbours(known[:, 0], classes[0], asked[:, 0], classes[1])
    told["knn_patches"] = neighbours(known[:, 1:].mean(dim=1), classes[0], asked[:, 1:].mean(dim=1), classes[1])
    return {name: round(value, 4) for name, value in told.items()}, asked


def neighbours(known: Tensor, classes: Tensor, asked: Tensor, expected: Tensor) -> float:
    """Accuracy of a vote of the nearest, weighed by exp(cosine / HEAT)."""
    near = nn.functional.normalize(asked, dim=-1) @ nn.functional.normalize(known, dim=-1).T
    score, which = near.topk(NEIGHBOURS, dim=-1)
    votes = near.new_zeros(len(asked), int(classes.max()) + 1)
    votes.scatter_add_(1, classes[which], (score / HEAT).exp())
    return float((votes.argmax(-1) == expected).float().mean())


# ------------------------------------------------------------------------------------------------ teaching


def loss_of(stage: Stage, teacher: nn.Module, student: nn.Module, pets: Pets, batch: int, step: int) -> Tensor:
    """A step's loss."""
    images = pets.drawn(batch, step)
    if stage.name == "layers":
        return layer_loss(teacher, student, lambda network: network(images))
    with torch.no_grad():
        target = tokens_of(teacher, images)
    found = tokens_of(student, images)
    # The class token, one of many, is what most users read: it counts as much as all others.
    return relative_error(found[:, 1:], target[:, 1:]) + relative_error(found[:, 0], target[:, 0])


def swap(teacher: nn.Module, mechanism: str, given: argparse.Namespace) -> nn.Module:
    """The linear copy, with what is learned beside the mechanism."""
    return affinear.linearize(
        teacher, mechanism, feature_map=given.feature_map, gain=True, convolution=given.convolution
    )[0]


def student_of(given: argparse.Namespace, mechanism: str, teacher: nn.Module, pets: Pets, rows: Rows, clock: Clock,
               target: Tensor, *, teach: bool) -> bool:  # fmt: skip
    """The rows of a mechanism; False if the time is over before."""
    student = swap(teacher, mechanism, given)
    images = pets.seen("validation", 0, 16)

    def tell(row: str, **more: Any) -> None:
        if rows.find(mechanism=mechanism, row=row) is None:
            apart = layers_apart(teacher, student, lambda network: network(images))
            judged = judge(student, pets, given.judge_batch, target)[0]
            rows.add(mechanism=mechanism, row=row, **judged, layers=apart, **more)

    tell("swapped")
    for stage in stages_of(given.steps, given.lr, given.new_lr) if teach else ():
        learned = layers_of(student) if stage.name == "layers" else [name for name, _ in student.named_parameters()]
        told = taught(
            student,
            stage,
            learned,
            lambda step, stage=stage: loss_of(stage, teacher, student, pets, given.batch, step),
            given.out / "state" / f"{mechanism}-{stage.name}.pt",
            clock,
        )
        if told is None:
            return False
        tell(stage.name, **told)
    return True


def probe(given: argparse.Namespace, teacher: nn.Module, pets: Pets) -> None:
    """Seconds of a step of each stage and of a judgement, and what all would take."""
    total = 0.0
    for mechanism in given.mechanisms:
        student = swap(teacher, mechanism, given)
        for stage in stages_of(given.steps, given.lr, given.new_lr):
            total += probed(
                mechanism,
                stage,
                lambda step, stage=stage, student=student: loss_of(stage, teacher, student, pets, given.batch, step),
                pets.device,
            )
    began = time.monotonic()
    with torch.no_grad():
        teacher(pets.seen("validation", 0, given.judge_batch))
    wait(pets.device)
    judged = (time.monotonic() - began) * sum(map(len, pets.images.values())) / given.judge_batch
    total += judged * (1 + 3 * len(given.mechanisms))
    print(f"a judgement {judged:.0f} s; in all {total / 60:.1f} min", flush=True)


def table(rows: Rows) -> None:
    """What came out."""
    print(
        "| attention | row | cosine, class | cosine, patches | kNN, class | kNN, patches |\n|---|---|---|---|---|---|"
    )
    for row in rows.rows:
        numbers = [f"{row.get(name, 1):.3f}" for name in ("cosine_class", "cosine_patches")]
        numbers += [f"{100 * row[name]:.1f} %" for name in ("knn_class", "knn_patches")]
        print(f"| {row['mechanism']} | {row['row']} | {' | '.join(numbers)} |")


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="dino.safetensors")
    parser.add_argument("--pets", type=Path, required=True, help="folder with training/BREED and validation/BREED")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--minutes", type=float, default=8, help="after which all is kept and it ends")
    parser.add_argument("--pixels", type=int, default=224, help="a multiple of 14")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--each", type=int, default=10, help="photos of a breed that are judged; twice as many are known"
    )
    parser.add_argument("--judge-batch", type=int, default=37)
    parser.add_argument("--steps", type=int, nargs=2, default=(300, 1500), help="of both stages")
    parser.add_argument("--lr", type=float, nargs=2, default=(3e-4, 1e-4), help="of the teacher's weights, by stage")
    parser.add_argument("--new-lr", type=float, nargs=2, default=(3e-3, 3e-4), help="of what linearizing added")
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    parser.add_argument("--feature-map", default="learned", choices=("own", "learned", "hedgehog"))
    parser.add_argument("--convolution", type=int, default=3)
    parser.add_argument("--probe", action="store_true", help="time a few steps, and stop")
    return parser


def main() -> int:
    """Do what fits into the time; 1 if something is left to do."""
    given = arguments().parse_args()
    clock, device = Clock(given.minutes), torch.device(given.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    teacher = dino_network(load_file(given.weights), given.pixels).to(device).requires_grad_(False)
    pets = Pets(given.pets, given.pixels, given.each, device)
    if given.probe:
        probe(given, teacher, pets)
        return 0
    names = ("pixels", "each", "batch", "steps", "lr", "new_lr", "feature_map", "convolution")
    rows = Rows(given.out / "dino.json", {name: getattr(given, name) for name in names})
    judged, target = judge(teacher, pets, given.judge_batch, None)
    if rows.find(row="teacher") is None:
        rows.add(mechanism="softmax", row="teacher", **judged)
    work = [(mechanism, teach) for teach in (False, True) for mechanism in given.mechanisms]
    done = True
    for mechanism, teach in work:
        done = not clock.over and student_of(given, mechanism, teacher, pets, rows, clock, target, teach=teach)
        if not done:
            break
    table(rows)
    print("all is done" if done else "the time is over; the same command goes on")
    return int(not done)


if __name__ == "__main__":
    raise SystemExit(main())

"""A segmenter that learns by a recipe from scenes that stay on the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from affinear.tasks.segment.balance import class_weights
from affinear.tasks.segment.looking import labels_of
from affinear.tasks.segment.metric import confusion, score_of, showing
from affinear.tasks.segment.pairs import UNLABELLED, Scenes
from affinear.tasks.segment.samples import as_bytes
from affinear.tasks.segment.settings import Segmentation
from affinear.tasks.segment.work import Normalize, look_of, pixel_loss
from affinear.train import Recipe
from affinear.train.task import Job, Score
from running.crops import DRAWS, Kept, cut
from running.learning import Learner, half


def learner_of(network: nn.Module, job: Job[Segmentation], some: Kept, device: torch.device) -> Learner:
    """What trains a segmenter by its job; which photos, and how they are varied, is drawn before it begins."""
    settings, normalize = job.settings, Normalize(job.settings, device)
    weights = _class_weights(some, len(job.facts["classes"]), settings)
    every_photo, every_draw = _chances(len(some.images), job.recipe, device)

    def loss(at: Tensor) -> Tensor:
        picked, draws = (one.index_select(0, at)[0] for one in (every_photo, every_draw))
        images, labels = cut(some, picked, draws, settings)
        images = (255 * images - normalize.shift) / normalize.spread
        with half(device):
            logits = network(images.contiguous(memory_format=torch.channels_last))
        losses = [pixel_loss(found, labels, weights) for found in logits]
        return losses[0] if len(losses) == 1 else losses[0] + settings.helper_weight * losses[1]

    return Learner(network, job.recipe, loss, device)


def _class_weights(some: Kept, classes: int, settings: Segmentation) -> Tensor | None:
    if not settings.balance:
        return None
    labels = some.labels
    counts = torch.bincount(labels[labels != UNLABELLED].long(), minlength=classes).cpu()
    return class_weights(counts, settings.balance).to(labels.device)


@torch.no_grad()
def judge(
    network: nn.Module, job: Job[Segmentation], data: Scenes, device: torch.device, at_once: int = 16
) -> tuple[Score, list[Tensor]]:
    """The score on whole photos of the half to be judged by, and the classes found in each (H, W), uint8."""
    normalize, look, classes = Normalize(job.settings, device), look_of(job.settings), len(data.classes)
    counts = torch.zeros(classes, classes, dtype=torch.int64, device=device)
    shown, maps = torch.zeros(classes, dtype=torch.int64, device=device), list[Tensor]()
    network.eval()
    for first in range(0, len(data.test), at_once):
        pairs = [data.test[i] for i in range(first, min(first + at_once, len(data.test)))]
        photos = [as_bytes(photo, job.settings.short_side, job.settings.long_side) for photo, _ in pairs]
        images = normalize(torch.stack(photos).to(device)).contiguous(memory_format=torch.channels_last)
        truth = torch.stack([torch.from_numpy(labels) for _, labels in pairs]).to(device)
        with half(device):
            found = labels_of(network, images, look, (truth.shape[1], truth.shape[2]))
        counts += confusion(truth, found, classes)
        shown += showing(truth, classes)
        maps += found.to(torch.uint8).cpu().unbind()
    return score_of(counts.cpu(), shown.cpu(), len(data.test), data.classes, ()), maps


def _chances(photos: int, recipe: Recipe, device: torch.device) -> tuple[Tensor, Tensor]:
    """Photos (steps, batch), every one as often as any other, and uniform numbers (steps, batch, DRAWS)."""
    assert recipe.steps is not None
    random = torch.Generator().manual_seed(recipe.seed)
    wanted = recipe.steps * recipe.batch_size
    order = torch.cat([torch.randperm(photos, generator=random) for _ in range(-(-wanted // photos))])[:wanted]
    draws = torch.rand(recipe.steps, recipe.batch_size, DRAWS, generator=random)
    return order.view(recipe.steps, recipe.batch_size).to(device), draws.to(device)

"""The cascade does what its paper and mmdetection say, worked out again in plain arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import box_iou

from affinear.models.detectors import Detector
from affinear.models.detectors import cascade as module
from affinear.models.detectors.cascade import STEPS, CascadeHeads
from affinear.models.detectors.stages import Samples

Make = Callable[..., Detector]
Targets = Callable[..., dict[str, Tensor]]
DEVIATIONS = ((0.1, 0.1, 0.2, 0.2), (0.05, 0.05, 0.1, 0.1), (0.033, 0.033, 0.067, 0.067))
SIZE = (64, 96)


def heads_of(network: Detector) -> CascadeHeads:
    assert network.regions is not None
    heads = network.regions["roi_heads"]
    assert isinstance(heads, CascadeHeads)
    return heads


def moved(boxes: Tensor, deltas: Tensor, deviations: tuple[float, ...]) -> Tensor:
    """Boxes shifted by shares of their sides and scaled by exponentials."""
    dx, dy, dw, dh = (deltas * torch.tensor(deviations)).unbind(1)
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    x, y = boxes[:, 0] + width / 2 + dx * width, boxes[:, 1] + height / 2 + dy * height
    width, height = width * dw.exp() / 2, height * dh.exp() / 2
    return torch.stack((x - width, y - height, x + width, y + height), dim=1)


def inside(boxes: Tensor) -> Tensor:
    return torch.stack((boxes[:, 0::2].clamp(0, SIZE[1]), boxes[:, 1::2].clamp(0, SIZE[0])), dim=2).flatten(1)


def features_of(network: Detector, count: int = 1) -> dict[str, Tensor]:
    return network.backbone(torch.randn(count, 3, *SIZE))


def boxes_in(count: int) -> Tensor:
    low = torch.rand(count, 2) * torch.tensor((60.0, 30.0))
    return torch.cat((low, low + 4 + torch.rand(count, 2) * 30), dim=1)


@pytest.mark.parametrize("aware", [False, True])
def test_the_last_stage_gives_boxes_and_all_stages_together_classes_and_masks(
    aware: bool, detector: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = detector("cascade_mask_rcnn", class_aware=aware).eval()
    heads, features, boxes = heads_of(network), features_of(network), boxes_in(20)
    stages: list[Any] = list(heads.stages)
    for stage in stages:  # fresh weights hardly move a box
        torch.nn.init.normal_(stage.box_predictor.bbox_pred.weight, std=0.05)
    seen: list[Any] = []
    real = stages[2].postprocess_detections

    def spy(*given: Any) -> Any:
        seen.extend(given)
        return real(*given)

    monkeypatch.setattr(stages[2], "postprocess_detections", spy)
    with torch.no_grad():
        found = heads(features, [boxes], [SIZE])[0][0]
        at, last, every = boxes, boxes, []
        for stage, deviations in zip(stages, DEVIATIONS, strict=True):
            logits, deltas = stage.box_predictor(stage.box_head(stage.box_roi_pool(features, [at], [SIZE])))
            every.append(logits)
            last = at
            if aware:
                best = logits[:, 1:].argmax(1) + 1
                deltas = torch.stack([deltas[i, 4 * k : 4 * k + 4] for i, k in enumerate(best.tolist())])
            at = inside(moved(at, deltas, deviations))
        torch.testing.assert_close(seen[0], sum(every) / 3, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(seen[2][0], last, rtol=1e-3, atol=1e-3)
        masks = [
            stage.mask_predictor(stage.mask_head(stage.mask_roi_pool(features, [found["boxes"]], [SIZE]))).sigmoid()
            for stage in stages
        ]
        mean = torch.stack(masks).mean(0)[torch.arange(len(found["labels"])), found["labels"]]
    torch.testing.assert_close(found["masks"][:, 0], mean, rtol=1e-4, atol=1e-5)


def test_each_stage_is_stricter_and_finer_than_the_one_before(detector: Make) -> None:
    heads = heads_of(detector("cascade_rcnn"))
    truth = torch.tensor([[10.0, 10.0, 30.0, 30.0]])
    shown = [{"boxes": truth, "labels": torch.tensor([2])}]
    # Boxes as wide as the object and lower, which share 0.45, 0.55, 0.65 and 0.75 of it.
    near = torch.stack([torch.tensor([10.0, 10.0, 30.0, 10.0 + 20 * share]) for share in (0.45, 0.55, 0.65, 0.75)])
    torch.testing.assert_close(box_iou(near, truth)[:, 0], torch.tensor([0.45, 0.55, 0.65, 0.75]))
    for stage, wanted in zip(heads.stages, ([0, 2, 2, 2], [0, 0, 2, 2], [0, 0, 0, 2]), strict=True):
        (sample,) = module.sample(stage, [near], shown)  # pyright: ignore[reportArgumentType]
        kept = {tuple(box.tolist()): int(label) for box, label in zip(sample.boxes, sample.labels, strict=True)}
        assert [kept[tuple(box.tolist())] for box in near if tuple(box.tolist()) in kept] == wanted
        assert sample.copies.tolist() == [tuple(box.tolist()) == tuple(truth[0].tolist()) for box in sample.boxes]
    for stage, deviations in zip(heads.stages, DEVIATIONS, strict=True):
        coder: Any = stage.box_coder
        assert coder.weights == pytest.approx([1 / one for one in deviations])


@pytest.mark.parametrize(("loss", "aware"), [("smooth_l1", False), ("giou", True)])
def test_losses_are_those_of_each_stages_own_samples_weighted(
    loss: str, aware: bool, detector: Make, target: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = detector("cascade_rcnn", class_aware=aware, box_loss=loss)
    heads, features = heads_of(network), features_of(network, 2)
    targets = [{**one, "labels": one["labels"] + 1} for one in (target(*SIZE), target(*SIZE))]
    near = [torch.cat((boxes_in(20), one["boxes"] + torch.randn(3, 4))) for one in targets]
    samples: list[Samples] = []
    given: list[list[Tensor]] = []
    real = module.sample

    def spy(stage: Any, proposals: list[Tensor], shown: Any) -> Samples:
        given.append(proposals)
        samples.append(real(stage, proposals, shown))
        return samples[-1]

    monkeypatch.setattr(module, "sample", spy)
    losses = heads(features, [inside(one) for one in near], [SIZE] * 2, targets)[1]
    for number, (stage, weight, deviations) in enumerate(zip(heads.stages, (1, 0.5, 0.25), DEVIATIONS, strict=True)):
        boxes, labels = ([getattr(one, name) for one in samples[number]] for name in ("boxes", "labels"))
        heads_now: Any = stage
        told = heads_now.box_predictor(heads_now.box_head(heads_now.box_roi_pool(features, boxes, [SIZE] * 2)))
        logits, deltas, label, box = told[0], told[1], torch.cat(labels), torch.cat(boxes)
        expected = weight * F.cross_entropy(logits, label)
        torch.testing.assert_close(losses[f"loss_classifier_{number}"], expected)
        truth = torch.cat([one["boxes"][mine.matched] for one, mine in zip(targets, samples[number], strict=True)])
        refine = torch.where(label > 0, label, logits[:, 1:].argmax(1) + 1)
        if aware:
            of = {
                name: torch.stack([deltas[i, 4 * k : 4 * k + 4] for i, k in enumerate(which.tolist())])
                for name, which in (("loss", label), ("next", refine))
            }
        else:
            of = {"loss": deltas, "next": deltas}
        total = box_loss(loss, box, of["loss"], truth, deviations)[label > 0].sum()
        torch.testing.assert_close(losses[f"loss_box_reg_{number}"], weight * total / len(label), rtol=1e-4, atol=1e-6)
        if number < 2:  # the next stage starts from these boxes, moved, without the objects' own
            own = torch.cat([one.copies for one in samples[number]])
            after = inside(moved(box, of["next"], deviations))[~own]
            torch.testing.assert_close(torch.cat(given[number + 1]), after.detach(), rtol=1e-3, atol=1e-3)
            assert not any(one.requires_grad for one in given[number + 1])


def box_loss(kind: str, boxes: Tensor, deltas: Tensor, truth: Tensor, deviations: tuple[float, ...]) -> Tensor:
    """Of each box, from the formula."""
    if kind == "smooth_l1":
        size, wanted_size = boxes[:, 2:] - boxes[:, :2], truth[:, 2:] - truth[:, :2]
        shift = ((truth[:, 2:] + truth[:, :2]) - (boxes[:, 2:] + boxes[:, :2])) / 2 / size
        wanted = torch.cat((shift, (wanted_size / size).log()), dim=1) / torch.tensor(deviations)
        off = (deltas - wanted).abs()
        return torch.where(off < 1, off**2 / 2, off - 0.5).sum(1)
    guess = moved(boxes, deltas, deviations)
    low, high = torch.minimum(guess[:, :2], truth[:, :2]), torch.maximum(guess[:, 2:], truth[:, 2:])
    both = (torch.minimum(guess[:, 2:], truth[:, 2:]) - torch.maximum(guess[:, :2], truth[:, :2])).clamp(min=0).prod(1)
    either = (guess[:, 2:] - guess[:, :2]).prod(1) + (truth[:, 2:] - truth[:, :2]).prod(1) - both
    around = (high - low).prod(1)
    return 10 * (1 - both / either + (around - either) / around)


def test_the_steps_are_the_published_ones() -> None:
    assert [step.overlap for step in STEPS] == [0.5, 0.6, 0.7]
    assert [step.weight for step in STEPS] == [1, 0.5, 0.25]
    assert tuple(step.deviations for step in STEPS) == DEVIATIONS


def test_the_head_of_the_papers_backbones_is_there(detector: Make) -> None:
    stage: Any = heads_of(detector("cascade_mask_rcnn", class_aware=True, box_head="4conv1fc", norm="batch")).stages[0]
    assert [type(layer).__name__ for layer in stage.box_head] == ["Conv2dNormActivation"] * 4 + [
        "Flatten",
        "Linear",
        "ReLU",
    ]
    assert stage.box_predictor.bbox_pred.out_features == 4 * 4

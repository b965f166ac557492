"""Average precision, against COCO's own evaluation and a faster one of others."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest

from affinear.tasks.detect.precision import Found, Precision, Truth, evaluate, match, summarize
from affinear.tasks.detect.runs import Runs

pytest.importorskip("pycocotools")
SIDE, CLASSES = 160, 3


def boxes_at(rng: np.random.Generator, count: int) -> Any:
    corner = rng.uniform(0, SIDE * 0.8, (count, 2))
    sides = np.exp(rng.uniform(np.log(4), np.log(120), (count, 2)))
    return np.concatenate((corner, np.minimum(sides, SIDE - corner)), axis=1).round(1)


def mask_of(box: Any) -> Runs:
    """An ellipse in a box."""
    y, x = np.mgrid[:SIDE, :SIDE] + 0.5
    left, top, width, height = box
    return Runs.of(((x - left) / width * 2 - 1) ** 2 + ((y - top) / height * 2 - 1) ** 2 <= 1)


def random_set(rng: np.random.Generator, images: int, most: int) -> tuple[list[Truth], list[Found]]:
    """Objects and detections: near ones, doubles, strangers, equal scores, crowds, empty images."""
    truths: list[Truth] = []
    found: list[Found] = []
    for _ in range(images):
        count = int(rng.integers(0, most + 1))
        boxes = boxes_at(rng, count)
        masks = tuple(mask_of(box) for box in boxes)
        labels = rng.integers(0, CLASSES, count)
        areas = np.array([float(mask.area) for mask in masks])
        truths.append(Truth(boxes, labels, areas, rng.random(count) < 0.15, masks))
        near = boxes[rng.integers(0, max(count, 1), int(rng.integers(0, 2 * count + 1)))] if count else boxes
        near = near * rng.uniform(0.9, 1.1, near.shape)
        guesses = np.concatenate((near, boxes_at(rng, int(rng.integers(0, 6))))).round(1)
        scores = rng.integers(1, 30, len(guesses)) / 30
        guessed = rng.integers(0, CLASSES, len(guesses))
        found.append(Found(guesses, guessed, scores, tuple(mask_of(box) for box in guesses)))
    return truths, found


def as_coco(truths: list[Truth], found: list[Found], kind: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    annotations: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for image, (truth, guess) in enumerate(zip(truths, found, strict=True), 1):
        assert truth.masks is not None
        assert guess.masks is not None
        for i, mask in enumerate(truth.masks):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image,
                    "category_id": int(truth.labels[i]) + 1,
                    "bbox": truth.boxes[i].tolist(),
                    "area": float(truth.areas[i]),
                    "iscrowd": int(truth.crowd[i]),
                    "segmentation": mask.json(),
                }
            )
        for i, mask in enumerate(guess.masks):
            shape = {"bbox": guess.boxes[i].tolist()} if kind == "box" else {"segmentation": mask.json()}
            about = {"image_id": image, "category_id": int(guess.labels[i]) + 1, "score": float(guess.scores[i])}
            results.append({**about, **shape})
    images = [{"id": i + 1, "height": SIDE, "width": SIDE} for i in range(len(truths))]
    categories = [{"id": i + 1, "name": str(i)} for i in range(CLASSES)]
    return {"images": images, "annotations": annotations, "categories": categories, "info": {}}, results


def judged(tools: Any, truths: list[Truth], found: list[Found], kind: str, cap: int) -> Precision:
    """What COCO's evaluation, or one that is made like it, says."""
    coco, evaluation = tools
    content, results = as_coco(truths, found, kind)
    with contextlib.redirect_stdout(io.StringIO()):
        truth = coco()
        truth.dataset = content
        truth.createIndex()
        judge = evaluation(truth, truth.loadRes(results), "bbox" if kind == "box" else "segm")
        judge.params.maxDets = [1, cap // 2, cap]
        judge.evaluate()
        judge.accumulate()
    table = np.where(judge.eval["precision"] < 0, np.nan, judge.eval["precision"])[..., -1]
    recall = np.where(judge.eval["recall"] < 0, np.nan, judge.eval["recall"])[..., -1]
    every = [float(np.nanmean(table[..., area])) for area in range(4)]
    by_class = tuple(float(np.nanmean(table[:, :, label, 0])) for label in range(CLASSES))
    sizes = dict(zip(("ap", "small", "medium", "large"), every, strict=True))
    return Precision(
        **sizes,
        ap50=float(np.nanmean(table[0, :, :, 0])),
        ap75=float(np.nanmean(table[5, :, :, 0])),
        recall=float(np.nanmean(recall[..., 0])),
        by_class=by_class,
        cap=cap,
    )


def tools_of(package: str) -> Any:
    if package == "pycocotools":
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval

        return COCO, COCOeval
    faster: Any = pytest.importorskip("faster_coco_eval")
    return faster.COCO, faster.COCOeval_faster


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize("kind", ["box", "mask"])
@pytest.mark.parametrize(
    ("package", "images", "most", "cap"),
    [("pycocotools", 12, 8, 100), ("pycocotools", 3, 140, 300), ("pycocotools", 5, 30, 5), ("faster", 4, 40, 300)],
)
def test_every_number_is_that_of_cocos_own_evaluation(
    seed: int, package: str, kind: Any, images: int, most: int, cap: int
) -> None:
    truths, found = random_set(np.random.default_rng(seed), images, most)
    ours, theirs = evaluate(truths, found, CLASSES, kind, cap), judged(tools_of(package), truths, found, kind, cap)
    for name in ("ap", "ap50", "ap75", "small", "medium", "large", "recall", "by_class"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-12, nan_ok=True), name


def test_the_order_in_which_processes_report_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truths, found = random_set(rng, 6, 12)
    pairs = enumerate(zip(truths, found, strict=True))
    parts = [match(image, truth, guess, "box", 100) for image, (truth, guess) in pairs]
    shuffled = [one for i in rng.permutation(len(parts)) for one in parts[i]]
    assert repr(summarize(shuffled, CLASSES, 100)) == repr(evaluate(truths, found, CLASSES, "box", 100))


def test_a_cap_below_the_number_of_objects_halves_a_perfect_score() -> None:
    boxes = np.stack([np.array([i % 15 * 10, i // 15 * 10, 9, 9]) for i in range(200)]).astype(float)
    labels = np.zeros(200, np.int64)
    truth = Truth(boxes, labels, np.full(200, 81.0), np.zeros(200, np.bool_))
    perfect = [Found(boxes, labels, np.linspace(1, 0.5, 200))]
    assert evaluate([truth], perfect, 1, "box", 200).ap == 1.0
    assert evaluate([truth], perfect, 1, "box", 100).ap == pytest.approx(51 / 101)


def test_masks_are_not_judged_where_there_are_only_boxes() -> None:
    boxes, labels = np.ones((1, 4)), np.zeros(1, np.int64)
    truth, found = Truth(boxes, labels, np.ones(1), np.zeros(1, np.bool_)), Found(boxes, labels, np.ones(1))
    with pytest.raises(ValueError, match="only boxes"):
        evaluate([truth], [found], 1, "mask", 10)

"""Detection as a task: trained, judged, asked, reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from affinear import tasks
from affinear.cli import build_app
from affinear.models.detectors import Detector
from affinear.tasks.detect import TASK
from affinear.tasks.detect.precision import Found, evaluate
from affinear.tasks.detect.settings import Detection, Drawing
from affinear.tasks.detect.task import as_coco
from affinear.train import Job, Recipe, Run, curves, train

Make = Callable[..., Path]
SMALL: dict[str, Any] = {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4)}
FIELDS: dict[str, Any] = {
    "steps": 3,
    "eval_steps": 3,
    "batch_size": 2,
    "workers": 0,
    "channels": 32,
    "rois": 12,
    "proposals": (30, 20),
    "anchor_sizes": (8.0, 16.0, 32.0, 64.0, 128.0),
    "crop": (64, 64),
    "test_batch": 3,
    "drop_path": 0.2,
    "detections": 4,
    "ema_decay": None,
}


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "draw", lambda output, *given: (output / curves.NAME).write_bytes(b""))  # pyright: ignore


def run_of(data: Path, output: Path, **changes: Any) -> Run:
    return Run(
        "mavit_tiny", str(data), output, tasks.recipe_for("detect", "mavit_tiny", "small", **FIELDS, **changes), SMALL
    )


def test_a_run_learns_is_judged_and_asked(coco: Make, tmp_path: Path) -> None:
    data = coco(train=3, test=2)
    result = train(run_of(data, tmp_path / "run"))
    assert {"box_ap", "box_ap50", "mask_ap", "mask_ap75", "cap"} <= result.score.keys()
    assert result.score["cap"] == 4
    page = (tmp_path / "run" / "report.html").read_text()
    assert "The hardest images" in page
    assert "at most 4 detections each" in page
    classes = page.partition("Class by class")[2]
    assert "<th>box AP</th><th>mask AP</th>" in classes
    for part in tasks.evaluate(tmp_path / "run", str(data)).parts:
        assert f"<td>{part.name}</td><td>{part.count}</td>" in classes
    trained = tasks.load_trained(tmp_path / "run")
    again = tasks.evaluate(trained, str(data))
    assert again.count == 2
    assert [part.name for part in again.parts] == ["box", "bar"]
    asked = [str(data / "val" / "0.png"), str(tmp_path / "nothing.png")]
    answers = list(TASK.predict(trained, asked, Drawing(score=0.0)))
    assert answers[1].error is not None
    assert sorted(answers[0].files) == ["0_objects.jpg", "0_objects.json"]
    rows = json.loads(answers[0].files["0_objects.json"])
    assert {row["category_id"] for row in rows} <= {3, 7}
    assert all({"bbox", "score", "segmentation", "image_id"} <= row.keys() for row in rows)
    assert len(rows) == len(answers[0].content["objects"])
    words = ["eval", str(tmp_path / "run"), "--data", str(data), "--workers", "0", "--set", "detections=9"]
    told = CliRunner().invoke(build_app(), [*words, "--set", "min_score=0"])
    assert told.exit_code == 0, told.output
    assert "cap of detections 9, 2 images" in told.stdout
    assert [line.split()[-1] for line in told.stdout.splitlines()[:2]] == ["box", "bar"]
    missing = CliRunner().invoke(build_app(), [*words, "--set", "test_split=nowhere"])
    assert missing.exit_code != 0
    assert "found no annotations/instances_nowhere.json" in " ".join(missing.output.split())


def test_what_weights_do_not_depend_on_may_be_set_when_they_are_used(coco: Make, tmp_path: Path) -> None:
    data = coco(train=3, test=2)
    train(run_of(data, tmp_path / "run"))
    chosen: dict[str, Any] = {"detections": 9, "min_score": 0.0, "nms": 0.9, "test_side": 96}
    network = tasks.load_trained(tmp_path / "run", **chosen).network
    assert isinstance(network, Detector)
    made = network.settings
    assert (made.detections, made.score, made.nms, made.min_size) == (9, 0.0, 0.9, 96)
    found = network([torch.rand(3, 50, 70)])[0]
    assert 4 < len(found["boxes"]) <= 9
    assert tasks.evaluate(tmp_path / "run", str(data), **chosen)["cap"] == 9


def test_boxes_alone_are_learned_without_masks(coco: Make, tmp_path: Path) -> None:
    result = train(run_of(coco(masks=False, train=2, test=1), tmp_path / "run", head="retinanet"))
    assert "box_ap" in result.score
    assert "mask_ap" not in result.score


def test_activations_may_be_computed_anew(coco: Make, tmp_path: Path) -> None:
    data = coco(train=2, test=1)
    plain, thrifty = (train(run_of(data, tmp_path / str(given), checkpointing=given)) for given in (False, True))
    assert thrifty.records[-1].train_loss == pytest.approx(plain.records[-1].train_loss, rel=1e-4)


def test_a_crowd_without_a_shape_is_judged_as_its_box(coco: Make) -> None:
    data = coco()
    file = data / "annotations" / "instances_val.json"
    content = json.loads(file.read_text())
    (crowd,) = (one for one in content["annotations"] if one["iscrowd"])
    crowd.pop("segmentation")
    file.write_text(json.dumps(content))
    job, opened = settled(data)
    assert job.settings.masks
    truth = TASK.work(job, opened, torch.device("cpu")).truth(0)
    left, top, width, height = crowd["bbox"]
    inside = np.zeros(opened.test.sizes[0], np.bool_)
    inside[top : top + height, left : left + width] = True
    assert truth.masks is not None
    assert np.array_equal(truth.masks[int(truth.crowd.argmax())].mask(), inside)


def settled(data: Path, **changes: Any) -> tuple[Job[Detection], Any]:
    settings = Detection(**changes)
    opened = TASK.open(str(data), settings)
    return TASK.settle(Job("mavit_tiny", SMALL, Recipe(compile=True), settings), opened), opened


def test_the_data_decides_masks_and_the_cap_and_nothing_is_compiled(coco: Make) -> None:
    data = coco()
    job, opened = settled(data)
    assert (job.settings.masks, job.settings.detections, job.settings.test_side) == (True, 100, 800)
    assert job.recipe.compile is False
    assert job.facts == {"class_names": ["box", "bar"], "categories": [3, 7]}
    assert "at most 100 detections an image" in TASK.summary(job, opened)
    assert opened.name not in TASK.summary(job, opened)  # the plan says it before
    job, opened = settled(data, detections=2)
    assert TASK.summary(job, opened).endswith("at most 2 detections an image, though an image has 3 objects")
    assert settled(data, head="retinanet")[0].settings.masks is False


def test_an_image_of_many_objects_raises_the_cap_above_cocos(coco: Make) -> None:
    data = coco()
    file = data / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    content["annotations"] += [{**content["annotations"][0], "id": 1000 + i} for i in range(120)]
    file.write_text(json.dumps(content))
    assert settled(data)[0].settings.detections == 200


def test_masks_are_refused_where_there_are_none(coco: Make) -> None:
    with pytest.raises(ValueError, match=r"masks: expected none, as objects in .* without a segmentation, got true"):
        settled(coco(masks=False), masks=True)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"head": "yolo"}, "head: expected one of retinanet, rcnn, cascade"),
        ({"masks": True, "head": "retinanet"}, "RetinaNet finds boxes alone"),
        ({"jitter": (0.1, 2.0)}, "crop: expected height and width beside jitter"),
        ({"box_loss": "giou"}, "these are for cascades"),
        ({"anchor_sizes": (8.0, 16.0)}, "anchor_sizes: expected 5 numbers above 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Detection(**given)


def test_published_recipes_say_what_was_published() -> None:
    once, thrice, cascade = (TASK.recipes[name] for name in ("mask_rcnn_1x", "mask_rcnn_3x", "cascade_3x"))
    assert (once.recipe.epochs, once.recipe.milestones, once.recipe.lr) == (12, (8, 11), 4e-4)
    assert (thrice.recipe.epochs, thrice.recipe.milestones) == (36, (27, 33))
    assert thrice.settings.as_dict()["short_sides"] == tuple(range(480, 801, 32))
    detector = cascade.settings.changed(masks=True)
    assert isinstance(detector, Detection)
    made = detector.detector()
    assert (made.kind, made.box_head, made.box_norm, made.class_aware, made.box_loss) == (
        "cascade_mask_rcnn", "4conv1fc", "batch", True, "giou",
    )  # fmt: skip
    assert TASK.preset("mavit_base", None).settings.as_dict()["drop_path"] == 0.4
    with pytest.raises(ValueError, match="recipe: expected one of retinanet_1x"):
        TASK.preset("mavit_tiny", "4x")


def test_weights_of_a_classifier_start_a_backbone_and_those_of_a_detector_all_but_its_classes(coco: Make) -> None:
    import timm

    job, _ = settled(coco(), channels=32)
    network, other = TASK.network(job), TASK.network(job)
    classifier = timm.create_model("mavit_tiny", num_classes=5, **SMALL)
    TASK.start(network, classifier.state_dict(), "weights")
    assert isinstance(network, Detector)
    body = network.backbone.features.body.state_dict()
    assert torch.equal(body["model.stem.conv0.weight"], classifier.state_dict()["stem.conv0.weight"])
    fewer = TASK.network(Job(job.model, job.model_args, job.recipe, job.settings, {**job.facts, "class_names": ["a"]}))
    TASK.start(other, fewer.state_dict(), "weights")
    kept = fewer.state_dict()
    for name, tensor in other.state_dict().items():
        assert tensor.shape != kept[name].shape or torch.equal(tensor, kept[name]), name
    with pytest.raises(ValueError, match="these weights are of another network"):
        TASK.start(network, {"stem.conv0.weight": torch.zeros(1)}, "weights")


def test_a_network_that_asks_for_too_much_room_or_for_files_is_refused(coco: Make) -> None:
    job, _ = settled(coco())
    with pytest.raises(ValueError, match="there is room for 1,000"):
        TASK.network(job, room=1000)
    wrong = Job(job.model, {"checkpoint_path": "weights.pth"}, job.recipe, job.settings, job.facts)
    with pytest.raises(ValueError, match="checkpoint_path"):
        TASK.network(wrong)


def test_results_in_cocos_json_are_judged_by_pycocotools_as_by_us(coco: Make, seed: int) -> None:
    pytest.importorskip("pycocotools")
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    root, random = coco(), np.random.default_rng(seed)
    data = TASK.open(str(root), Detection())
    truths = [one.truth(size, masks=True) for one, size in zip(data.test.objects, data.test.sizes, strict=True)]
    found: list[Found] = []
    rows: list[dict[str, Any]] = []
    for truth, number in zip(truths, data.test.numbers, strict=True):
        boxes = truth.boxes + random.normal(0, 1, truth.boxes.shape)
        found.append(Found(boxes.round(2), truth.labels, random.random(len(boxes)).round(5), truth.masks))
        rows += as_coco(found[-1], number, data.categories)
    theirs: Any = COCO(str(root / "annotations" / "instances_val.json"))
    judge: Any = COCOeval(theirs, theirs.loadRes(rows), "bbox")
    judge.evaluate()
    judge.accumulate()
    judge.summarize()
    assert evaluate(truths, found, 2, "box", 100).ap == pytest.approx(judge.stats[0], abs=1e-9)


def test_at_most_so_many_images_are_taken_for_a_trial_and_mechanisms_are_compared(coco: Make) -> None:
    data = TASK.limited(TASK.open(str(coco()), Detection()), 2)
    assert data.sizes == (2, 2)
    assert TASK.variant("mavit_tiny", "none") == {"mechanism": "none", "stage_types": "llll"}
    assert set(TASK.variants("mavit_tiny")) >= {"softmax", "mala", "none"}
    assert TASK.variants("resnet18") == {"own": TASK.variant("resnet18", "own")} == {"own": {}}
    with pytest.raises(ValueError, match="resnet18 has no mechanism to choose"):
        TASK.variant("resnet18", "mala")

"""Segmentation as a task: it learns, is judged by counts, answers with maps, and refuses what does not fit."""

from __future__ import annotations

import dataclasses
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from affinear.models.heads import Segmenter
from affinear.tasks.images.backbone import backbone_weights
from affinear.tasks.segment import TASK
from affinear.tasks.segment.metric import confusion, numbers_of
from affinear.tasks.segment.pairs import UNLABELLED, Scenes
from affinear.tasks.segment.samples import Crops
from affinear.tasks.segment.settings import Drawing, Segmentation
from affinear.tasks.segment.work import SegmentWork, alike, pixel_loss
from affinear.train.corrupt import TooManyCorrupt
from affinear.train.draws import Draw
from affinear.train.recipe import Recipe
from affinear.train.task import Job, Trained

from . import scenes

SMALL: dict[str, Any] = {"embed_dims": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    return TASK.open(str(scenes.write(tmp_path_factory.mktemp("data") / "streets")), Segmentation())


@pytest.fixture(scope="module")
def trained(data: Scenes) -> Trained[Scenes, Segmentation]:
    """Not trained at all, which the tests do not mind."""
    job = job_for(data)
    return Trained(TASK, job, TASK.network(job).eval())


def job_for(data: Scenes, recipe: Recipe | None = None, **settings: Any) -> Job[Segmentation]:
    plain = Recipe(batch_size=4, workers=0) if recipe is None else recipe
    return TASK.settle(Job("mavit_tiny", SMALL, plain, Segmentation(**settings)), data)


def work_for(data: Scenes, **settings: Any) -> SegmentWork:
    return TASK.work(job_for(data, **settings), data, CPU)


def test_what_is_left_open_is_settled_from_data_and_network(data: Scenes):
    settings = job_for(data).settings
    assert settings.crop == (64, 64)  # the smallest photo has 64 rows
    assert settings.window == (64, 64)
    assert settings.window_stride == (43, 43)
    assert settings.mean == pytest.approx((0.485, 0.456, 0.406))
    assert job_for(data).facts == {"classes": ["sky", "road", "car"]}


@pytest.mark.parametrize(("head", "rate", "steps"), [("semantic_fpn", 2e-3, 12), ("upernet", 1e-2, 3)])
def test_a_batch_is_learnt_from(data: Scenes, head: str, rate: float, steps: int):
    work = work_for(data, head=head, zoom=(0.25, 0.75), crop=(32, 32))
    network = TASK.network(work.job)
    batch = work.ready(next(iter(work.train_loader())))
    assert isinstance(batch, Crops)
    assert work.pads
    before = work.loss(network, batch)
    assert before.item() == pytest.approx(np.log(3) * (1.4 if head == "upernet" else 1), rel=0.2)
    optimizer = torch.optim.AdamW(network.parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        work.loss(network, batch).backward()
        optimizer.step()
    assert work.loss(network, batch).item() < 0.9 * before.item()


def test_what_is_not_photo_is_the_mean_colour_and_told_to_the_backbone(data: Scenes):
    work = work_for(data, zoom=(0.5, 0.5), photometric=False)
    batch = work.ready(next(iter(work.train_loader())))
    outside = torch.ones(64, 64, dtype=torch.bool)
    outside[: batch.sizes[0, 0], : batch.sizes[0, 1]] = False
    assert outside.any()
    assert not batch.images[0][:, outside].any()
    assert (batch.labels[0][outside] == UNLABELLED).all()

    told: list[Any] = []

    class Listening(nn.Module):
        def forward(self, images: Tensor, sizes: Tensor | None) -> list[Tensor]:
            told.append(sizes)
            return [images]

    work.loss(Listening(), batch)
    assert torch.equal(told[0], batch.sizes)
    published = work_for(data, zoom=(0.5, 0.5), mask_padding=False)
    published.loss(Listening(), batch)
    full = work_for(data, zoom=(1.0, 2.0))
    full.loss(Listening(), batch)
    assert told[1:] == [None, None]


def test_the_loss_is_the_mean_over_labelled_pixels():
    logits, labels = torch.randn(2, 3, 4, 4), torch.randint(-1, 3, (2, 8, 8))
    large = F.interpolate(logits, size=(8, 8), mode="bilinear", align_corners=False).permute(0, 2, 3, 1)
    known = labels >= 0
    expected = F.cross_entropy(large[known], labels[known])
    torch.testing.assert_close(pixel_loss(logits, labels), expected)
    logits.requires_grad_()
    nothing = pixel_loss(logits, torch.full((2, 8, 8), -1))
    nothing.backward()
    assert nothing.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_the_score_counts_every_photo_once_at_its_own_size(data: Scenes, trained: Trained[Scenes, Segmentation]):
    work, network = work_for(data, test_batch=3, short_side=32), trained.network
    score = work.score(network, map(work.ready, work.test_loader()), Accelerator(cpu=True))
    counts = torch.zeros(3, 3, dtype=torch.int64)
    for i in range(len(data.test)):
        photo, labels = data.test[i]
        factor = 32 / min(photo.size)
        small = photo.resize((round(photo.width * factor), round(photo.height * factor)), Image.Resampling.BILINEAR)
        image = torch.from_numpy(np.asarray(small).astype(np.float32) / 255).permute(2, 0, 1)
        mean, std = (torch.tensor(x)[:, None, None] for x in (work.job.settings.mean, work.job.settings.std))
        with torch.no_grad():
            [logits] = network(((image - mean) / std)[None])
        for size in (image.shape[1:], labels.shape):
            logits = F.interpolate(logits, size=tuple(size), mode="bilinear", align_corners=False)
        counts += confusion(torch.from_numpy(labels)[None], logits.argmax(1), 3)
    assert score.count == 4
    assert {name: pytest.approx(value, abs=1e-3) for name, value in score.numbers.items()} == numbers_of(counts)
    assert [(part.name, part.count) for part in score.parts] == [(name, 4) for name in scenes.CLASSES]


def test_photos_of_one_size_are_judged_together(data: Scenes):
    work = work_for(data, test_batch=5)
    [batch] = list(work.test_loader())
    groups = list(alike(batch))
    assert sorted(len(images) for images, _ in groups) == [2, 2]  # and the fifth only filled the batch up


def test_photos_that_do_not_decode_are_passed_over_and_named_until_there_are_too_many(tmp_path: Path):
    data = TASK.open(str(scenes.write(tmp_path / "many", (101, 1), ((32, 32),))), Segmentation())
    for i in (3, 7):
        Path(data.train.photos[i]).write_bytes(b"no photo")
    data = TASK.open(str(tmp_path / "many"), Segmentation())
    work = work_for(data, recipe=Recipe(batch_size=4, workers=0, unreadable=0.01))
    samples: Any = work.train_loader().dataset
    samples[Draw(3, 0)]
    assert work.skipped.names == (data.train.photos[3],)
    with pytest.raises(TooManyCorrupt, match=r"2 of the 101 train images cannot be read, .*scene3.jpg, .*scene7.jpg"):
        samples[Draw(7, 0)]


@pytest.mark.parametrize("memory", [False, True])
def test_a_photo_that_was_copied_in_part_is_named_before_training(tmp_path: Path, memory: bool):
    settings = Segmentation(memory=memory)
    data = TASK.open(str(scenes.write(tmp_path / "some", (30, 2), ((32, 32),))), settings)
    for half, number in ((data.train, 4), (data.test, 1)):
        photo = Path(half.photos[number])
        photo.write_bytes(photo.read_bytes()[: photo.stat().st_size // 2])
    data = TASK.open(str(tmp_path / "some"), settings)
    assert data.sizes == (30, 2)
    work = work_for(data)
    work.look_through()
    assert work.skipped.names == (data.train.photos[4], data.test.photos[1])
    Path(data.train.photos[6]).write_bytes(b"no photo")
    with pytest.raises(TooManyCorrupt, match=r"2 of the 30 train images cannot be read, .*scene4.jpg, .*scene6.jpg"):
        work_for(TASK.open(str(tmp_path / "some"), settings)).look_through()


def test_a_map_that_is_no_image_is_passed_over_whatever_photos_are_resized_to(tmp_path: Path):
    root = scenes.write(tmp_path / "some", (30, 2), ((32, 48),))
    number = int(np.random.default_rng().integers(30))
    (root / f"annotations/training/scene{number}.png").write_bytes(b"no map")
    data = TASK.open(str(root), Segmentation())
    work = work_for(data, short_side=64, long_side=128, crop=(32, 32), zoom=(1.0, 1.0))
    work.look_through()
    assert work.skipped.names == (data.train.photos[number],)
    assert not work.pads


def test_crops_do_not_depend_on_who_reads_them(data: Scenes):
    one, other = (next(iter(work_for(data).train_loader())) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_answers_are_maps_in_the_numbers_of_the_data_and_pictures(data: Scenes, trained: Trained[Scenes, Segmentation]):
    good, bad = TASK.predict(trained, [data.test.photos[0], "nowhere.jpg"], Drawing())
    assert bad.error is not None
    assert "nowhere.jpg" in bad.error
    assert good.error is None
    assert sum(good.content["shares"].values()) == pytest.approx(1)
    numbers = np.asarray(Image.open(BytesIO(good.files["scene0_classes.png"])))
    assert numbers.shape == data.test.sizes[0]
    assert set(np.unique(numbers)) <= {1, 2, 3}
    assert good.content["size"] == list(numbers.shape)
    picture = Image.open(BytesIO(good.files["scene0_overlay.jpg"]))
    assert (picture.height, picture.width) == numbers.shape


def test_the_report_shows_the_hardest_photos_beside_their_truth(data: Scenes, trained: Trained[Scenes, Segmentation]):
    work = work_for(data, test_batch=1)  # as the report asks: in larger batches, single pixels may round otherwise
    section, classes = work.report(trained.network)
    assert section.html.count("<figure") == 3 * 4
    assert section.html.count("truth") >= 4
    assert all(name in section.html for name in scenes.CLASSES)
    for part in work.score(trained.network, map(work.ready, work.test_loader()), Accelerator(cpu=True)).parts:
        told = (part.name, part.count, *(f"{part.numbers[name]:.1%}" for name in ("miou", "macc")))
        assert "".join(f"<td>{cell}</td>" for cell in told) in classes.html


def test_weights_of_a_classifier_begin_the_backbone(data: Scenes):
    classifier = timm.create_model("mavit_tiny", num_classes=7, **SMALL)
    network = TASK.network(job_for(data))
    TASK.start(network, classifier.state_dict(), "classifier.safetensors")
    for name, tensor in network.get_submodule("backbone.body.model").state_dict().items():
        assert torch.equal(tensor, classifier.state_dict()[name])
    with pytest.raises(ValueError, match=r"classifier.safetensors: these weights are of another network: .*missing"):
        TASK.start(network, timm.create_model("resnet18").state_dict(), "classifier.safetensors")


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny_patch4_window7_224"])
def test_weights_of_a_classifier_of_others_have_names_in_their_backbone(name: str):
    with torch.device("meta"):
        own = Segmenter(name).backbone.body.state_dict()
        given = timm.create_model(name).state_dict()
    assert set(backbone_weights(given, own)) == set(own)


def test_weights_of_a_segmenter_with_other_classes_keep_all_but_the_classifier(data: Scenes):
    network = TASK.network(job_for(data))
    other = Segmenter("mavit_tiny", num_classes=9, model_args=SMALL)
    fresh = network.get_parameter("head.classifier.conv.weight").clone()
    TASK.start(network, other.state_dict(), "other.safetensors")
    assert torch.equal(network.get_parameter("head.classifier.conv.weight"), fresh)
    assert torch.equal(network.get_parameter("head.neck.lateral.0.weight"), other.head.neck.lateral[0].weight)  # type: ignore[union-attr]


def test_other_classes_are_refused(data: Scenes, trained: Trained[Scenes, Segmentation]):
    other = dataclasses.replace(data, classes=("sky", "street", "car"))
    TASK.check_data(trained, data)
    with pytest.raises(ValueError, match=r"expected the 3 classes .* got 3; the first that differs is 'road', not 'st"):
        TASK.check_data(trained, other)


def test_upernet_refuses_one_crop_at_a_time(data: Scenes):
    TASK.check_parts(job_for(data), 1)
    with pytest.raises(ValueError, match="expected two crops or more for each process"):
        TASK.check_parts(job_for(data, head="upernet"), 1)


def test_a_job_out_of_a_file_is_checked(data: Scenes):
    job = job_for(data)
    TASK.check_job(job)
    for wrong, said in (
        (dataclasses.replace(job, facts={}), "classes: expected names in a list"),
        (dataclasses.replace(job, settings=job.settings.changed(crop=None)), "crop: expected what the weights"),
        (dataclasses.replace(job, settings=job.settings.changed(crop=(10**6, 8))), "sides of at most"),
    ):
        with pytest.raises(ValueError, match=said):
            TASK.check_job(wrong)
    with pytest.raises(ValueError, match="there is room for 10"):
        TASK.network(job, room=10)
    with pytest.raises(ValueError, match="takes no 'checkpoint_path'"):
        TASK.network(dataclasses.replace(job, model_args={"checkpoint_path": "x"}))


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="long_side: expected at least short_side, 512, got 256"):
        Segmentation(short_side=512, long_side=256)
    with pytest.raises(ValueError, match="zoom: expected two numbers above 0 that rise"):
        Segmentation(zoom=(2.0, 0.5))
    with pytest.raises(ValueError, match=r"window_stride: expected at most the window's sides, 32 x 64, .* 32 x 65"):
        Segmentation(window=(32, 64), window_stride=(32, 65))


def test_windows_of_the_crops_size_leave_no_pixel_out(data: Scenes):
    assert job_for(data, crop=(32, 64), window_stride=(32, 64)).settings.window == (32, 64)
    with pytest.raises(ValueError, match=r"window_stride: expected at most the window's sides, 32 x 64, .* 33 x 64"):
        job_for(data, crop=(32, 64), window_stride=(33, 64))


def test_published_recipes_have_the_backbones_depth():
    assert TASK.preset("mavit_large", "upernet_160k").settings.drop_path == 0.55  # type: ignore[attr-defined]
    assert TASK.preset("mavit_tiny", None).recipe.steps == 80_000
    assert TASK.preset("mavit_large", "small").settings.drop_path == 0  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="recipe: expected one of semantic_fpn_80k, upernet_160k, small, got 'smal'"):
        TASK.preset("mavit_tiny", "smal")


def test_every_variant_of_a_comparison_is_a_network():
    arms = TASK.variants("mavit_tiny")
    assert list(arms) == ["softmax", "linear", "inline", "nala", "mala", "none"]
    for name, shown in (("linear", "linear (linear)"), ("none", "no attention")):
        with torch.device("meta"):
            network = Segmenter("mavit_tiny", num_classes=3, model_args={**SMALL, **arms[name]})
        assert repr(network).count(shown) == 4
    assert TASK.variants("resnet18") == {"own": {}}
    with pytest.raises(ValueError, match="expected 'own', as resnet18 has no mechanism to choose, got 'mala'"):
        TASK.variant("resnet18", "mala")

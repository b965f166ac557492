"""Trained weights are measured and used as they were trained, and refused where they do not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from affinear.tasks import evaluate, load_trained
from affinear.tasks.classify import network as networks
from affinear.tasks.classify import predict, recipe_for
from affinear.tasks.classify.data import NO_IMAGE, ArraySource, Images, as_tensor, open_image
from affinear.tasks.classify.samples import Batch
from affinear.tasks.classify.score import score
from affinear.train import Result, Run, curves, train

MODEL = "inline_deit_tiny"
SMALL: dict[str, Any] = {"depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 4}
NAMES = ("猫", "dog", "Vögel")


@pytest.fixture(scope="module")
def images() -> Images:
    draw = np.random.default_rng()

    def half(name: str, size: int) -> ArraySource:
        return ArraySource(name, draw.integers(0, 256, (size, 3, 8, 8), dtype=np.uint8), draw.integers(0, 3, size))

    return Images("noise", half("train", 40), half("test", 37), NAMES, (8, 8), 3)


@pytest.fixture(scope="module")
def trained(images: Images, tmp_path_factory: pytest.TempPathFactory) -> Result:
    recipe = recipe_for(MODEL, "tiny", epochs=2, batch_size=8, image_size=(8, 12), workers=0, lr=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw", lambda output, *given: (output / curves.NAME).write_bytes(b""))
        return train(Run(MODEL, "noise", tmp_path_factory.mktemp("run") / "run", recipe, SMALL), data=images)


def test_a_score_counts_what_a_plain_loop_counts():
    logits, targets = torch.randn(50, 7), torch.randint(7, (50,))
    targets[torch.randperm(50)[:5]] = NO_IMAGE
    batches = [Batch(*pair) for pair in zip(logits.split(8), targets.split(8), strict=True)]
    names = tuple("abcdefg")
    found = score(lambda pixels: pixels, batches, names, Accelerator(cpu=True))
    kept = targets != NO_IMAGE
    order = logits[kept].argsort(1, descending=True)
    right = order == targets[kept][:, None]
    assert found.count == 45
    assert found["top1"] == pytest.approx(right[:, 0].double().mean().item())
    assert found["top5"] == pytest.approx(right[:, :5].any(1).double().mean().item())
    assert found["loss"] == pytest.approx(F.cross_entropy(logits[kept], targets[kept]).item(), rel=1e-5)
    for number, part in enumerate(found.parts):
        of_class = targets[kept] == number
        assert (part.name, part.count) == (names[number], int(of_class.sum()))
        assert part.numbers["top1"] == pytest.approx(right[of_class, 0].double().mean().item() if of_class.any() else 0)


def test_a_run_scores_as_it_did_when_it_was_trained(trained: Result, images: Images):
    best = trained.records[trained.best_epoch - 1].test
    assert best is not None
    for source in (trained.weights.parent, trained.weights):
        found = evaluate(source, images, batch_size=5)
        assert (found["top1"], found["top5"], found.count) == (best["top1"], best["top5"], 37)
        assert found["loss"] == pytest.approx(best["loss"], rel=1e-5)
    assert evaluate(trained.last, images)["top1"] == trained.value


def test_predictions_are_those_of_the_network(trained: Result, tmp_path: Path):
    paths = [tmp_path / name for name in ("照片.png", "broken.jpg", "grey.png")]
    pixels = np.random.default_rng().integers(0, 256, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(paths[0])
    paths[1].write_bytes(b"no image at all")
    Image.fromarray(pixels[..., 0]).save(paths[2])
    ready = load_trained(trained.weights)
    batching = networks.batching(ready.job)
    assert batching.image_size == (8, 12)
    found = list(predict(ready, [*paths, tmp_path / "absent.png"]))
    assert [answer.source for answer in found] == [str(path) for path in (*paths, tmp_path / "absent.png")]
    assert [answer.error is None for answer in found] == [True, False, True, False]
    assert found[3].error == "there is no such file"
    with torch.inference_mode():
        chances: Tensor = ready.network(as_tensor(open_image(paths[0]), batching)[None])[0].softmax(0)
    guesses = found[0].content["guesses"]
    told = {guess["name"]: guess["probability"] for guess in guesses}
    assert told == pytest.approx(dict(zip(NAMES, chances.tolist(), strict=True)))
    assert list(told.values()) == sorted(told.values(), reverse=True)


def test_other_classes_are_refused(trained: Result, images: Images):
    with pytest.raises(ValueError, match="class 1 is 'dog' for the network and 'wolf' in noise"):
        evaluate(trained.weights, replace(images, class_names=("猫", "wolf", "Vögel")))
    with pytest.raises(ValueError, match="tells 3 classes apart, noise has 2"):
        evaluate(trained.weights, replace(images, class_names=("猫", "dog")))


def test_weights_that_are_not_there_or_of_another_network_are_refused(trained: Result, tmp_path: Path):
    with pytest.raises(ValueError, match="these weights are of inline_deit_tiny, not of mavit_tiny"):
        load_trained(trained.weights, "mavit_tiny")
    with pytest.raises(ValueError, match="got nothing of that name"):
        load_trained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"got a folder without best\.safetensors"):
        load_trained(tmp_path)


def test_bare_weights_need_the_name_of_their_network(trained: Result, tmp_path: Path, images: Images):
    path = tmp_path / "bare.safetensors"
    save_file(load_file(trained.weights), path)
    with pytest.raises(ValueError, match="does not tell which network it belongs to; name it with --model"):
        load_trained(path)
    ready = load_trained(path, MODEL, model_args=SMALL, image_size=(8, 12))
    assert ready.job.facts["class_names"] == []
    assert evaluate(ready, images).count == 37
    with pytest.raises(ValueError, match="these weights are of another network"):
        load_trained(path, MODEL, model_args={**SMALL, "depth": 2})

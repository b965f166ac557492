"""The engine trains as a hand-written loop would, and stops with a reason where it cannot go on."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from timm.optim import create_optimizer_v2
from torch import Tensor, nn
from torch.nn import functional as F

from affinear.tasks.classify import ClassifySettings, data, recipe_for
from affinear.tasks.classify import network as networks
from affinear.tasks.classify.data import ArraySource, CorruptImage, Images, Skipped, TooManyCorrupt
from affinear.tasks.classify.task import ClassifyWork
from affinear.train import NonFinite, OtherRun, Progress, Recipe, Run, SaveError, Score, Setup, curves, engine, train
from affinear.train.engine import settled
from affinear.train.kit import make_schedule
from affinear.train.records import read_log
from affinear.train.seeding import seed_of

MODEL = "inline_deit_tiny"
SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 16, "num_heads": 2, "patch_size": 4}


@pytest.fixture(autouse=True)
def no_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than these runs; one test looks at the picture."""
    if request.node.name != "test_a_run_writes_down_what_it_was_and_how_it_went":
        monkeypatch.setattr(curves, "draw", lambda output, *given: (output / curves.NAME).write_bytes(b""))


def images_of(count: int = 40, classes: int = 3) -> Images:
    """Noise in two colours of grey, fresh in each test."""
    draw = np.random.default_rng(torch.initial_seed())

    def half(name: str, size: int) -> ArraySource:
        labels = draw.integers(0, classes, size)
        return ArraySource(name, draw.integers(0, 256, (size, 1, 8, 8), dtype=np.uint8), labels)

    return Images(
        "noise", half("train", count), half("test", 11), tuple(f"class {i}" for i in range(classes)), (8, 8), 1
    )


def recipe_of(**changes: Any) -> Setup:
    plain = {"epochs": 2, "batch_size": 8, "image_size": (8, 8), "workers": 0, "log_every": 1, "pad": 1}
    return recipe_for(MODEL, "tiny", **{**plain, **changes})


def run_of(output: Path, model_args: dict[str, Any] | None = None, **changes: Any) -> Run:
    return Run(MODEL, "noise", output, recipe_of(**changes), SMALL if model_args is None else model_args)


def by_hand(images: Images, run: Run) -> dict[str, Tensor]:
    """The same training, written out."""
    job = settled(run, images)
    recipe, batching = job.recipe, networks.batching(job)
    loader, normalize = data.train_loader(images, batching, Skipped()), data.Normalize(batching)
    torch.manual_seed(seed_of(recipe.seed, 0))
    model = timm.create_model(MODEL, num_classes=3, in_chans=1, img_size=(8, 8), **SMALL)
    optimizer = create_optimizer_v2(model, "adamw", recipe.lr, recipe.weight_decay)
    schedule, step = make_schedule(optimizer, recipe, len(loader)), 0
    for epoch in range(recipe.epochs):
        loader.batch_sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
        for pixels, targets in loader:
            loss = F.cross_entropy(model(normalize(pixels)), targets, label_smoothing=job.settings.smoothing)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad or 1e9)
            optimizer.step()
            step += 1
            schedule.step_update(step)
    return model.state_dict()


def test_it_trains_as_a_loop_written_by_hand(tmp_path: Path):
    images, run = images_of(), run_of(tmp_path / "run")
    result = train(run, data=images)
    for name, tensor in by_hand(images, run).items():
        torch.testing.assert_close(load_file(result.last)[name], tensor)


def test_it_learns(tmp_path: Path):
    recipe = recipe_of(epochs=4, batch_size=32, lr=1e-2, log_every=20)
    args = {"depth": 1, "embed_dim": 32, "num_heads": 2, "patch_size": 4, "global_pool": "avg"}
    result = train(Run(MODEL, "digits", tmp_path / "run", recipe, args))
    assert result.records[-1].train_loss < result.records[0].train_loss - 0.3
    assert result.best > 0.3


def test_a_run_writes_down_what_it_was_and_how_it_went(tmp_path: Path):
    images = images_of()
    result = train(run_of(tmp_path / "run", ema_decay=0.9), data=images)
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (told["model"], told["data"], told["facts"]["class_names"]) == (MODEL, "noise", list(images.class_names))
    assert Recipe().changed(**told["recipe"]).precision == "no"
    assert ClassifySettings().changed(**told["settings"]).image_size == (8, 8)
    assert told["machine"]["torch"] == torch.__version__
    lines = read_log(tmp_path / "run")
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 11))
    assert [line["test"] for line in lines if line["kind"] == "epoch"] == [record.test for record in result.records]
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert result.parameters == sum(
        p.numel() for p in timm.create_model(MODEL, in_chans=1, num_classes=3, img_size=8, **SMALL).parameters()
    )
    assert all(record.averaged is not None for record in result.records)


@pytest.mark.parametrize("better", ["averaged", "last"])
def test_a_report_shows_the_weights_that_were_judged_the_better_ones(
    better: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shown: list[dict[str, Tensor]] = []

    def report(self: object, network: nn.Module) -> list[object]:
        shown.append({name: tensor.clone() for name, tensor in network.state_dict().items()})
        return []

    scores = itertools.cycle([0.7, 0.2] if better == "averaged" else [0.2, 0.7])  # averaged weights are scored first
    monkeypatch.setattr(engine, "scored", lambda *_: Score({"top1": next(scores), "top5": 1.0, "loss": 1.0}, 11))
    monkeypatch.setattr(ClassifyWork, "report", report)
    result = train(run_of(tmp_path / "run", ema_decay=0.9), data=images_of())
    last = load_file(result.last)
    same = all(torch.equal(shown[0][name], tensor) for name, tensor in last.items())
    assert (len(shown), same) == (1, better == "last")


def test_a_finished_run_is_not_run_again(tmp_path: Path):
    images, run = images_of(), run_of(tmp_path / "run")
    first = train(run, data=images)
    before = {path: path.stat().st_mtime_ns for path in run.output.iterdir()}

    class Refuse(Progress):
        def step(self, step: int, loss: float, amount: float) -> None:
            raise AssertionError("it trains")

    again = train(run, data=images, progress=Refuse())
    assert again.records == first.records
    assert {path: path.stat().st_mtime_ns for path in run.output.iterdir()} == before


def test_many_runs_in_one_process_do_not_meet(tmp_path: Path):
    images = images_of()
    first = train(run_of(tmp_path / "a", mixup=0.8, drop_path=0.2), data=images)
    train(run_of(tmp_path / "b", accumulate=2, seed=5), data=images)
    again = train(run_of(tmp_path / "c", mixup=0.8, drop_path=0.2), data=images)
    one, other = load_file(first.last), load_file(again.last)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_randomness_of_others_is_left_alone(tmp_path: Path):
    def states() -> list[Any]:
        return [torch.random.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]

    images, before = images_of(), states()
    train(run_of(tmp_path / "run", mixup=0.8, drop_path=0.2), data=images)
    torch.set_rng_state(torch.tensor(before[0], dtype=torch.uint8))
    assert states()[1:] == before[1:]


def test_parts_of_a_step_make_the_whole(tmp_path: Path):
    images = images_of()
    whole = load_file(train(run_of(tmp_path / "a", drop_path=0.0), data=images).last)
    parts = load_file(train(run_of(tmp_path / "b", accumulate=2, drop_path=0.0), data=images).last)
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-3, atol=2e-5)


def test_images_need_not_be_square(tmp_path: Path):
    result = train(run_of(tmp_path / "run", image_size=(12, 20), epochs=1), data=images_of())
    assert load_file(result.last)["position.table"].shape[1:3] == (3, 5)


@pytest.mark.parametrize("opt", ["sgd", "lamb", "lion"])
def test_other_optimizers_and_epochs_that_are_not_tested(tmp_path: Path, opt: str):
    result = train(run_of(tmp_path / "run", opt=opt, eval_every=3, epochs=4), data=images_of(20))
    assert [record.test is None for record in result.records] == [True, True, False, False]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": "mavit_tiny", "model_args": {}}, "model is 'inline_deit_tiny' there and 'mavit_tiny' now"),
        ({"model_args": {**SMALL, "depth": 1}}, "model_args"),
        ({"setup": recipe_of(lr=0.5)}, "recipe.lr is 0.001 there and 0.5 now"),
    ],
)
def test_a_folder_of_another_run_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str):
    images, run = images_of(20), run_of(tmp_path / "run", epochs=1)
    run = replace(run, setup=recipe_of())
    train(run, data=images)
    before = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(OtherRun, match=sentence):
        train(replace(run, **changes), data=images)
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_other_data_and_other_classes_are_refused(tmp_path: Path):
    images, run = images_of(20), run_of(tmp_path / "run", epochs=1)
    train(run, data=images)
    with pytest.raises(OtherRun, match="class_names: number 1 is 'class 1' there and 'wolf' now"):
        train(run, data=replace(images, class_names=("class 0", "wolf", "class 2")))
    with pytest.raises(OtherRun, match="data is 'noise' there and 'other' now"):
        train(run, data=replace(images, name="other"))
    with pytest.raises(OtherRun, match="class_names: 3 there and 4 now"):
        train(run, data=images_of(20, classes=4))


def test_workers_and_intervals_may_change(tmp_path: Path):
    images = images_of(20)
    train(run_of(tmp_path / "run", epochs=1), data=images)
    assert train(run_of(tmp_path / "run", epochs=1, workers=1, save_every=3), data=images).records


def test_beginning_anew_needs_force(tmp_path: Path):
    images, run = images_of(20), run_of(tmp_path / "run", epochs=1)
    train(run, data=images)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(OtherRun, match=r"holds a run already\. Leave --no-resume out"):
        train(run, data=images, resume=False)
    other = run_of(tmp_path / "run", epochs=2)
    assert len(train(other, data=images, resume=False, force=True).records) == 2
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_folder_of_other_things_is_refused(tmp_path: Path):
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    with pytest.raises(OtherRun, match="holds other files and no run"):
        train(run_of(tmp_path), data=images_of(20))
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


def test_a_run_that_was_killed_as_it_began_leaves_a_folder_for_the_next(tmp_path: Path):
    images, run = images_of(20), run_of(tmp_path / "run", epochs=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.4711.part").write_text('{"mod')
    (tmp_path / "run" / f".{'0' * 32}").touch()
    assert len(train(run, data=images).records) == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SaveError, match=r"cannot be written to: Not a directory\. Give --output another folder"):
        train(run_of(tmp_path / "file" / "run"), data=images_of(20))


def test_a_full_disk_stops_the_run_and_keeps_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    images, run, count = images_of(), run_of(tmp_path / "run", save_every=3), [0]
    save = torch.save

    def fill_up(*given: Any) -> None:
        count[0] += 1
        if count[0] == 2:
            raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 512 vs 400")
        save(*given)

    monkeypatch.setattr(torch, "save", fill_up)
    with pytest.raises(SaveError, match=r"no space is left on the disk. The one of step 3 is intact"):
        train(run, data=images)
    assert sorted(path.name for path in run.output.glob("step-*")) == ["step-000000003"]
    whole = load_file(train(run_of(tmp_path / "whole"), data=images).last)
    resumed = load_file(train(run, data=images).last)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


class Sabotage(Progress):
    """Breaks a network after some step."""

    def __init__(self, after: int, deed: Callable[[], None]) -> None:
        self.after, self.deed = after, deed

    def step(self, step: int, loss: float, amount: float) -> None:
        if step == self.after:
            self.deed()


def caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: Callable[[nn.Module], None], kept: int = 2, **changes: Any
) -> NonFinite:
    """What a run says when its network is broken after the second step."""
    made: list[nn.Module] = []
    create = networks.create

    def keep(*given: Any, **named: Any) -> nn.Module:
        made.append(create(*given, **named))
        return made[-1]

    monkeypatch.setattr(networks, "create", keep)
    run = run_of(tmp_path / "run", save_every=1, **changes)
    with pytest.raises(NonFinite) as stopped:
        train(run, data=images_of(), progress=Sabotage(2, lambda: deed(made[0])))
    assert [path.name for path in run.output.glob("step-*")] == [f"step-{kept:09d}"]
    return stopped.value


def test_a_bad_number_is_traced_to_its_layer_and_its_batch_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def overflow(layer: nn.Module, given: Any, output: Tensor) -> Tensor:
        return output * torch.inf

    fault = caught(
        tmp_path,
        monkeypatch,
        lambda model: model.get_submodule("blocks.1.mlp.fc1").register_forward_hook(overflow) and None,
    )
    assert fault.where == "layer blocks.1.mlp.fc1 (Linear)"
    assert "Step 3 met a number that is not finite, first in the layer blocks.1.mlp.fc1" in str(fault)
    assert fault.batch is not None
    with safe_open(fault.batch, "pt") as file:  # pyright: ignore[reportGeneralTypeIssues]
        assert file.get_tensor("images").shape == (8, 1, 8, 8)
        assert file.get_tensor("targets").shape == (8,)
        names = file.metadata()["samples"].splitlines()
    assert len(names) == 8
    assert all(name.startswith("train image") for name in names)


def test_a_bad_weight_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def poison(model: nn.Module) -> None:
        model.get_parameter("blocks.0.attn.qkv.weight").data[0, 0] = torch.nan

    fault = caught(tmp_path, monkeypatch, poison, kept=1)
    assert fault.where == "parameter blocks.0.attn.qkv.weight"


@pytest.mark.parametrize(("clip", "where"), [(1.0, "gradient of norm.bias"), (None, "parameter norm.bias")])
def test_a_bad_gradient_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clip: float | None, where: str):
    def poison(model: nn.Module) -> None:
        model.get_parameter("norm.bias").register_hook(lambda gradient: gradient * torch.nan)

    assert caught(tmp_path, monkeypatch, poison, clip_grad=clip).where == where


class Torn(ArraySource):
    """Images some of which cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index % 150 == 7:
            raise CorruptImage(self.path(index))
        return super().__getitem__(index)


def torn(images: Images, every: type[ArraySource]) -> Images:
    return replace(images, train=every(images.train.name, images.train.pixels, images.train.labels))  # pyright: ignore


def test_corrupt_images_are_skipped_counted_and_named(tmp_path: Path):
    images = torn(images_of(310), Torn)
    run = run_of(tmp_path / "run", image_size=(9, 9), batch_size=31)
    result = train(run, data=images)
    assert result.skipped == 3
    assert set(result.skipped_names) == {"train image 7", "train image 157", "train image 307"}


def test_too_many_corrupt_images_stop_the_run(tmp_path: Path):
    with pytest.raises(TooManyCorrupt, match="more than 0 %"):
        train(run_of(tmp_path / "run", image_size=(9, 9), unreadable=0), data=torn(images_of(20), Torn))


@pytest.mark.parametrize(
    ("model", "changes", "args", "sentence"),
    [
        ("mavit_tinny", {}, {}, "model: expected a network such as mavit_tiny"),
        (MODEL, {"batch_size": 1000}, SMALL, "do not fill a batch of 1000"),
        (MODEL, {}, {"deepth": 3}, "model_args: inline_deit_tiny takes no 'deepth'; did you mean 'depth'"),
        (MODEL, {"opt": "adamm"}, SMALL, "opt: "),
        (MODEL, {"batch_size": 9, "mixup": 0.5}, SMALL, "mixup pairs images, and 9 at a time is odd"),
        (MODEL, {"auto_augment": "rnad-m9", "augment": "timm"}, SMALL, "auto_augment"),
    ],
)
def test_impossible_runs_are_refused(
    tmp_path: Path, model: str, changes: dict[str, Any], args: dict[str, Any], sentence: str
):
    with pytest.raises(ValueError, match=sentence):
        train(Run(model, "noise", tmp_path / "run", recipe_of(**changes), args), data=images_of())


def test_it_begins_with_given_weights_and_a_new_classifier(tmp_path: Path):
    first = train(run_of(tmp_path / "a", epochs=1), data=images_of(20))
    run = replace(run_of(tmp_path / "b", epochs=1, lr=1e-12, warmup_lr=0.0, min_lr=0.0), weights=first.last)
    second = train(run, data=images_of(20, classes=5))
    one, other = load_file(first.last), load_file(second.last)
    assert other["head.weight"].shape[0] == 5
    torch.testing.assert_close(other["blocks.0.mlp.fc1.weight"], one["blocks.0.mlp.fc1.weight"], atol=1e-7, rtol=0)
    with pytest.raises(ValueError, match="trained with depth=2, not with depth=1"):
        train(replace(run_of(tmp_path / "c", {**SMALL, "depth": 1}), weights=first.last), data=images_of(20))

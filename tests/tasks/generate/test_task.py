"""Generation as a task: it learns what little there is, draws classes and strips, and refuses what is not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from affinear import tasks
from affinear.cli import build_app
from affinear.tasks.classify import ClassifySettings
from affinear.tasks.generate import TASK
from affinear.tasks.generate.drawing import seen
from affinear.tasks.generate.samples import Requests, noise_of
from affinear.tasks.generate.settings import Drawing, Generation
from affinear.tasks.generate.task import AROUND
from affinear.tasks.images.labelled.images import in_memory
from affinear.train import Recipe, Result, Run, curves, train
from affinear.train.draws import NOTHING, Draw
from affinear.train.task import Job, Trained

NETWORK: dict[str, Any] = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mechanism": "mala"}
QUICK: dict[str, Any] = {
    "workers": 0,
    "batch_size": 8,
    "made": 16,
    "judge_batch": 16,
    "sample_steps": 10,
    "compile": False,
    "save_every": 0,
}


def write(folder: Path, side: int = 8) -> str:
    """Two classes that differ in their colour."""
    for half, count in (("train", 8), ("val", 4)):
        for name, colour in (("black", 20), ("white", 235)):
            (folder / half / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.full((side, side, 3), colour, np.uint8)
                pixels[number % side] += np.uint8(10)
                Image.fromarray(pixels).save(folder / half / name / f"{number}.png")
    return str(folder)


@pytest.fixture(scope="module", autouse=True)
def undrawn() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw", lambda output, *_: (output / curves.NAME).write_bytes(b""))  # takes seconds
        yield


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("generate")
    changes = {"steps": 120, "eval_steps": 60, "lr": 3e-3, "ema_decay": 0.9, "image_size": (8, 8), "warmup_steps": 0}
    setup = tasks.recipe_for("generate", "dit_s_2", "small", **{**QUICK, **changes})
    return train(Run("dit_s_2", write(folder / "data"), folder / "run", setup, NETWORK))


def brightness(answer: Any) -> float:
    return float(np.mean([np.asarray(Image.open(BytesIO(content))).mean() for content in answer.files.values()]))


def test_it_learns_which_class_is_black_and_which_is_white(result: Result):
    trained = tasks.load_trained(result.weights)
    black, white = TASK.predict(trained, ["black", "1"], Drawing(count=8, sample_steps=20))
    assert brightness(black) < 90
    assert brightness(white) > 165
    assert white.content == {
        "class": 1,
        "name": "white",
        "size": [8, 8],
        "files": [f"001-white-{n}.png" for n in range(8)],
    }
    assert result.records[0].test is not None
    assert result.score["frechet"] < result.records[0].test["frechet"]


def test_pictures_are_the_same_for_the_same_seed_and_strips_begin_and_end_with_them(result: Result):
    trained = tasks.load_trained(result.weights)
    options = Drawing(count=2, strip=3, draw_seed=5)
    one, other = next(TASK.predict(trained, ["0"], options)), next(TASK.predict(trained, ["0"], options))
    assert dict(one.files) == dict(other.files)
    other = next(TASK.predict(trained, ["0"], options.changed(draw_seed=6)))
    assert one.files["000-black-0.png"] != other.files["000-black-0.png"]
    strip = np.asarray(Image.open(BytesIO(one.files["000-black-strip.png"])))[::8, ::8].astype(int)
    first, last = (np.asarray(Image.open(BytesIO(one.files[f"000-black-{n}.png"]))).astype(int) for n in (0, 1))
    np.testing.assert_allclose(strip[:, :8], first, atol=1)
    np.testing.assert_allclose(strip[:, 20:], last, atol=1)


def test_other_samplers_guidance_and_sizes_are_options(result: Result):
    trained = tasks.load_trained(result.weights)
    options = Drawing(count=1, sampler="heun", sample_steps=3, guidance=2.0, picture_size=(4, 12))
    assert next(TASK.predict(trained, ["any"], options)).content["size"] == [4, 12]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"sampler": "ddim"}, "sampler: expected euler or heun for flow"),
        (
            {"picture_size": (1, 1)},
            "picture_size: expected pictures whose sides are multiples of the patch, 2, got 1 x 1",
        ),
        ({"decoder": "somewhere"}, "decoder: expected none, as the network makes pictures"),
    ]
    for changes, said in wrong:
        with pytest.raises(ValueError, match=said):
            next(TASK.predict(trained, ["0"], Drawing(**changes)))


def test_the_report_shows_samples_as_training_went_on(result: Result):
    text = (result.weights.parent / "report.html").read_text(encoding="utf-8")
    for title in ("Samples", "From noise to noise", "Guidance", "As training went on"):
        assert f"<h2>{title}</h2>" in text
    assert "after step 60" in text
    assert "It is no FID" in text
    assert sorted(path.name for path in (result.weights.parent / "glimpses").iterdir()) == [
        "step-000000060.png",
        "step-000000120.png",
    ]


def test_the_command_line_draws_classes_and_says_which_are_not_there(
    result: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    asked = ["predict", "--task", "generate", "--weights", str(result.weights.parent), "--set", "count=1"]
    drawn = CliRunner().invoke(build_app(), [*asked, "--class", "white", "--class", "0"])
    assert drawn.exit_code == 0, drawn.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000-black-0.png", "001-white-0.png"]
    wrong = CliRunner().invoke(build_app(), [*asked, "--class", "7", "--json", "-o", str(tmp_path / "out")])
    assert wrong.exit_code == 1
    wrong = CliRunner().invoke(build_app(), [*asked, "--class", "7"])
    assert "class: expected a number from 0 to 1, any, or one of black, white, got '7'" in wrong.output
    nothing = CliRunner().invoke(build_app(), asked)
    assert nothing.exit_code == 1
    assert "--class" in nothing.output


def test_diffusion_learns_too_and_latents_are_data(tmp_path: Path):
    chance = np.random.default_rng()
    latents = chance.standard_normal((16, 4, 4, 4)).astype(np.float16)
    np.savez(tmp_path / "train.npz", latents=latents, labels=np.arange(16) % 3)
    changes = {**QUICK, "steps": 2, "eval_steps": 2, "sampler": "ddpm", "sample_steps": 4, "ema_decay": 0.5}
    setup = tasks.recipe_for("generate", "dit_s_2", "dit", **changes)
    result = train(Run("dit_s_2", str(tmp_path), tmp_path / "run", setup, NETWORK))
    assert np.isfinite(list(result.score.values())).all()
    trained = tasks.load_trained(result.weights)
    answer = next(TASK.predict(trained, ["class 2"], Drawing(count=1)))
    assert Image.open(BytesIO(next(iter(answer.files.values())))).size == (4, 4)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["facts"]["latent"] is True


@pytest.mark.exhaustive
def test_an_autoencoder_of_diffusers_makes_pictures_of_latents(tmp_path: Path):
    from diffusers import AutoencoderKL

    shape: dict[str, Any] = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1}
    blocks: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
    }
    autoencoder: Any = AutoencoderKL(**shape, **blocks)
    autoencoder.save_pretrained(tmp_path / "decoder")
    settings = Generation(process="flow", sampler="euler", sample_steps=2, image_size=(4, 4))
    facts = {"class_names": ["a"], "channels": 4, "latent": True}
    job = Job("dit_s_2", NETWORK, Recipe(), settings, facts)
    trained = Trained(TASK, job, TASK.network(job).eval())
    answer = next(TASK.predict(trained, ["a"], Drawing(count=1, decoder=str(tmp_path / "decoder"))))
    found = np.asarray(Image.open(BytesIO(answer.files["000-a-0.png"])))
    with torch.no_grad():  # of a fresh DiT the velocity is nothing, so that the noise stays as it is
        decoded = autoencoder.decode(noise_of(0, (4, 4, 4), 0)[None] / settings.latent_scale).sample
    np.testing.assert_array_equal(found, seen(decoded, False)[0].permute(1, 2, 0).numpy())
    with pytest.raises(ValueError, match="decoder: expected the folder of an AutoencoderKL"):
        next(TASK.predict(trained, ["a"], Drawing(decoder=str(tmp_path))))


def test_arms_of_a_comparison_differ_in_their_mechanism_alone():
    arms = TASK.variants("dit_s_2")
    assert set(arms) == {"softmax", "linear", "inline", "nala", "mala", "mala_released", "none"}
    assert all({name: arm[name] for name in AROUND} == dict(AROUND) for arm in arms.values())
    assert [arm["mechanism"] for arm in arms.values()] == list(arms)


def test_weights_of_a_stranger_are_looked_at(result: Result):
    trained = tasks.load_trained(result.weights)
    for facts, said in (
        ({"class_names": []}, "class_names: expected names in a list"),
        ({"channels": 10**9}, "channels: expected a number from 1 to"),
        ({"latent": "yes"}, "latent: expected true or false"),
    ):
        with pytest.raises(ValueError, match=said):
            TASK.check_job(replace(trained.job, facts={**trained.job.facts, **facts}))
    with pytest.raises(ValueError, match="expected batches of at most"):
        TASK.check_job(replace(trained.job, settings=trained.job.settings.changed(judge_batch=10**9)))


def test_what_made_images_are_compared_with_is_told_and_may_be_known_already(tmp_path: Path):
    spec = write(tmp_path / "data")
    for half in ("training", "test"):
        settings = Generation(reference="train" if half == "training" else "test", made=4)
        data, told = TASK.open_to_judge(spec, settings)
        assert told.startswith(f"the {half} half of ")
    job = TASK.settle(Job("dit_s_2", dict(NETWORK), Recipe(workers=0), Generation()), data)
    accelerator: Any = SimpleNamespace(device=torch.device("cpu"))
    computed = TASK.work(job, data, torch.device("cpu"))._reference(accelerator)  # pyright: ignore[reportPrivateUsage]
    known = np.random.default_rng().normal(size=computed.shape).astype(np.float32)
    asked = TASK.work(job, replace(data, known=known), torch.device("cpu"))._reference(accelerator)  # pyright: ignore[reportPrivateUsage]
    assert np.array_equal(asked.numpy(), known)


def test_what_is_drawn_does_not_depend_on_how_it_is_shared():
    requests = Requests(10, 3, (3, 4, 4), seed=7)
    whole = requests.__getitems__([Draw(number, 0) for number in range(4)])
    parts = [requests.__getitems__([Draw(number, 0)]) for number in range(4)]
    torch.testing.assert_close(whole.noise, torch.cat([part.noise for part in parts]), rtol=0, atol=0)
    assert whole.labels.tolist() == [0, 1, 2, 0]
    assert requests[Draw(NOTHING, 0)].labels.tolist() == [-1]


def test_a_generator_is_no_classifier():
    pixels, labels = np.zeros((2, 3, 8, 8), np.uint8), np.arange(2)
    images = in_memory("two", (pixels, labels), (pixels, labels), ("a", "b"))
    job = Job("dit_s_2", {}, Recipe(), ClassifySettings())
    with pytest.raises(ValueError, match="expected a network that tells classes apart, got dit_s_2, which draws them"):
        tasks.find("classify").settle(job, images)


def test_settings_have_what_the_recipes_say():
    setup = tasks.recipe_for("generate", "dit_xl_2")
    assert isinstance(setup.settings, Generation)
    assert (setup.recipe.lr, setup.recipe.min_lr, setup.recipe.ema_decay, setup.recipe.weight_decay) == (
        1e-4,
        1e-4,
        0.9999,
        0,
    )
    assert (setup.settings.process, setup.settings.sample_steps, setup.settings.guidance) == ("ddpm", 250, 1)

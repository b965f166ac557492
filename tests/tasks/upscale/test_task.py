"""Super-resolution: pairs, tiles, answers for every kind of photo, released weights, and what is refused."""

from __future__ import annotations

import re
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from affinear import tasks
from affinear.models.upscaler import Upscaler, make_upscaler
from affinear.tasks.upscale.looking import Look, enlarged, fitting
from affinear.tasks.upscale.opening import open_album, open_to_judge
from affinear.tasks.upscale.samples import AROUND, Crops, crop, cut_to, paired, shrunk
from affinear.tasks.upscale.settings import Enlarging, Upscaling
from affinear.tasks.upscale.telling import Telling
from affinear.train import Recipe
from affinear.train.task import Answer, Job, Trained

TASK = tasks.find("upscale")
ARGS = {"dim": 8, "depths": (1,), "num_heads": 2, "mechanism": "mala"}


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng().integers(0, 256, (height, width, 3), np.uint8)


def write(folder: Path, *names: str, size: tuple[int, int] = (40, 50)) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(*size)).save(folder / name)


@pytest.fixture(scope="module")
def trained() -> Trained[Any, Any]:
    job = Job("upscaler_light", ARGS, Recipe(), Upscaling(scale=3, patch=8))
    return Trained(TASK, job, TASK.network(job).eval())


# --- pairs


@pytest.mark.parametrize("scale", [2, 3, 4])
def test_a_small_crop_is_the_crop_of_the_small_photo(scale: int):
    pixels = noise(15 * scale + 1, 12 * scale)  # one row too many, which is cut off
    small = shrunk(cut_to(pixels, scale), scale)
    large = cut_to(pixels, scale)
    for seed in range(8):
        cut = torch.from_numpy(crop(pixels, 9, scale, False, seed))[None]
        pair = paired(Crops(cut, torch.empty(1, 0)), scale)
        found = (255 * pair.small[0]).round().to(torch.uint8)
        places = [(i, j) for i in range(7) for j in range(4) if torch.equal(small[:, i : i + 9, j : j + 9], found)]
        assert len(places) == 1
        top, left = (scale * place for place in places[0])
        expected = large[:, top : top + 9 * scale, left : left + 9 * scale]
        assert torch.equal((255 * pair.large[0]).round().to(torch.uint8), expected)


def test_crops_are_mirrored_and_turned_in_all_eight_ways():
    pixels = noise(16, 16)
    seen = {crop(pixels, 8, 2, True, seed).tobytes() for seed in range(200)}
    assert len(seen) == 8
    assert crop(pixels, 8, 2, True, 3).shape == (3, 16 + 4 * AROUND, 16 + 4 * AROUND)


# --- data


def test_sets_are_found_however_they_are_laid_out(tmp_path: Path):
    write(tmp_path, "train/a.png", "train/deep/b.jpg", "Set5/c.png", "Set14/HR/d.png", "Set14/LR_bicubic/X2/d.png")
    write(tmp_path, "Set5/LRx2/c.png", size=(20, 25))
    write(tmp_path, "Urban100/image_SRF_2/e_SRF_2_HR.png", "Urban100/image_SRF_2/e_SRF_2_LR.png", "DIV2K_LR/f.png")
    album = open_album(str(tmp_path), 2)
    assert (album.sizes, album.sets) == ((2, 3), ("Set14", "Set5", "Urban100"))
    assert [Path(path).name for path in album.test.paths] == ["d.png", "c.png", "e_SRF_2_HR.png"]
    assert open_album(str(tmp_path), 2, test_sets="Set5+Set14").sets == ("Set5", "Set14")
    judged, told = open_to_judge(str(tmp_path), 2)
    assert judged.sizes == album.sizes
    assert "Set14, Set5, Urban100" in told


def test_photos_alone_are_parted_and_judged_whole(tmp_path: Path):
    write(tmp_path, *(f"{i}.png" for i in range(12)))
    album = open_album(str(tmp_path), 4, memory=True)
    assert (album.sizes, album.sets) == ((11, 1), ("held out",))
    assert open_to_judge(str(tmp_path), 4)[0].sizes == (0, 12)
    write(tmp_path, "Set5/a.png")
    assert open_album(str(tmp_path), 4).sizes == (12, 1)
    limited = TASK.limited(album, 3)
    assert limited.sizes == (3, 1)
    assert limited.fingerprint != album.fingerprint


@pytest.mark.parametrize(
    ("files", "given", "message"),
    [
        (("Set5/a.png",), {}, "found photos in Set5 and none to learn from"),
        (("a.png",), {}, "expected two photos or more"),
        (("train/a.png", "Set5/b.png"), {"test_sets": "Set6"}, "test_sets: expected some of Set5, got 'Set6'"),
        (("train/a.png", "train/b.png"), {"test_sets": "Set5"}, "has no folder to be judged by"),
    ],
)
def test_what_is_no_data_set_is_told(tmp_path: Path, files: tuple[str, ...], given: dict[str, Any], message: str):
    write(tmp_path, *files)
    with pytest.raises(ValueError, match=message):
        open_album(str(tmp_path), 2, **given)


def test_a_photo_that_is_too_small_is_named(tmp_path: Path):
    write(tmp_path, "train/a.png", "train/b.png")
    write(tmp_path, "Set5/tiny.png", size=(12, 30))
    with pytest.raises(ValueError, match=r"tiny\.png: expected sides of at least 17 pixels, got 12 x 30"):
        open_album(str(tmp_path), 2)


def test_crops_fit_the_smallest_photo_unless_told(tmp_path: Path):
    write(tmp_path, "train/a.png", "Set5/b.png")
    album = open_album(str(tmp_path), 2)
    job = Job("upscaler_light", ARGS, Recipe(), Upscaling())
    assert TASK.settle(job, album).settings.patch == 20
    with pytest.raises(ValueError, match="patch: expected at most 20"):
        TASK.settle(Job("upscaler_light", ARGS, Recipe(), Upscaling(patch=32)), album)
    with pytest.raises(ValueError, match="scale: it is a setting of the task"):
        TASK.settle(Job("upscaler_light", {"scale": 3}, Recipe(), Upscaling()), album)
    with pytest.raises(ValueError, match="model: expected one of swinir_light"):
        TASK.settle(Job("mavit_tiny", {}, Recipe(), Upscaling()), album)


def test_multiply_adds_are_those_of_the_products(tmp_path: Path):
    """Of the arm without attention they can be counted by hand."""
    args = {"dim": 8, "depths": (1,), "num_heads": 2, "mechanism": "none", "position_kernel": 3, "mlp_ratio": 2.0}
    counts = {
        arm: TASK.macs(Job("upscaler_light", {**args, "mechanism": arm}, Recipe(), Upscaling(patch=8)))
        for arm in ("none", "mala", "softmax")
    }
    convolutions = 9 * (3 * 8 + 8 + 2 * 8 * 8 + 8 * 12)
    assert counts["none"] == 64 * (convolutions + 2 * 8 * 8 + 2 * 8 * 16)
    assert counts["softmax"] == counts["none"] + 64 * (2 * 8 * 8 + 2 * 64 * 8)  # pyright: ignore[reportOptionalOperand]
    assert counts["none"] < (counts["mala"] or 0) < counts["softmax"]


# --- looking


def test_tiles_without_attention_and_with_enough_around_give_what_one_piece_gives():
    network = Upscaler(2, 8, (1,), 2, mechanism="none", position_kernel=3).double().eval()
    images = torch.rand(1, 3, 37, 41, dtype=torch.float64)
    out = torch.cat(list(enlarged(network, images, Look("tiles", tile=16, overlap=8))), dim=2)
    assert torch.allclose(out, network(images), atol=1e-10)


def test_large_photos_go_in_strips_and_softmax_over_too_many_pixels_in_tiles():
    kinds = {
        (arm, pixels): fitting(make_upscaler("upscaler_light", {**ARGS, "mechanism": arm}), pixels, Look()).kind
        for arm in ("mala", "softmax", "windows", "none")
        for pixels in (1000, 10**7)
    }
    assert {kind for (_, pixels), kind in kinds.items() if pixels == 1000} == {"whole"}
    assert [kinds[arm, 10**7] for arm in ("mala", "softmax", "windows", "none")] == [
        "strips",
        "tiles",
        "strips",
        "strips",
    ]


# --- answers


def asked(trained: Trained[Any, Any], path: Path, **options: object) -> Answer:
    return next(iter(TASK.predict(trained, [str(path)], Enlarging(**options))))  # pyright: ignore[reportArgumentType]


def larger(answer: Answer) -> Image.Image:
    assert answer.error is None, answer.error
    return Image.open(BytesIO(next(iter(answer.files.values()))))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("RGB", "RGB"), ("L", "L"), ("RGBA", "RGBA"), ("LA", "LA"), ("P", "RGB"), ("1", "L"), ("CMYK", "RGB")],
)
def test_a_photo_keeps_its_kind(trained: Trained[Any, Any], tmp_path: Path, mode: str, expected: str):
    kind = "tif" if mode == "CMYK" else "png"
    Image.fromarray(noise(6, 9)).convert(mode).save(tmp_path / f"photo.{kind}")
    answer = asked(trained, tmp_path / f"photo.{kind}")
    image = larger(answer)
    assert (image.size, image.mode) == ((27, 18), expected)
    assert list(answer.files) == ["photo_x3.png"]
    assert answer.text == "9 x 6 became 27 x 18 pixels, in one piece"


def test_transparency_is_enlarged_along(trained: Trained[Any, Any], tmp_path: Path):
    pixels = np.dstack((noise(8, 8), np.full((8, 8), 255, np.uint8)))
    pixels[:, 4:, 3] = 0
    Image.fromarray(pixels).save(tmp_path / "half.png")
    alpha = np.asarray(larger(asked(trained, tmp_path / "half.png")))[..., 3]
    assert (alpha[:, :6] == 255).all()
    assert (alpha[:, 18:] == 0).all()
    assert "jpg holds no transparency" in (asked(trained, tmp_path / "half.png", format="jpg").error or "")


@pytest.mark.parametrize(("mode", "expected"), [("RGBA", "RGB"), ("LA", "L")])
def test_what_is_opaque_everywhere_may_become_a_jpg(
    trained: Trained[Any, Any], tmp_path: Path, mode: str, expected: str
):
    Image.fromarray(noise(6, 9)).convert(mode).save(tmp_path / "opaque.png")
    assert larger(asked(trained, tmp_path / "opaque.png", format="jpg")).mode == expected


def test_sixteen_bits_stay(trained: Trained[Any, Any], tmp_path: Path):
    levels = np.random.default_rng().integers(0, 65536, (5, 5)).astype(np.uint16)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    image = larger(asked(trained, tmp_path / "deep.png"))
    assert image.mode.startswith("I")
    assert image.size == (15, 15)
    assert larger(asked(trained, tmp_path / "deep.png", format="jpg")).mode == "L"


@pytest.mark.parametrize("look", ["whole", "strips", "tiles"])
def test_one_pixel_becomes_nine(trained: Trained[Any, Any], tmp_path: Path, look: str):
    Image.new("RGB", (1, 1), "teal").save(tmp_path / "dot.png")
    assert larger(asked(trained, tmp_path / "dot.png", look=look)).size == (3, 3)


def test_strips_write_the_same_photo_as_one_piece(trained: Trained[Any, Any], tmp_path: Path):
    write(tmp_path, "photo.png", size=(50, 30))
    one, other = (
        np.asarray(larger(asked(trained, tmp_path / "photo.png", look=look, strip=8))).astype(int)
        for look in ("whole", "strips")
    )
    assert np.abs(one - other).max() <= 1


def test_what_would_be_too_large_is_told_before_it_is_made(
    trained: Trained[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path, "photo.png")
    monkeypatch.setattr("affinear.tasks.upscale.photos.MOST_MADE", 10_000)
    assert "it would become 150 x 120 pixels" in (asked(trained, tmp_path / "photo.png").error or "")


def test_what_does_not_fit_into_memory_is_told(
    trained: Trained[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*given: object, deep: bool) -> None:
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes")

    write(tmp_path, "photo.png")
    monkeypatch.setattr("affinear.tasks.upscale.task.joined", full)
    assert "does not fit into memory" in (asked(trained, tmp_path / "photo.png").error or "")


def test_a_long_wait_is_told_and_a_short_one_is_not(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr("affinear.tasks.upscale.telling.time.monotonic", lambda: now)
    lines = StringIO()
    telling = Telling("photo.jpg", lines)
    telling(0.1)
    assert lines.getvalue() == ""
    for now in (2.0, 3.0, 13.0):  # what the clock says
        telling(now / 20)
    telling.end()
    assert lines.getvalue().splitlines() == ["photo.jpg: 10%, 18 s left", "photo.jpg: 65%, 7 s left"]


# --- the report


def test_the_report_shows_before_and_after_under_a_line_that_can_be_drawn(trained: Trained[Any, Any], tmp_path: Path):
    write(tmp_path, "train/a.png", *(f"Set5/{i}.png" for i in range(5)))
    album = open_album(str(tmp_path), 3)
    (section,) = TASK.work(trained.job, album, torch.device("cpu")).report(trained.network)
    assert section.html.count('class="slider"') == 3
    assert "resize: horizontal" in section.html
    for told in ("gained least", "in between", "gained most"):
        assert told in section.html
    assert not re.search(r"https?://|<script", section.html)


# --- weights of others


def test_released_weights_tell_their_scale(tmp_path: Path):
    network = Upscaler(4, 8, (1,), 2)
    renamed = {
        name.replace(".blocks.", ".residual_group.blocks.")
        .replace("norm_first", "patch_embed.norm")
        .replace("upsample.", "upsample.0."): tensor
        for name, tensor in network.state_dict().items()
    }
    torch.save({"params": renamed}, tmp_path / "released.pth")
    args = {"dim": 8, "depths": (1,), "num_heads": 2}
    found = tasks.load_trained(tmp_path / "released.pth", "swinir_light", task="upscale", model_args=args)
    assert found.job.settings.scale == 4
    images = torch.rand(1, 3, 8, 8)
    assert torch.equal(found.network(images), network.eval()(images))
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="expected weights of an upscaler"):
        tasks.load_trained(tmp_path / "other.pth", "swinir_light", task="upscale")


def test_another_scale_begins_with_all_but_the_last_convolution():
    before, after = Upscaler(2, 8, (1,), 2), Upscaler(3, 8, (1,), 2)
    fresh = after.upsample.weight.clone()
    TASK.start(after, before.state_dict(), "x2")
    assert torch.equal(after.conv_first.weight, before.conv_first.weight)
    assert torch.equal(after.upsample.weight, fresh)

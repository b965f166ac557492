"""An image file of any kind becomes upright RGB; what is none is named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from affinear.tasks.images.reading import CorruptImage, open_image, suffixes

RED = (250, 10, 20)


def written(path: Path, image: Image.Image, **how: Any) -> Path:
    image.save(path, **how)
    return path


def middle(image: Image.Image) -> tuple[int, ...]:
    assert image.mode == "RGB"
    pixel = image.getpixel((image.width // 2, image.height // 2))
    assert isinstance(pixel, tuple)
    return tuple(int(value) for value in pixel)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK"])
def test_modes_become_rgb(tmp_path: Path, mode: str):
    suffix = ".tif" if mode == "CMYK" else ".png"
    image = open_image(written(tmp_path / f"a{suffix}", Image.new("RGB", (6, 4), "white").convert(mode)))
    assert image.size == (6, 4)
    assert middle(image) == (255, 255, 255)


def test_a_jpeg_for_printers_keeps_its_colours(tmp_path: Path):
    path = written(tmp_path / "a.jpg", Image.new("RGB", (16, 16), RED).convert("CMYK"), quality=95)
    np.testing.assert_allclose(middle(open_image(path)), RED, atol=6)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparent_images_lie_on_white(tmp_path: Path, mode: str):
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    clear.paste((0, 0, 0, 255), (0, 0, 2, 4))
    kind = "RGBA" if mode == "PA" else mode
    image = open_image(written(tmp_path / "a.png", clear.convert(kind)))
    assert [image.getpixel((x, 1)) for x in (0, 3)] == [(0, 0, 0), (255, 255, 255)]


def test_a_colour_that_a_palette_or_an_rgb_image_calls_transparent_is_white(tmp_path: Path):
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert middle(open_image(written(tmp_path / "p.png", palette, transparency=1))) == (255, 255, 255)
    plain = Image.new("RGB", (4, 4), RED)
    assert middle(open_image(written(tmp_path / "t.png", plain, transparency=RED))) == (255, 255, 255)


def test_sixteen_bits_become_eight(tmp_path: Path):
    deep = Image.fromarray(np.full((4, 4), 200 * 257, np.uint16))
    assert middle(open_image(written(tmp_path / "a.png", deep))) == (200, 200, 200)
    assert middle(open_image(written(tmp_path / "a.tif", deep))) == (200, 200, 200)


def test_numbers_become_eight_bits_by_what_white_must_be(tmp_path: Path):
    for top in (1.0, 255.0, 65535.0):
        shades = np.full((4, 4), 0.8 * top, np.float32)
        assert middle(open_image(written(tmp_path / "a.tif", Image.fromarray(shades)))) == (204, 204, 204)
    assert middle(open_image(written(tmp_path / "b.tif", Image.fromarray(np.full((4, 4), 7, np.int32))))) == (7, 7, 7)


def test_a_turned_photo_is_turned_back(tmp_path: Path):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = written(tmp_path / "a.jpg", Image.new("RGB", (30, 10), RED), exif=exif)
    assert open_image(path).size == (10, 30)


@pytest.mark.parametrize("name", ["猫.png", "кошка.png", "a b'c\".png", "\N{CAT FACE}.png"])
def test_names_in_any_script(tmp_path: Path, name: str):
    assert middle(open_image(written(tmp_path / name, Image.new("RGB", (4, 4), RED)))) == RED


def bad_files(folder: Path) -> list[Path]:
    photo = written(
        folder / "photo.jpg", Image.fromarray(np.random.default_rng().integers(0, 255, (64, 64, 3), np.uint8))
    )
    cut = folder / "cut.jpg"
    cut.write_bytes(photo.read_bytes()[: photo.stat().st_size // 2])
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("no picture at all", encoding="utf-8")
    (folder / "head.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 40)
    return [cut, folder / "empty.png", folder / "text.png", folder / "head.png", folder / "missing.png"]


def test_what_cannot_be_read_is_named(tmp_path: Path):
    for path in bad_files(tmp_path):
        with pytest.raises(CorruptImage, match=path.name):
            open_image(path)


def test_an_image_that_would_fill_the_memory_is_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = written(tmp_path / "a.png", Image.new("RGB", (40, 40)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(CorruptImage, match="decompression bomb"):
        open_image(path)


def test_a_page_description_under_another_name_is_not_run(tmp_path: Path):
    written(tmp_path / "a.eps", Image.new("RGB", (4, 4)))
    (tmp_path / "a.eps").rename(tmp_path / "a.png")
    with pytest.raises(CorruptImage, match="not an image of a known kind"):
        open_image(tmp_path / "a.png")
    assert ".eps" not in suffixes()


@pytest.mark.parametrize("size", [(100_000, 1), (1, 3000), (40_000, 40_000)])
def test_images_that_would_cause_too_much_work_are_refused_by_their_header(tmp_path: Path, size: tuple[int, int]):
    path = tmp_path / "a.ppm"
    path.write_bytes(f"P6 {size[0]} {size[1]} 255\n".encode() + bytes(100))
    with pytest.raises(CorruptImage, match=r"expected sides of at most 32768.* make it smaller\)$|exceeds limit"):
        open_image(path)

"""The page about a network at work, and the images it is made of."""

from __future__ import annotations

import re
from dataclasses import fields
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from affinear.layers import INLINE, PLAIN, Attention
from affinear.lens.report import batch_of_images, html, summary
from affinear.lens.watching import LayerReport, Tally, Watched, watch
from affinear.models import inline_swin  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the names

VOID = {"meta", "line", "circle"}
HOSTILE = "</title><script>alert('1')</script><img src=\"x\" onerror=alert(1)> & co"


class Page(HTMLParser):
    """Tags that are open, what was opened at all, attributes and text; a tag that closes another is an error."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        assert tag in VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


class Blocks(nn.Module):
    """Attention layers one after another, under any names, on a grid of 4 x 5."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = x + layer(x, (4, 5))
        return x


def seen(model: nn.Module, images: Tensor | None = None) -> Watched:
    with watch(model) as watched, torch.no_grad():
        model(torch.randn(2, 20, 16) if images is None else images)
    return watched


def loud(parts: Any) -> Attention:
    layer = Attention(16, 2, parts)
    nn.init.normal_(layer.get_parameter("qkv.weight"))
    return layer


class Fixed(Tally):
    """A tally with numbers that were made up."""

    def __init__(self, **numbers: Any) -> None:
        self.numbers, self.last = numbers, numbers  # pyright: ignore[reportAttributeAccessIssue]

    def report(self, name: str) -> LayerReport:
        own: dict[str, Any] = {field.name: torch.full((2,), 0.5) for field in fields(LayerReport)}
        known: dict[str, Any] = {"heads": 2, "tokens": 16, "keys": 16, "grid": (4, 4), "rows": 32, "biased": False}
        sound: dict[str, Any] = {"linear": True, "mechanism": "inline", "row_sum_error": torch.zeros(2)}
        own.update({**known, **sound, **self.numbers, "name": name})
        return LayerReport(**own)


def made_up(**layers: dict[str, Any]) -> Watched:
    return Watched({name.replace("_", "."): Fixed(**numbers) for name, numbers in layers.items()})


def test_the_page_is_well_formed_and_holds_every_layer_and_number():
    model = timm.create_model(
        "inline_swin_tiny", img_size=56, embed_dim=8, depths=(2, 1), num_heads=(2, 4), stage_types="IS"
    )
    watched = seen(model.eval(), torch.randn(2, 3, 56, 56))
    page = Page(html(watched, title="Swin at work", about={"model": "inline_swin_tiny", "images": "2"}))
    assert len(watched.layers) == 3
    for layer in watched.layers:
        assert layer.name in page.text
        assert layer.mechanism in page.text
        for number in (layer.entropy, layer.largest_weight, layer.absolute_mass, layer.distance):
            assert number is not None
            assert all(f"{value:.3g}" in page.text for value in (*number.tolist(), number.mean().item()))
    assert page.tags.count("svg") == 5
    assert page.tags.count("details") == 3
    assert page.tags.count("circle") == 5 * (2 + 2 + 4)
    assert all(text in page.text for text in ("Swin at work", "inline_swin_tiny", "In words"))
    assert all(sentence in page.text for sentence in summary(watched))


def test_the_page_loads_nothing():
    content = html(seen(Blocks(one=loud(INLINE), two=loud(PLAIN))), title="x", about={})
    assert not re.search(r"https?://|url\(|@import|<script|<link|<img|<iframe|\ssrc=|\shref=|\son\w+=", content)
    assert "default-src 'none'" in content
    assert "prefers-color-scheme: dark" in content
    assert 'name="viewport"' in content


def test_the_same_numbers_give_the_same_page():
    watched = seen(Blocks(one=loud(INLINE)))
    assert html(watched, title="x", about={}) == html(watched, title="x", about={})


def test_names_are_text_and_nothing_else():
    watched = seen(Blocks(**{"<script>x": loud(INLINE), '"><b>&': loud(PLAIN)}))
    watched = Watched(watched.tallies, ("<i>0 (StrangeAttention)",))
    content = html(watched, title=HOSTILE, about={"<u>": "</dl><script>"})
    page = Page(content)
    assert not {"script", "img", "i", "u"} & set(page.tags)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert escape(HOSTILE) in content
    for name in ("<script>x", '"><b>&', "<i>0 (StrangeAttention)", "<u>", "</dl><script>", HOSTILE):
        assert name in page.text


def test_numbers_that_do_not_apply_leave_a_dash():
    none: dict[str, Any] = dict.fromkeys(
        ("neighbourhood", "neighbourhood_uniform", "distance", "norm_correlation", "grid")
    )
    content = html(made_up(only=none), title="x", about={})
    page = Page(content)
    assert content.count("<td>-</td>") == 1 + 3 + 2 * 4  # grid; three of a layer; four of each of two heads
    assert page.text.count("No layer has such a number.") == 3


def test_an_axis_of_zeros_ends_at_one():
    zeros = {"negative_share": torch.zeros(2), "linear": False}
    content = html(made_up(one=zeros), title="x", about={})
    axis = content.split("<h3>Negative weights</h3>")[1].split("</svg>")[0]
    assert re.findall(r'text-anchor="end">([^<]*)<', axis) == ["0", "0.5", "1"]


def test_numbers_that_are_not_finite_are_called_so():
    watched = made_up(one={"entropy": torch.tensor([0.5, torch.nan])}, two={"distance": torch.full((2,), torch.inf)})
    assert "Weights of layer 1 are not finite: the numbers there mean nothing." in summary(watched)
    assert "not finite" in Page(html(watched, title="x", about={})).text


def test_the_summary_says_what_the_numbers_say():
    softmax = {"linear": False, "mechanism": "softmax", "negative_share": torch.zeros(2)}
    shares = [
        {"negative_share": torch.tensor([a, b]), "absolute_mass": torch.ones(2)} for a, b in ((0.3, 0.4), (0.2, 0.46))
    ]
    flat = {"entropy_share": torch.tensor([0.9, 1.0]), "effective_keys": torch.tensor([11.0, 13.0])}
    near = {"neighbourhood": torch.tensor([0.8, 1.2]), "norm_correlation": torch.tensor([-0.9, -0.8])}
    told = summary(
        made_up(
            stages_0_blocks_0_attn=shares[0],
            stages_0_blocks_1_attn={**shares[1], "row_sum_error": torch.tensor([2e-6, 0.0])},
            stages_1_blocks_0_attn={**softmax, **flat, "biased": True},
            stages_1_blocks_1_attn={**softmax, **near},
            stages_1_blocks_2_attn={**softmax, "entropy_share": torch.tensor([0.1, 0.1])},
        )
    )
    assert told == [
        "Layers 1 and 2 are inline, linear.",
        "Layers 3 to 5 are softmax.",
        "34 % of the weights in stage 1 (layers 1 and 2) are negative, with 50 % of all |w|.",
        "No row of a linear layer is more than 1e-5 from summing to one.",
        "Sharpest is layer 5, with 10 % of the entropy of a uniform row (0.5 effective keys); "
        "flattest is layer 3, with 95 % of the entropy of a uniform row (12 effective keys).",
        "Layer 4 looks most at the 3 x 3 places around a query: 2 times what a uniform row has there.",
        "A louder query looks more sharply in 1 of 5 layers, less sharply in 4, and neither in 0.",
        "Scores of layer 3 have a bias or a mask, which all numbers include.",
    ]


def test_the_summary_knows_rows_that_do_not_sum_to_one_and_layers_without_negatives():
    none = {"negative_share": torch.zeros(2)}
    told = summary(
        made_up(one={**none, "row_sum_error": torch.tensor([0.1, 3.5]), "mechanism": "mala_released"}, two=none)
    )
    assert "No weight of a linear layer is negative." in told
    assert "Rows of layer 1 do not all sum to one: in layer 1 (mala_released) a row is 3.5 away." in told


def test_nothing_seen_is_nothing_to_report():
    with watch(Blocks(one=loud(INLINE))) as watched:
        pass
    with pytest.raises(ValueError, match="watched: expected layers that were called, got none; call the network"):
        html(watched, title="x", about={})


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=24, num_heads=3)


def picture(mode: str, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """Red on the whole, as far as the mode knows red."""
    return Image.new("RGB", size, (255, 0, 0)).convert(mode)


def test_images_of_every_mode_become_rgb(network: nn.Module, tmp_path: Path):
    files = {"a.jpg": "RGB", "b.png": "RGBA", "c.JPEG": "CMYK", "d.png": "P", "e.webp": "RGB", "f.png": "LA"}
    for name, mode in files.items():
        picture(mode).save(tmp_path / name)
    clear = picture("P")
    clear.info["transparency"] = bytes(range(256))
    clear.save(tmp_path / "g.png")
    picture("1").save(tmp_path / "h.png")
    found = batch_of_images(tmp_path, network, 100)
    assert found.names == (*files, "g.png", "h.png")
    assert found.skipped == ()
    assert found.pixels.shape == (8, 3, 32, 32)
    assert found.pixels.dtype == torch.float32
    for pixels, name in zip(found.pixels, found.names, strict=True):
        red, green, blue = pixels.mean((1, 2)).tolist()
        if name[0] in "abcdeg":
            assert red > 0.8, name  # timm's ViT has mean and deviation 0.5: red is 1, the others are -1
            assert max(green, blue) < -0.8, name
        else:
            assert red == pytest.approx(green) == pytest.approx(blue)
    with torch.no_grad():
        assert network(found.pixels).shape == (8, 1000)


def test_grey_of_sixteen_bits_keeps_its_shades(network: nn.Module, tmp_path: Path):
    Image.new("I;16", (40, 40), 32768).save(tmp_path / "deep.png")
    pixels = batch_of_images(tmp_path, network, 1).pixels
    assert pixels.abs().max() < 0.02  # the middle between black and white


def test_what_cannot_be_read_is_skipped_with_the_reason(
    network: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    picture("RGB").save(tmp_path / "good.png")
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.png").write_bytes(b"")
    noise = Image.frombytes("RGB", (64, 64), torch.randint(256, (64 * 64 * 3,), dtype=torch.uint8).numpy().tobytes())
    noise.save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:2000])
    (tmp_path / "notes.txt").write_bytes(whole)
    (tmp_path / "folder.png").mkdir()
    picture("RGB", (90, 90)).save(tmp_path / "huge.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4000)
    picture("RGB", (70, 70)).save(tmp_path / "large.png")  # PIL warns of it, and reads it
    found = batch_of_images(tmp_path, network, 10)
    assert found.names == ("good.png", "large.png")
    assert [reason.split(":")[0] for reason in found.skipped] == ["cut.png", "empty.png", "huge.png", "text.jpg"]
    assert "decompression bomb" in found.skipped[2]


def test_a_few_images_are_taken_from_all_folders(network: nn.Module, tmp_path: Path):
    for kind in "abc":
        (tmp_path / kind).mkdir()
        for number in range(4):
            picture("RGB").save(tmp_path / kind / f"{number}.png")
    assert batch_of_images(tmp_path, network, 3).names == ("a/0.png", "b/0.png", "c/0.png")
    (tmp_path / "b" / "0.png").write_text("no image")
    assert len(batch_of_images(tmp_path, network, 3).names) == 3
    assert len(batch_of_images(tmp_path, network, 5).names) == 5


def test_folders_without_images_are_refused(network: nn.Module, tmp_path: Path):
    with pytest.raises(ValueError, match=r"folder: expected images that can be read .*, got none in "):
        batch_of_images(tmp_path, network, 3)
    (tmp_path / "a.png").write_text("no image")
    with pytest.raises(ValueError, match=r"; skipped a\.png: cannot identify image file"):
        batch_of_images(tmp_path, network, 3)
    with pytest.raises(ValueError, match=r"folder: expected a folder of images, got .*nowhere, which is none"):
        batch_of_images(tmp_path / "nowhere", network, 3)
    with pytest.raises(ValueError, match="limit: expected at least one image, got 0"):
        batch_of_images(tmp_path, network, 0)

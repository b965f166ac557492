"""The microscope in a browser: what a visitor does, sees and hears, and that nothing leaves the machine."""

from __future__ import annotations

import io
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from PIL import Image

import affinear
from affinear import lens
from affinear.lens.microscope import Network, make_server, patches, pictures
from affinear.lens.microscope.answers import MECHANISMS
from affinear.lens.microscope.server import Microscope

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright==1.65.0")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("needs a chromium: apt-get install chromium", allow_module_level=True)

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
)
READY = "body[data-state=ready]:not(.slow)"


@pytest.fixture(scope="module")
def server() -> Iterator[Microscope]:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    import affinear.models  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the names

    network = Network("inline_deit_tiny", timm.create_model("inline_deit_tiny").eval())
    with make_server(network=network) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
    thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, server: Microscope) -> Iterator[Any]:
    """A page that is ready; what it logged, and whom it asked, is looked at in the end."""
    yield from opened(browser, server, viewport={"width": 1440, "height": 1000})


def opened(browser: Any, server: Microscope, source: str = "raw", **given: Any) -> Iterator[Any]:
    page = browser.new_page(**given)
    logged: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: logged.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: logged.append(str(error)))
    page.on("request", lambda request: asked.append(urlsplit(request.url).netloc))
    page.goto(server.address)
    page.wait_for_selector(READY)
    page.select_option("#source", source)
    settle(page)
    yield page
    page.close()
    assert [line for line in logged if "400 (Bad Request)" not in line] == []  # so chromium logs a refused image
    assert set(asked) == {urlsplit(server.address).netloc}


def settle(page: Any) -> None:
    """Wait until the page shows what was asked for last."""
    page.wait_for_timeout(80)
    page.wait_for_selector(READY)


def numbers(page: Any, name: str) -> dict[str, float]:
    fields = ("largest", "negative", "entropy", "moved")
    found = {field: float(page.get_attribute(f"#map-{name} dd.{field}", "data-value")) for field in fields}
    found["sum"] = float(page.get_attribute(f"#sum-{name} .sum", "data-value"))
    found["ratio"] = float(page.get_attribute(f"#ratio-{name}", "data-value"))
    return found


def cells(page: Any, name: str) -> np.ndarray:
    """Colours of a map, (rows, columns, 3)."""
    read = """canvas => [canvas.height, canvas.width,
        Array.from(canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data)]"""
    rows, columns, data = page.eval_on_selector(f"#map-{name} canvas", read)
    return np.array(data).reshape(rows, columns, 4)[..., :3].astype(int)


def click_patch(page: Any, row: int, column: int, grid: int = 14) -> None:
    box = page.locator("#stage").bounding_box()
    side = box["width"] / grid
    page.locator("#stage").click(position={"x": (column + 0.5) * side, "y": (row + 0.5) * side})
    settle(page)


def expected(image: str, patch: int, factor: float, name: str) -> torch.Tensor:
    tokens = patches.layer(pictures.samples()[image]).key
    return affinear.weights(factor * tokens, tokens, name)[0, 0, patch]


def shoot(page: Any, name: str) -> None:
    if folder := os.environ.get("AFFINEAR_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.mouse.move(0, 0)
        page.wait_for_timeout(300)
        page.screenshot(path=Path(folder) / f"microscope-{name}.png", full_page=True)


def test_numbers_and_colours_on_the_page_are_the_librarys(page: Any):
    page.click("#samples button[data-id=flower]")
    settle(page)
    click_patch(page, 5, 6)
    assert page.inner_text("#where") == "Row 6, column 7"
    for name in MECHANISMS:
        row = expected("flower", 5 * 14 + 6, 1.0, name)
        shown, truth = numbers(page, name), lens.measure(row)
        assert shown["entropy"] == pytest.approx(truth.entropy.item(), abs=1e-6)
        assert shown["largest"] == pytest.approx(truth.largest_weight.item(), abs=1e-6)
        assert shown["negative"] == pytest.approx(truth.negative_mass.item(), abs=1e-6)
        assert shown["sum"] == pytest.approx(1, abs=1e-9)
        assert page.inner_text(f"#map-{name} dd.entropy") == f"{truth.entropy.item():.3f}"
        assert page.inner_text(f"#sum-{name} .sum") == "1.000000"
        red, _, blue = cells(page, name).reshape(196, 3).T
        strong = 196 * row.abs().numpy() > 0.05
        assert ((red > blue) == (row > 0).numpy())[strong].all()


def test_the_slider_moves_mala_and_all_but_leaves_linear(page: Any):
    click_patch(page, 5, 5)
    before = {name: cells(page, name) for name in MECHANISMS}
    page.focus("#loudness")
    for _ in range(64):
        page.keyboard.press("ArrowRight")
    settle(page)
    assert page.inner_text("#factor") == "× 16"
    assert page.get_attribute("#loudness", "aria-valuetext") == "times 16"
    moved = {name: numbers(page, name)["moved"] for name in MECHANISMS}
    # elu + 1 is not homogeneous: linear attention moves a little as q grows, and stands still as its features do.
    assert moved["linear"] < 0.15
    assert moved["mala"] > 10 * moved["linear"]
    changed = {name: np.abs(cells(page, name) - before[name]).mean() for name in MECHANISMS}
    assert changed["mala"] > 3 * changed["linear"]
    row = expected("pagoda", 75, 16.0, "mala")
    assert numbers(page, "mala")["largest"] == pytest.approx(row.max().item(), abs=1e-6)
    page.click("#reset")
    settle(page)
    assert numbers(page, "mala")["moved"] == 0
    assert (cells(page, "mala") == before["mala"]).all()


def test_the_features_ratio_of_linear_never_moves_and_malas_pole_is_marked(page: Any):
    click_patch(page, 5, 5)
    before = numbers(page, "linear")["ratio"]
    page.focus("#loudness")
    page.keyboard.press("End")
    settle(page)
    assert numbers(page, "linear")["ratio"] == pytest.approx(before, rel=1e-9)
    assert numbers(page, "mala")["ratio"] < 0
    assert "s pole × " in page.text_content("#ratio svg")


def test_the_slider_and_the_curves_can_be_dragged(page: Any):
    box = page.locator("#loudness").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 2, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], middle, steps=8)
    page.mouse.up()
    settle(page)
    factor = 2 ** float(page.input_value("#loudness"))
    assert 2.5 < factor < 4
    assert numbers(page, "mala")["largest"] == pytest.approx(expected("pagoda", 75, factor, "mala").max().item())
    box = page.locator("#entropy svg").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.2, box["y"] + box["height"] / 2)
    settle(page)
    assert 2 ** float(page.input_value("#loudness")) < 0.3


def test_arrow_keys_move_the_patch_and_it_is_said(page: Any):
    page.focus("#stage")
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "Home", "ArrowLeft"):
        page.keyboard.press(key)
    settle(page)
    assert page.inner_text("#where") == "Row 8, column 1"
    row = expected("pagoda", 7 * 14, 1.0, "inline")
    assert numbers(page, "inline")["largest"] == pytest.approx(row.max().item(), abs=1e-6)
    page.locator("#live", has_text="Row 8, column 1").wait_for(state="attached")


def test_everything_can_be_reached_by_keyboard_and_has_a_name(page: Any):
    page.focus("#stage")
    reached = []
    for _ in range(10):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.dataset.id"))
    assert {"flower", "file", "source", "loudness"} <= set(reached)
    unnamed = """() => [...document.querySelectorAll('button, input, select, canvas, svg, img, [tabindex]')].filter(
        (one) => !(one.labels?.length || one.ariaLabel || one.textContent.trim() || one.hasAttribute('alt')))
        .map((one) => one.outerHTML)"""
    assert page.evaluate(unnamed) == []


@pytest.mark.parametrize("way", ["choose", "drop"])
def test_an_image_of_ones_own_can_be_looked_at(page: Any, way: str):
    content = io.BytesIO()
    Image.effect_mandelbrot((300, 200), (-2, -1, 1, 1), 60).convert("CMYK").save(content, "JPEG")
    own = content.getvalue()
    if way == "choose":
        page.set_input_files("#file", {"name": "own.jpg", "mimeType": "image/jpeg", "buffer": own})
    else:
        make = """(bytes) => { const carried = new DataTransfer();
            carried.items.add(new File([new Uint8Array(bytes)], "own.jpg", { type: "image/jpeg" }));
            return carried; }"""
        page.dispatch_event("#maps", "drop", {"dataTransfer": page.evaluate_handle(make, list(own))})
    page.locator("#credit", has_text="yours").wait_for()
    settle(page)
    tokens = patches.layer(pictures.read(own)).key
    row = affinear.weights(tokens, tokens, "mala")[0, 0, 75]
    assert numbers(page, "mala")["largest"] == pytest.approx(row.max().item(), abs=1e-6)


def test_it_says_that_it_is_computing(page: Any):
    held: list[Any] = []
    page.route("**/api/rows*", lambda route: held.append(route))
    page.focus("#loudness")
    page.keyboard.press("ArrowRight")
    page.locator("#status", has_text="Computing").wait_for()
    assert page.get_attribute("body", "data-state") == "busy"
    held[0].continue_()
    page.unroute("**/api/rows*")
    settle(page)
    assert page.inner_text("#status").strip() == "Up to date"


def test_a_broken_image_gets_a_sentence_and_the_page_goes_on(page: Any):
    page.set_input_files("#file", {"name": "no.jpg", "mimeType": "image/jpeg", "buffer": b"no image"})
    page.wait_for_selector("#trouble:not([hidden])")
    assert "could not be read as an image" in page.inner_text("#trouble-text")
    page.click("#trouble-close")
    click_patch(page, 2, 2)
    row = expected("pagoda", 30, 1.0, "mala")
    assert numbers(page, "mala")["largest"] == pytest.approx(row.max().item(), abs=1e-6)


def test_a_networks_layers_and_heads_can_be_chosen(page: Any, server: Microscope):
    page.select_option("#source", "network")
    page.wait_for_selector("#layer-label:not([hidden])")
    page.select_option("#layer", "3")
    settle(page)
    page.select_option("#head", "1")
    settle(page)
    asked = {"image": "pagoda", "source": "network", "layer": "3", "head": "1", "patch": "75", "factor": "1"}
    answer = json.loads(json.dumps(server.desk.rows(asked)))
    for name in MECHANISMS:
        assert numbers(page, name)["largest"] == pytest.approx(answer["mechanisms"][name]["largest"], abs=1e-9)
    assert page.is_visible("#map-inline .own")
    assert "random weights" in page.inner_text("#about")
    assert page.is_visible("#map-mala dd.token")
    shoot(page, "network")


def test_it_opens_on_the_network_it_was_given(browser: Any, server: Microscope):
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.goto(server.address)
    page.wait_for_selector(READY)
    assert page.input_value("#source") == "network"
    assert page.is_visible("#layer-label")
    assert "inline_deit_tiny" in page.inner_text("#about")
    page.close()


def test_a_readout_does_not_outlive_what_it_was_read_from(page: Any):
    hint = page.inner_text("#probe")

    def read_out() -> None:
        box = page.locator("#map-mala canvas").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 3)
        page.wait_for_function("document.querySelector('#probe').textContent.startsWith('Key in row')")

    read_out()
    page.evaluate("document.querySelector('#reset').disabled = false; document.querySelector('#loudness').value = 2")
    page.evaluate("document.querySelector('#loudness').dispatchEvent(new Event('input'))")  # the pointer stays
    assert page.inner_text("#probe") == hint
    settle(page)
    read_out()
    page.keyboard.press("Tab")
    page.evaluate("document.querySelector('#samples button[data-id=flower]').click()")
    assert page.inner_text("#probe") == hint


@pytest.mark.parametrize(
    ("name", "size", "scheme"),
    [("light", (1440, 1000), "light"), ("dark", (1440, 1000), "dark"), ("phone", (390, 844), "light")],
)
def test_the_page_fits_and_has_both_schemes(browser: Any, server: Microscope, name: str, size: Any, scheme: str):
    pages = opened(browser, server, viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
    page = next(pages)
    click_patch(page, 7, 6)
    page.focus("#loudness")
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    settle(page)
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")  # rgb(247, 247, 245)
    light = sum(int(part) for part in colour[4:-1].split(","))
    assert (light > 380) == (scheme == "light")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    shoot(page, name)
    assert next(pages, None) is None

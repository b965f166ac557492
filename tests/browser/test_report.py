"""The report of the lens in a browser: charts fill their room, the table fits the page, and the maps are there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from affinear.lens.maps import section
from affinear.lens.report import html
from affinear.lens.watching import watch
from affinear.models import inline_deit  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the names

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright==1.65.0")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("needs a chromium: apt-get install chromium", allow_module_level=True)


@pytest.fixture(scope="module")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    network = timm.create_model("inline_deit_tiny", depth=3, img_size=64).eval()
    images = torch.randn(2, 3, 64, 64)
    with watch(network, rows=8) as watched, torch.no_grad():
        network(images)
    seen = [(layer.name, layer.mechanism) for layer in watched.layers]
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(html(watched, title="At work", about={}, maps=section(network, images, ("a", "b"), seen)))
    return path


@pytest.mark.parametrize("width", [1280, 1000])
def test_everything_fits(page_of: Path, width: int):
    with playwright.sync_playwright() as driver:
        browser: Any = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.goto(page_of.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        fits = "part => part.parentElement.scrollWidth <= part.parentElement.clientWidth"
        assert page.eval_on_selector("table.layers", fits)
        fills = "parts => parts.map(part => part.clientWidth / part.parentElement.clientWidth)"
        assert min(page.eval_on_selector_all("svg", fills)) > 0.98
        whole = "parts => parts.map(part => part.naturalWidth)"
        assert all(page.eval_on_selector_all(".maps img", whole))  # the page's own policy lets them be shown
        browser.close()

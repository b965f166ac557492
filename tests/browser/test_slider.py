"""Before and after in a report of super-resolution, in a browser: the line can be drawn, and nothing is loaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from affinear.models.upscaler import Upscaler
from affinear.tasks.upscale.looking import Look
from affinear.tasks.upscale.opening import open_album
from affinear.tasks.upscale.report import WIDTH, sections
from affinear.train.page import document, section

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright==1.65.0")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("needs a chromium: apt-get install chromium", allow_module_level=True)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    for name in ("train/a.png", "Set5/b.png"):
        (tmp_path / name).parent.mkdir()
        pixels = np.random.default_rng().integers(0, 256, (80, 90, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / name)
    network = Upscaler(2, 8, (1,), 2).eval()
    album = open_album(str(tmp_path), 2)
    (shown,) = sections(network, album, 2, Look(), torch.device("cpu"))
    (tmp_path / "report.html").write_text(document("a run", section(shown)), encoding="utf-8")
    return tmp_path / "report.html"


@pytest.mark.exhaustive
def test_the_line_is_drawn_with_the_mouse(report: Path):
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": 900, "height": 900})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url.partition(":")[0]))
        page.goto(report.as_uri())
        before = page.locator(".slider > div")
        box = before.bounding_box()
        assert box["width"] == pytest.approx(WIDTH / 2, abs=4)
        corner = box["x"] + box["width"] - 6, box["y"] + box["height"] - 4
        page.mouse.move(*corner)
        page.mouse.down()
        page.mouse.move(corner[0] + 100, corner[1], steps=4)
        page.mouse.up()
        assert before.bounding_box()["width"] == pytest.approx(WIDTH / 2 + 100, abs=8)
        chromium.close()
    assert set(asked) <= {"file", "data"}

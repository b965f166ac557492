"""A run keeps a few test images, and what is made of its weights is tried on them."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from typer.testing import CliRunner

from affinear import cli
from affinear.bench.models_plan import Images
from affinear.lens.report import batch_of_images
from affinear.tasks.networks import open_network
from affinear.train import examples


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("examples") / "run"
    words = f"train affinear_trunk_micro --data digits --epochs 1 --set workers=0 --model-arg depth=1 -o {output}"
    done = CliRunner().invoke(cli.build_app(), words.split())
    assert done.exit_code == 0, done.output
    return output


def test_the_images_of_a_run_come_with_its_network(run: Path):
    opened = open_network(None, run)
    assert opened.images is not None
    assert opened.images.shape == (examples.COUNT, 1, 8, 8)
    assert open_network(None, run / "best.safetensors").images is None


def test_the_lens_shows_images_at_the_size_of_training(run: Path, tmp_path: Path):
    Image.new("RGB", (50, 40)).save(tmp_path / "a.png")
    network = open_network(None, run).network
    assert batch_of_images(tmp_path, network, 1).pixels.shape == (1, 1, 8, 8)


@pytest.mark.parametrize(
    "images", [torch.zeros(2, 3, 8, 8), torch.zeros(2, 8), torch.full((1, 1, 8, 8), torch.nan), torch.zeros(0, 1, 8, 8)]
)
def test_examples_that_cannot_be_used_are_left_out(tmp_path: Path, images: torch.Tensor):
    save_file({"images": images}, tmp_path / examples.NAME)
    assert examples.images_of(tmp_path, 1) is None
    (tmp_path / examples.NAME).write_bytes(b"no tensors")
    assert examples.images_of(tmp_path, 1) is None


@pytest.mark.parametrize(("text", "sides"), [("64", (64, 64)), ("64x96", (64, 96))])
def test_networks_are_timed_at_sizes_that_are_spelled_as_everywhere(text: str, sides: tuple[int, int]):
    found = Images.parse(text, 2)
    assert (found.height, found.width) == sides


@pytest.mark.exhaustive
def test_a_trunk_is_exported_and_compared_on_the_images_of_its_run(run: Path, tmp_path: Path):
    output = tmp_path / "a.onnx"
    done = CliRunner().invoke(cli.build_app(), ["export", "--weights", str(run), "-o", str(output)])
    assert done.exit_code == 0, done.output
    assert "on random images and 4 of the run" in done.output.replace("\n", " ")
    facts = onnxruntime.InferenceSession(output).get_modelmeta().custom_metadata_map
    assert '"0", "1"' in facts["class_names"]

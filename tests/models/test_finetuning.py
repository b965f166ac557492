"""Plain timm code fine-tunes our networks on a folder of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_dataset, create_loader, resolve_model_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

import affinear.models  # noqa: F401  # pyright: ignore[reportUnusedImport]  # registers the names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes that every crop tells apart: red, or blue."""
    generator = np.random.default_rng()
    for label, channel in (("red", 0), ("blue", 2)):
        (tmp_path / label).mkdir()
        for i in range(8):
            pixels = generator.integers(0, 100, (48, 60, 3), dtype=np.uint8)
            pixels[..., channel] += 150
            Image.fromarray(pixels).save(tmp_path / label / f"{i}.png")
    return tmp_path


# timm's data set leaves it to the garbage collector to close its files.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_a_folder_of_images_is_learnt(folder: Path):
    model = timm.create_model(
        "mavit_tiny", num_classes=2, drop_path_rate=0.0, depths=(1, 1, 1, 1), embed_dims=(16, 32, 64, 64)
    )
    data: dict[str, Any] = {**resolve_model_data_config(model), "input_size": (3, 48, 48)}
    dataset: Any = create_dataset("", str(folder))
    loader = create_loader(
        dataset, batch_size=8, is_training=True, num_workers=0, use_prefetcher=False, hflip=0.5, **data
    )
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.95)
    scheduler: Any
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=12)
    losses: list[float] = []
    for epoch in range(12):
        model.train()
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step(epoch + 1)
    assert np.median(losses[-8:]) < 0.5 * np.log(2)  # half of what guessing costs

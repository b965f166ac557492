"""HuggingFace datasets on disk, through timm's reader."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from affinear.tasks.classify import data

datasets = pytest.importorskip("datasets")
LABEL = datasets.ClassLabel(names=["cat", "dog"])


@pytest.fixture(autouse=True)
def _quiet_and_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (5, 4), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


def table(count: int, label: Any = LABEL, image: str = "image", broken: int = -1) -> Any:
    entries = [{"bytes": b"no image" if number == broken else png(number), "path": None} for number in range(count)]
    columns = {image: entries, "label": [number % 2 for number in range(count)]}
    return datasets.Dataset.from_dict(columns, datasets.Features({image: datasets.Image(), "label": label}))


def parquet(folder: Path, **splits: Any) -> str:
    folder.mkdir()
    for name, content in splits.items():
        content.to_parquet(folder / f"{name}-00000-of-00001.parquet")
    return f"hfds/{folder}"


def test_parquet_files(tmp_path: Path):
    images = data.open_data(parquet(tmp_path / "Pets", train=table(6), test=table(3), validation=table(4)))
    assert (len(images.train), len(images.test), images.class_names) == (6, 4, ("cat", "dog"))
    image, label = images.train[5]
    assert (image.mode, image.getpixel((0, 0)), label) == ("RGB", (5, 0, 0), 1)
    assert images.train.path(5) == f"{tmp_path / 'Pets'} train image 5"


def test_a_folder_that_save_to_disk_wrote(tmp_path: Path):
    datasets.DatasetDict({"train": table(6), "test": table(3)}).save_to_disk(tmp_path / "saved")
    images = data.open_data(f"hfds/{tmp_path / 'saved'}")
    assert images.test[2][0].getpixel((0, 0)) == (2, 0, 0)


def test_it_is_loaded_like_any_other_and_corrupt_images_are_passed_over(tmp_path: Path):
    images = data.open_data(parquet(tmp_path / "a", train=table(100, broken=41), test=table(3)))
    skipped = data.Skipped()
    how = data.Batching(10, (4, 5), workers=2, mean=(0.0,) * 3, std=(1.0,) * 3)
    seen = [int(one) for pixels, _ in data.train_loader(images, how, skipped) for one in pixels[:, 0, 0, 0]]
    assert sorted(seen) == sorted([*range(41), 42, *range(42, 100)])
    assert skipped.names == (f"{tmp_path / 'a'} train image 41",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"image": "picture"},
            r"expected the columns image .* got picture \(Image\), label \(ClassLabel\); rename_column",
        ),
        ({"label": datasets.Value("int64")}, r"got image \(Image\), label \(Value\)"),
    ],
)
def test_columns_that_the_reader_does_not_know_are_named(tmp_path: Path, given: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        data.open_data(parquet(tmp_path / "a", train=table(2, **given), test=table(2, **given)))


def test_a_missing_split_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"expected a split called train or training .* got train"):
        data.open_data(parquet(tmp_path / "a", train=table(2)))


def test_a_folder_of_something_else_is_named(tmp_path: Path):
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match="datasets cannot read it"):
        data.open_data(f"hfds/{tmp_path / 'a'}")


def test_without_the_package_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'affinear\[datasets\]'"):
        data.open_data(f"hfds/{tmp_path}")

"""From what a user writes after `--data` to a data set, or to a sentence that says what was looked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from . import cifar, folder, hugging, idx, shards
from .digits import digits
from .images import Images

READERS: dict[str, Callable[[Path], Images]] = {"hfds": hugging.read, "wds": shards.read}
# Where the tools that fetch these data sets put them below the folder they are told.
BELOW = ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary", "MNIST/raw", "raw")
LOOKED_FOR = (
    "CIFAR-10 (data_batch_1 ... test_batch, or the same with .bin)",
    "CIFAR-100 (train, test and meta, or train.bin and test.bin)",
    "idx files (train-images-idx3-ubyte, ... , or the same with .gz)",
    "folders of images (train/CLASS/... and val/CLASS/..., or CLASS/... alone)",
)


def open_data(spec: str) -> Images:
    """Open a data set.

    Args:
        spec: "digits" for those of scikit-learn; a folder with the files of CIFAR-10 or CIFAR-100, with idx files, or
            with images in class folders; "hfds/FOLDER" for a HuggingFace dataset; "wds/FOLDER" for WebDataset shards.
            A folder that is called digits is "./digits".

    Raises:
        ValueError: If it is not there, not recognised or damaged. The message lists what was looked for and what was
            found.
    """
    if spec == "digits":
        return digits()
    kind, _, rest = spec.partition("/")
    if kind in READERS and rest:
        return READERS[kind](_existing(rest, spec))
    return _open_folder(_existing(spec, spec))


def open_whole(spec: str) -> Images | None:
    """All images of class folders, none held out, as the test half; None where the data has a test half of its own.

    Raises:
        ValueError: If a folder's images cannot be told apart.
    """
    path = Path(spec).expanduser()
    if spec == "digits" or not path.is_dir() or folder.halves_in(path) is not None:
        return None
    if any(cifar.recognise(place) or idx.recognise(place) for place in _places(path)):
        return None
    tests = [path / name for name in folder.TESTS if (path / name).is_dir()]
    return None if (path / folder.TRAIN).is_dir() else folder.read_whole(tests[0] if tests else path)


def _places(path: Path) -> tuple[Path, ...]:
    return (path, *(path / name for name in BELOW if (path / name).is_dir()))


def _existing(name: str, spec: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_dir():
        what = "it is a file" if path.exists() else "there is nothing of that name"
        raise ValueError(
            f"data: expected digits, a folder, hfds/FOLDER or wds/FOLDER, got {spec!r}: {what}; nothing is fetched"
        )
    return path


def _open_folder(path: Path) -> Images:
    for place in _places(path):
        layout = cifar.recognise(place)
        if layout is not None:
            return cifar.read(place, layout)
        found = idx.recognise(place)
        if found is not None:
            return idx.read(place, found)
    halves = folder.halves_in(path)
    if halves is not None:
        return folder.read_halves(path, *halves)
    lone = [name for name in (folder.TRAIN, *folder.TESTS) if (path / name).is_dir()]
    images = None if lone else folder.read_classes(path)
    if images is None:
        raise ValueError(_unrecognised(path, lone))
    return images


def _unrecognised(path: Path, lone: list[str]) -> str:
    names = sorted(one.name + "/" * one.is_dir() for one in path.iterdir())
    listed = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    hint = ""
    if lone == [folder.TRAIN]:
        hint = f"; to hold out one image in {folder.HELD_OUT} for testing, give {path / folder.TRAIN}"
    elif any(name.endswith(".tar") for name in names):
        hint = f"; for WebDataset shards write wds/{path}"
    elif any(name.endswith((".parquet", ".arrow")) or name == "dataset_dict.json" for name in names):
        hint = f"; for a HuggingFace dataset write hfds/{path}"
    looked_for = "; ".join(LOOKED_FOR)
    return f"data: {path} is no data set that is known. Looked for: {looked_for}. Found: {listed or 'nothing'}{hint}"

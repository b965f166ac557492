"""From what a user writes after `--data` to sequences, or to a sentence that says what was looked for."""

from __future__ import annotations

from pathlib import Path

from ..images.labelled import cifar
from ..images.labelled.opening import BELOW
from . import image, keeping, listops, pathfinder, retrieval, text
from .sequences import Ranges

MADE = ("listops", *pathfinder.LOOKS)
LOOKED_FOR = (
    "CIFAR-10 (data_batch_1 ... test_batch, or the same with .bin)",
    "ListOps (basic_train.tsv, basic_val.tsv, basic_test.tsv)",
    "pairs of papers (*.train.tsv, *.eval.tsv, *.test.tsv)",
    "reviews (train/pos, train/neg, test/pos, test/neg; or train.csv and test.csv)",
)


def open_ranges(spec: str) -> Ranges:
    """Open a data set of the Long Range Arena.

    Args:
        spec: "listops", "pathfinder" or "pathx" for what is made up, with options after a colon such as
            "listops:train=1000,seed=3"; a folder with the files of CIFAR-10, of ListOps, of pairs of papers, or with
            reviews; a table of reviews (.csv); or a data set that was kept (.safetensors).

    Raises:
        ValueError: If it is not there, not recognised or damaged.
    """
    kind = spec.partition(":")[0]
    if kind in MADE:
        return listops.made(spec) if kind == "listops" else pathfinder.made(spec)
    path = Path(spec).expanduser()
    if path.is_file():
        if path.suffix == ".csv":
            return text.read_table(path)
        if path.suffix == keeping.SUFFIX:
            return keeping.read(path)
        raise ValueError(f"data: {path}: expected a folder, a .csv of reviews or a .safetensors that was kept")
    if not path.is_dir():
        raise ValueError(
            f"data: expected {', '.join(MADE)}, a folder, a .csv or a .safetensors, got {spec!r}: there is nothing of "
            "that name; nothing is fetched"
        )
    return _folder(path)


def _folder(path: Path) -> Ranges:
    for place in (path, *(path / name for name in BELOW if (path / name).is_dir())):
        layout = cifar.recognise(place)
        if layout is not None and layout.classes == 10:
            return image.read(place, layout)
    if any((path / name).is_file() for name in listops.FILES.values()):
        return listops.read(path)
    if retrieval.files_in(path):
        return retrieval.read(path)
    if text.is_folder(path):
        return text.read_folder(path)
    if (path / "train.csv").is_file() and (path / "test.csv").is_file():
        return text.read_tables(path / "train.csv", path / "test.csv")
    names = sorted(one.name + "/" * one.is_dir() for one in path.iterdir())
    listed = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    raise ValueError(
        f"data: {path} is no data set that is known. Looked for: {'; '.join(LOOKED_FOR)}. Found: {listed or 'nothing'}"
    )

"""HuggingFace datasets on this disk, through timm's reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from ..reading import CorruptImage, decode
from .images import Digest, Images
from .splits import pick


class HuggingSource:
    """Images of a split.

    Args:
        folder: Where the data set is.
        split: Its name.
        reader: timm's, open.
    """

    def __init__(self, folder: Path, split: str, reader: Any) -> None:
        self.folder, self.split, self.reader = folder, split, reader

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        try:
            file, label = self.reader[index]
        except (OSError, TypeError, AssertionError) as error:  # its file is gone, or its entry empty
            raise CorruptImage(f"{self.path(index)}: cannot be read ({error})") from error
        with file:
            return decode(file, self.path(index)), int(label)

    def path(self, index: int) -> str:
        """Its file, if it has one of its own; otherwise its number."""
        try:
            name = self.reader.filename(index)
        except TypeError:  # an empty entry
            name = None
        return str(name or f"{self.folder} {self.split} image {index}")

    def mark(self, digest: Digest) -> None:
        """The class of each image; the images themselves would have to be decoded."""
        digest.update(" ".join(map(str, self.reader.dataset["label"])).encode())


def read(folder: Path) -> Images:
    """Open a folder of parquet files, of images, or one that `save_to_disk` wrote.

    Raises:
        ValueError: If `datasets` is missing or cannot read the folder, or a column or split is not there.
    """
    try:
        import datasets
        from datasets.exceptions import DatasetsError
        from timm.data.readers.reader_hfds import ReaderHfds
    except ImportError as error:
        raise ValueError(f"hfds/{folder}: needs the package datasets; run pip install 'affinear[datasets]'") from error
    try:
        train, test = pick([str(name) for name in datasets.get_dataset_split_names(str(folder))], folder)
        first: Any = datasets.load_dataset(str(folder), split=train)
        _check_columns(folder, first.features)
        # The reader itself, since timm's factory would write the folder's name in small letters.
        readers = {split: ReaderHfds(name=str(folder), split=split) for split in (train, test)}
    except (DatasetsError, OSError, RuntimeError) as error:  # the last where code lies beside the data
        raise ValueError(f"hfds/{folder}: datasets cannot read it ({str(error).partition(chr(10))[0]})") from error
    for split, reader in readers.items():
        if min(reader.dataset["label"], default=-1) < 0:
            raise ValueError(f"hfds/{folder}: expected a label with every image of the split {split}, got some without")
    learnt, tested = (HuggingSource(folder, split, reader) for split, reader in readers.items())
    name = f"HuggingFace dataset in {folder} ({train}, {test})"
    return Images(name, learnt, tested, tuple(first.features["label"].names), None, 3)


def _check_columns(folder: Path, features: Any) -> None:
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    if (kinds.get("image"), kinds.get("label")) != ("Image", "ClassLabel"):
        found = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise ValueError(
            f"hfds/{folder}: expected the columns image (Image) and label (ClassLabel), which timm's reader wants, got "
            f"{found}; rename_column and cast_column of datasets change them"
        )

"""The idx files of MNIST, in all their spellings."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from affinear.tasks.classify.data import ArraySource, open_data


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write(folder: Path, seed: int, spelling: str = "{half}-{what}-idx{dims}-ubyte") -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(seed)
    content: dict[str, np.ndarray] = {}
    for half, count in (("train", 12), ("t10k", 5)):
        content[f"{half} images"] = numbers.integers(0, 256, (count, 28, 20))
        content[f"{half} labels"] = np.arange(count) % 4
        for what, dims in (("images", 3), ("labels", 1)):
            path = folder / spelling.format(half=half, what=what, dims=dims)
            raw = idx(content[f"{half} {what}"])
            path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return content


@pytest.mark.parametrize(
    "spelling",
    [
        "{half}-{what}-idx{dims}-ubyte",
        "{half}-{what}-idx{dims}-ubyte.gz",
        "{half}-{what}.idx{dims}-ubyte",
        "emnist-balanced-{half}-{what}-idx{dims}-ubyte.gz",
    ],
)
def test_all_spellings(tmp_path: Path, seed: int, spelling: str):
    content = write(tmp_path, seed, spelling)
    images = open_data(str(tmp_path))
    assert images.name == f"idx files in {tmp_path}"
    assert (images.size, images.channels, images.class_names) == ((28, 20), 1, ("0", "1", "2", "3"))
    for source, half in ((images.train, "train"), (images.test, "t10k")):
        assert isinstance(source, ArraySource)
        np.testing.assert_array_equal(source.pixels[:, 0], content[f"{half} images"])
        np.testing.assert_array_equal(source.labels, content[f"{half} labels"])
    image, label = images.train[3]
    assert (image.mode, image.size, label) == ("L", (20, 28), 3)


def test_a_packed_file_beside_itself_is_read_once(tmp_path: Path, seed: int):
    write(tmp_path, seed)
    write(tmp_path, seed, "{half}-{what}-idx{dims}-ubyte.gz")
    assert len(open_data(str(tmp_path)).train) == 12


def test_two_sets_in_a_folder_are_told_apart_by_nobody(tmp_path: Path, seed: int):
    write(tmp_path, seed)
    write(tmp_path, seed, "other-{half}-{what}-idx{dims}-ubyte")
    with pytest.raises(ValueError, match="keep one set there"):
        open_data(str(tmp_path))


def test_a_missing_file_is_named(tmp_path: Path, seed: int):
    write(tmp_path, seed)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match=r"missing: test labels$"):
        open_data(str(tmp_path))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda raw: raw[:-1], "expected 6720 bytes"),
        (lambda raw: raw[:3], "expected an idx file of bytes with 3 dimensions"),
        (lambda raw: b"", "got nothing"),
        (lambda raw: b"\0\0\x0d" + raw[3:], "got 00000d03"),
    ],
)
def test_damage_is_named(tmp_path: Path, seed: int, damage, said: str):
    write(tmp_path, seed)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"train-images-idx3-ubyte: .*{said}"):
        open_data(str(tmp_path))


def test_a_packed_file_that_is_cut_is_named(tmp_path: Path, seed: int):
    write(tmp_path, seed, "{half}-{what}-idx{dims}-ubyte.gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz: cannot be unpacked"):
        open_data(str(tmp_path))


def test_labels_that_are_too_few_are_named(tmp_path: Path, seed: int):
    write(tmp_path, seed)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(11)))
    with pytest.raises(ValueError, match="expected 12 labels, as train-images-idx3-ubyte has images, got 11"):
        open_data(str(tmp_path))


@pytest.mark.parametrize("shape", [(0, 28, 28), (12, 0, 0)])
def test_files_of_no_size_are_named(tmp_path: Path, seed: int, shape: tuple[int, ...]):
    write(tmp_path, seed)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(np.zeros(shape)))
    with pytest.raises(ValueError, match="train-images-idx3-ubyte: expected images or labels, got none"):
        open_data(str(tmp_path))


def test_no_more_is_unpacked_than_the_header_announces(tmp_path: Path, seed: int):
    write(tmp_path, seed, "{half}-{what}-idx{dims}-ubyte.gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.zeros((12, 28, 20))) + bytes(10**8)))
    with pytest.raises(ValueError, match=r"expected 6720 bytes for \(12, 28, 20\), got 6721 or more"):
        open_data(str(tmp_path))
    path.write_bytes(gzip.compress(struct.pack(">BBBB3I", 0, 0, 8, 3, 2**16, 2**16, 2**16) + bytes(10**6)))
    with pytest.raises(ValueError, match="at most 1,073,741,824 bytes, got a header that announces"):
        open_data(str(tmp_path))

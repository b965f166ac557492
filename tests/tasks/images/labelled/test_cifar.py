"""CIFAR in its published files, of both kinds."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from affinear.tasks.classify.data import ArraySource, open_data

TEN = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
HUNDRED = [f"class{number}" for number in range(100)]
BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]

Rows = tuple[np.ndarray, np.ndarray]


def rows(random_numbers: np.random.Generator, classes: int) -> Rows:
    return random_numbers.integers(0, 256, (7, 3072), np.uint8), random_numbers.integers(0, classes, 7)


def write_ten(folder: Path, seed: int, binary: bool) -> dict[str, Rows]:
    content = {name: rows(np.random.default_rng([seed, place]), 10) for place, name in enumerate(BATCHES)}
    for name, (pixels, labels) in content.items():
        if binary:
            both = np.concatenate([labels[:, None].astype(np.uint8), pixels], 1)
            (folder / f"{name}.bin").write_bytes(both.tobytes())
        else:
            batch = {
                b"batch_label": name.encode(),
                b"labels": labels.tolist(),
                b"data": pixels,
                b"filenames": [b"a.png"],
            }
            (folder / name).write_bytes(pickle.dumps(batch, 2))
    if binary:
        (folder / "batches.meta.txt").write_text("\n".join(TEN) + "\n\n", encoding="utf-8")
    else:
        meta = {b"num_cases_per_batch": 7, b"label_names": [name.encode() for name in TEN], b"num_vis": 3072}
        (folder / "batches.meta").write_bytes(pickle.dumps(meta, 2))
    return content


def write_hundred(folder: Path, seed: int, binary: bool) -> dict[str, Rows]:
    content = {name: rows(np.random.default_rng([seed, place]), 100) for place, name in enumerate(("train", "test"))}
    for name, (pixels, fine) in content.items():
        coarse = fine // 5
        if binary:
            both = np.concatenate([np.stack([coarse, fine], 1).astype(np.uint8), pixels], 1)
            (folder / f"{name}.bin").write_bytes(both.tobytes())
        else:
            batch = {"fine_labels": fine.tolist(), "coarse_labels": coarse.tolist(), "data": pixels}
            (folder / name).write_bytes(pickle.dumps(batch))
    if binary:
        (folder / "fine_label_names.txt").write_text("\n".join(HUNDRED), encoding="utf-8")
    else:
        (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": HUNDRED, "coarse_label_names": ["x"]}))
    return content


@pytest.mark.parametrize("binary", [False, True])
def test_cifar_10(tmp_path: Path, seed: int, binary: bool):
    content = write_ten(tmp_path, seed, binary)
    images = open_data(str(tmp_path))
    assert images.name == f"CIFAR-10 in {tmp_path}"
    assert (images.size, images.channels, images.class_names) == ((32, 32), 3, tuple(TEN))
    assert (len(images.train), len(images.test)) == (35, 7)
    pixels, labels = content["data_batch_3"]
    image, label = images.train[14 + 2]
    assert label == labels[2]
    np.testing.assert_array_equal(np.asarray(image), pixels[2].reshape(3, 32, 32).transpose(1, 2, 0))
    assert images.test[6][1] == content["test_batch"][1][6]
    assert images.train.path(16) == "train image 16"


@pytest.mark.parametrize("binary", [False, True])
def test_cifar_100_has_fine_labels(tmp_path: Path, seed: int, binary: bool):
    content = write_hundred(tmp_path, seed, binary)
    images = open_data(str(tmp_path))
    assert images.name == f"CIFAR-100 in {tmp_path}"
    assert images.class_names == tuple(HUNDRED)
    for source, name in ((images.train, "train"), (images.test, "test")):
        assert isinstance(source, ArraySource)
        np.testing.assert_array_equal(source.pixels.reshape(7, -1), content[name][0])
        np.testing.assert_array_equal(source.labels, content[name][1])


def test_a_folder_above_is_looked_into(tmp_path: Path, seed: int):
    inner = tmp_path / "cifar-10-batches-py"
    inner.mkdir()
    write_ten(inner, seed, binary=False)
    assert open_data(str(tmp_path)).name == f"CIFAR-10 in {inner}"


def test_missing_files_are_named(tmp_path: Path, seed: int):
    write_ten(tmp_path, seed, binary=True)
    (tmp_path / "data_batch_4.bin").unlink()
    with pytest.raises(ValueError, match=r"missing: data_batch_4.bin$"):
        open_data(str(tmp_path))
    write_ten(tmp_path, seed, binary=True)
    (tmp_path / "batches.meta.txt").unlink()
    with pytest.raises(ValueError, match=r"needs batches.meta.txt"):
        open_data(str(tmp_path))


def test_damage_is_named(tmp_path: Path, seed: int):
    write_ten(tmp_path, seed, binary=True)
    path = tmp_path / "data_batch_2.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match=r"data_batch_2.bin: expected rows of 3073 bytes, got 21506"):
        open_data(str(tmp_path))
    path.write_bytes(b"\x0a" + whole[1:])
    with pytest.raises(ValueError, match=r"data_batch_2.bin: expected labels from 0 to 9"):
        open_data(str(tmp_path))
    path.write_bytes(whole)
    (tmp_path / "batches.meta.txt").write_text("cat\ndog\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"expected the names of 10 classes, got 2"):
        open_data(str(tmp_path))


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"data": np.zeros((7, 3072), np.uint8)}, "expected data and labels, got data"),
        ({"data": np.zeros((6, 3072), np.uint8), "labels": [0] * 7}, r"expected data of shape \(7, 3072\)"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0, "one"]}, "expected whole numbers as labels"),
    ],
)
def test_a_pickle_of_something_else_is_named(tmp_path: Path, seed: int, batch: dict[str, object], said: str):
    write_ten(tmp_path, seed, binary=False)
    (tmp_path / "data_batch_5").write_bytes(pickle.dumps(batch))
    with pytest.raises(ValueError, match=f"data_batch_5: {said}"):
        open_data(str(tmp_path))


@pytest.mark.parametrize("label", [2**80, [3], -1, 10, None, "cat", float("nan")])
def test_labels_that_are_none_are_named(tmp_path: Path, seed: int, label: object):
    write_ten(tmp_path, seed, binary=False)
    path = tmp_path / "data_batch_2"
    labels = [[label]] * 7 if isinstance(label, list) else [label] * 7
    path.write_bytes(pickle.dumps({"labels": labels, "data": np.zeros((7, 3072), np.uint8)}))
    with pytest.raises(ValueError, match=r"data_batch_2: expected .*label"):
        open_data(str(tmp_path))


@pytest.mark.parametrize("names", [3, None, [3] * 10, {}, "airplane"])
def test_names_of_classes_that_are_none_are_named(tmp_path: Path, seed: int, names: object):
    write_ten(tmp_path, seed, binary=False)
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({"label_names": names, 5: 6}))
    with pytest.raises(ValueError, match=r"batches.meta: expected names of classes"):
        open_data(str(tmp_path))

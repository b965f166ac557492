"""WebDataset shards."""

import gc
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from PIL import Image

from affinear.tasks.classify import data


def picture(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (5, 4), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


def sample(number: int, **more: bytes) -> dict[str, bytes]:
    files = {"png": picture(number), "cls": str(number % 3).encode()} | more
    return {f"n{number:03}.{suffix}": content for suffix, content in files.items()}


def shard(path: Path, samples: Iterable[dict[str, bytes]]) -> str:
    with tarfile.open(path, "w") as tar:
        for one in samples:
            for name, content in one.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path.name


def listed(folder: Path, alt_label: str = "") -> str:
    """Shards with an `_info.json` as timm's reader wants it."""
    splits = {}
    for name, numbers in (("train", range(6)), ("validation", range(6, 9))):
        samples = [sample(number, json=json.dumps({"kind": number - 1}).encode()) for number in numbers]
        halves = samples[:4], samples[4:]
        files = [shard(folder / f"pets-{name}-{part}.tar", half) for part, half in enumerate(halves)]
        lengths = list(map(len, halves))
        splits[name] = {"name": name, "num_samples": 6, "filenames": files, "shard_lengths": lengths}
        splits[name]["alt_label"] = alt_label
    (folder / "_info.json").write_text(json.dumps({"splits": splits}), encoding="utf-8")
    return f"wds/{folder}"


def test_shards_that_are_listed(tmp_path: Path):
    pytest.importorskip("webdataset")
    images = data.open_data(listed(tmp_path))
    assert images.name == f"shards in {tmp_path} (train, validation)"
    assert (len(images.train), len(images.test), images.class_names) == (6, 3, ("0", "1", "2"))
    image, label = images.train[5]
    assert (image.mode, image.getpixel((0, 0)), label) == ("RGB", (5, 0, 0), 2)
    assert images.train.path(5) == f"{tmp_path / 'pets-train-1.tar'}:n005"


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves its files to the garbage collector
def test_they_are_what_timms_reader_streams(tmp_path: Path):
    pytest.importorskip("webdataset")
    from timm.data.readers.reader_wds import ReaderWds

    images = data.open_data(listed(tmp_path))
    streamed = [(image.getpixel((0, 0)), label) for image, label in ReaderWds(str(tmp_path), split="train")]
    gc.collect()
    ours = [images.train[index] for index in range(len(images.train))]
    assert [(image.getpixel((0, 0)), label) for image, label in ours] == streamed


def test_other_labels_are_in_the_json_and_may_leave_samples_out(tmp_path: Path):
    pytest.importorskip("webdataset")
    images = data.open_data(listed(tmp_path, alt_label="kind"))
    assert [images.train[index][1] for index in range(len(images.train))] == [0, 1, 2, 3, 4]


def plain(folder: Path, train: Iterable[dict[str, bytes]], test: Iterable[dict[str, bytes]] = (sample(1),)) -> str:
    shard(folder / "train-000.tar", train)
    shard(folder / "test-000.tar", test)
    return f"wds/{folder}"


def test_shards_by_their_names_alone(tmp_path: Path):
    spec = plain(tmp_path, map(sample, range(4)))
    shard(tmp_path / "train-001.tar", [sample(4)])
    (tmp_path / "classnames.txt").write_text("ant\nbee\n蛇\n", encoding="utf-8")
    images = data.open_data(spec)
    assert (len(images.train), len(images.test), images.class_names) == (5, 1, ("ant", "bee", "蛇"))


def test_only_whole_samples_count(tmp_path: Path):
    alone = {"x.png": picture(1)}
    deep = {"a/b.seg.png": picture(9), "a/b.PNG": picture(7), "a/b.cls": b"1\n"}
    images = data.open_data(plain(tmp_path, [alone, deep, {"y.cls": b"0"}]))
    assert len(images.train) == 1
    assert images.train[0][0].getpixel((0, 0)) == (7, 0, 0)
    with pytest.raises(
        ValueError, match=r"expected samples with an image \(jpg, jpeg, png, webp\) and its class \(cls\)"
    ):
        data.open_data(plain(tmp_path, [alone]))


def test_they_are_loaded_like_any_other_and_corrupt_images_are_passed_over(tmp_path: Path):
    images = data.open_data(plain(tmp_path, [sample(n, **({"png": b"no"} if n == 41 else {})) for n in range(100)]))
    skipped = data.Skipped()
    how = data.Batching(10, (4, 5), workers=2, mean=(0.0,) * 3, std=(1.0,) * 3)
    pixels = torch.cat([pixels for pixels, _ in data.train_loader(images, how, skipped)])
    seen = pixels[:, 0, 0, 0].tolist()
    assert sorted(seen) == sorted([*range(41), 42, *range(42, 100)])
    assert skipped.names == (f"{tmp_path / 'train-000.tar'}:n041",)


def test_what_is_wrong_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match=r"expected shards, files that end in .tar, found none"):
        data.open_data(f"wds/{tmp_path}")
    spec = plain(tmp_path, [sample(1, cls=b"cat")])
    with pytest.raises(ValueError, match=r"train-000.tar:n001: expected a number as its class"):
        data.open_data(spec)
    (tmp_path / "train-000.tar").write_bytes(b"no tar file at all")
    with pytest.raises(ValueError, match=r"train-000.tar: cannot be read as a tar file"):
        data.open_data(spec)
    (tmp_path / "train-000.tar").unlink()
    with pytest.raises(ValueError, match="expected a split called train or training"):
        data.open_data(spec)


def test_lists_that_do_not_fit_are_named(tmp_path: Path):
    pytest.importorskip("webdataset")
    spec = listed(tmp_path)
    (tmp_path / "pets-train-1.tar").unlink()
    with pytest.raises(ValueError, match=r"shards of train that are listed are missing: pets-train-1.tar"):
        data.open_data(spec)
    (tmp_path / "_info.json").write_text('{"splits": {"train": {}, "val": {}}}', encoding="utf-8")
    with pytest.raises(ValueError, match="what it lists of the split train is not as timm writes it"):
        data.open_data(spec)
    (tmp_path / "_info.json").write_text("[", encoding="utf-8")
    with pytest.raises(ValueError, match=r"_info.json: expected JSON with the splits"):
        data.open_data(spec)


def test_without_the_package_a_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from timm.data.readers import reader_wds

    monkeypatch.setattr(reader_wds, "wds", None)
    with pytest.raises(ValueError, match=r"pip install 'affinear\[datasets\]'"):
        data.open_data(listed(tmp_path))


@pytest.mark.parametrize("label", [b"9" * 80, b"[3]", b"", b"\xff", b"1e5", b"9" * 5000])
def test_classes_that_are_no_numbers_are_named(tmp_path: Path, label: bytes):
    shard(tmp_path / "train-0.tar", [sample(1, cls=label)])
    shard(tmp_path / "test-0.tar", [sample(2)])
    with pytest.raises(ValueError, match=r"n001: expected (a number as its class|the number of its class)"):
        data.open_data(f"wds/{tmp_path}")


def test_shards_elsewhere_are_refused(tmp_path: Path):
    pytest.importorskip("webdataset")
    spec = listed(tmp_path)
    told = json.loads((tmp_path / "_info.json").read_text())
    told["splits"]["train"]["filenames"][0] = "../elsewhere.tar"
    (tmp_path / "_info.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="expected shards of train in the folder itself, got one elsewhere"):
        data.open_data(spec)

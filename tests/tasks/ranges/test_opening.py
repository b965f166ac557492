"""What `--data` takes for long ranges, and what is refused in a sentence."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from affinear.tasks.ranges import keeping
from affinear.tasks.ranges.opening import open_ranges
from affinear.tasks.ranges.sequences import Ranges


def reviews(folder: Path) -> Path:
    for half in ("train", "test"):
        for kind in ("pos", "neg"):
            (folder / half / kind).mkdir(parents=True)
            for number in range(3):
                (folder / half / kind / f"{number}_7.txt").write_text(f"{kind} {random.random()} é", encoding="utf-8")
    return folder


def test_reviews_in_folders_are_bytes(tmp_path: Path):
    data = open_ranges(str(reviews(tmp_path)))
    assert (data.kind, data.sizes, data.symbols, data.length) == ("text", (6, 6), 256, 4096)
    kinds = {bytes(data.test.rows[0][i])[:3]: int(data.test.labels[i]) for i in range(6)}
    assert kinds == {b"neg": 0, b"pos": 1}
    assert "é".encode() in bytes(data.train.rows[0][0])


def test_reviews_in_a_table_are_halved_by_class_unless_a_column_says_how(tmp_path: Path):
    rows = [f'"good, {i}",positive' for i in range(4)] + [f"bad {i},negative" for i in range(2)]
    (tmp_path / "a.csv").write_text("review,sentiment\n" + "\n".join(rows), encoding="utf-8")
    data = open_ranges(str(tmp_path / "a.csv"))
    assert sorted(data.train.labels.tolist()) == [0, 1, 1] == sorted(data.test.labels.tolist())
    (tmp_path / "b.csv").write_text("text,label,split\ngood,1,train\nbad,0,train\nfine,1,test\n", encoding="utf-8")
    assert open_ranges(str(tmp_path / "b.csv")).sizes == (2, 1)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"review,sentiment\n", "expected rows with reviews, got none"),
        (b"film,sentiment\nx,1\n", "expected a column called review or text, got film, sentiment"),
        (b"review,sentiment\ngood,maybe\n", "row 2: expected a review and one of .* got 'maybe'"),
        (b"review,sentiment\n\xff,1\n", "expected text in UTF-8, got the byte 0xff"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, content: bytes, said: str):
    (tmp_path / "x.csv").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        open_ranges(str(tmp_path / "x.csv"))


def test_pairs_of_papers_are_read_as_published(tmp_path: Path):
    for end in ("train", "eval", "test"):
        lines = ["1.0\tP1\tP2\tone paper\tanother", '0.0\tP3\tP4\t"quoted\tthird']
        (tmp_path / f"new_aan_pairs.{end}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = open_ranges(str(tmp_path))
    assert (data.kind, data.pairs, data.sizes) == ("retrieval", True, (2, 2))
    assert [bytes(column[1]) for column in data.test.rows] == [b'"quoted', b"third"]
    assert data.validation.labels.tolist() == [1, 0]
    (tmp_path / "new_aan_pairs.eval.tsv").write_text("1.0\tP1\tP2\tone paper\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"eval.tsv: line 1: expected a label .* got 4 fields"):
        open_ranges(str(tmp_path))
    (tmp_path / "new_aan_pairs.eval.tsv").unlink()
    with pytest.raises(ValueError, match=r"missing: \*\.eval\.tsv"):
        open_ranges(str(tmp_path))


def test_cifar_is_grey_and_has_three_parts(tmp_path: Path):
    generator = np.random.default_rng()
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    pixels = generator.integers(0, 256, (4, 3, 32, 32), np.uint8)
    for name in names:
        (tmp_path / name).write_bytes(b"".join(bytes([i]) + pixels[i].tobytes() for i in range(4)))
    (tmp_path / "batches.meta.txt").write_text(" ".join("abcdefghij"), encoding="utf-8")
    data = open_ranges(str(tmp_path))
    assert (data.kind, data.length, data.symbols) == ("image", 1024, 256)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [18, 2, 4]
    red, green, blue = (pixels[2, channel].astype(float) for channel in range(3))
    expected = 0.2989 * red + 0.587 * green + 0.114 * blue
    assert np.abs(data.test.rows[0][2].reshape(32, 32) - expected).max() <= 0.5 + 1e-4


def same(one: Ranges, other: Ranges) -> bool:
    return (one.fingerprint, one.name, one.classes, one.length) == (
        other.fingerprint,
        other.name,
        other.classes,
        other.length,
    )


def test_what_is_kept_is_read_again_and_never_replaced_in_silence(tmp_path: Path):
    data = open_ranges(f"listops:train=9,validation=2,test=3,shortest=4,longest=50,seed={random.randrange(10**6)}")
    path = keeping.keep(data, tmp_path / "a.safetensors")
    assert same(open_ranges(str(path)), data)
    assert keeping.keep(data, tmp_path / "a.safetensors") == path  # the same content
    other = open_ranges("listops:train=8,validation=2,test=3,shortest=4,longest=50")
    assert keeping.keep(other, tmp_path / "a.safetensors") != path


def refusal(path: Path) -> str:
    try:
        open_ranges(str(path))
    except ValueError as error:
        return str(error)
    return ""


def test_a_kept_file_that_is_damaged_is_refused_in_a_sentence(tmp_path: Path):
    data = open_ranges("listops:train=9,validation=2,test=3,shortest=4,longest=50")
    path = keeping.keep(data, tmp_path / "a.safetensors")
    content = bytearray(path.read_bytes())
    damaged = 0
    for _ in range(60):
        changed = bytearray(content)
        place = random.randrange(len(changed))
        changed[place] ^= 1 << random.randrange(8)
        path.write_bytes(bytes(changed[: random.choice((len(changed), random.randrange(len(changed)))) or 1]))
        said = refusal(path)
        damaged += bool(said)
        assert not said or (said.startswith("data: ") and "\n" not in said)
    assert damaged > 10


def test_what_is_not_known_is_refused_with_what_was_looked_for(tmp_path: Path):
    (tmp_path / "notes.md").write_text("nothing", encoding="utf-8")
    with pytest.raises(ValueError, match=r"is no data set that is known\. Looked for: CIFAR-10 .* Found: notes\.md"):
        open_ranges(str(tmp_path))
    with pytest.raises(ValueError, match=r"expected a folder, a \.csv of reviews"):
        open_ranges(str(tmp_path / "notes.md"))

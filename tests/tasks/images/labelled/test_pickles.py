"""Pickles of arrays are read, old and new; pickles that would run code are not."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from affinear.tasks.images.labelled.pickles import read_pickle


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """The bytes that Python 2 and numpy 1 wrote, of which the published files consist."""

    def text(content: bytes) -> bytes:
        return b"T" + len(content).to_bytes(4, "little") + content

    shape = b"(" + b"".join(b"J" + side.to_bytes(4, "little") for side in pixels.shape) + b"t"
    kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    blank = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    array = blank + b"(K\x01" + shape + kind + b"\x89" + text(pixels.tobytes()) + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"U\x0bbatch_label" + text(b"one") + b"u."


def test_a_pickle_of_python_2(tmp_path: Path, seed: int):
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 12), np.uint8)
    (tmp_path / "a").write_bytes(python2_pickle(pixels, [3, 1, 2, 0]))
    found = read_pickle(tmp_path / "a")
    np.testing.assert_array_equal(found["data"], pixels)
    assert found["labels"] == [3, 1, 2, 0]
    assert found["batch_label"] == b"one"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("key", ["data", b"data"])
def test_pickles_of_today(tmp_path: Path, seed: int, protocol: int, order: str, key: str | bytes):
    pixels = np.asarray(np.random.default_rng(seed).integers(0, 256, (4, 12), np.uint8), order=order)  # pyright: ignore
    (tmp_path / "a").write_bytes(pickle.dumps({key: pixels, "labels": [1, 2], "names": [b"x"]}, protocol))
    found = read_pickle(tmp_path / "a")
    np.testing.assert_array_equal(found["data"], pixels)
    assert (found["labels"], found["names"]) == ([1, 2], [b"x"])


class Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("trapped"),))


@pytest.mark.parametrize("trap", [Trap(), np.float64(1.0), np.array([None]), np.arange(3), print])
def test_a_pickle_that_asks_for_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: object):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_bytes(pickle.dumps({"data": trap}))
    with pytest.raises(ValueError, match="a: refused, because of what the pickle holds"):
        read_pickle(tmp_path / "a")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"data": np.zeros(900, np.uint8)})[:300]])
def test_a_damaged_pickle_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match="a: not a whole pickle"):
        read_pickle(tmp_path / "a")


@pytest.mark.parametrize("kept", [b"r\xff\xff\xff\x7f", b"p4294967295\n", b"q\xff"], ids=["binary", "text", "short"])
def test_a_number_that_asks_for_gigabytes_is_refused(tmp_path: Path, kept: bytes):
    """Python's own reader makes room for every number below the one an object is kept under: here 32 and 64 GB."""
    (tmp_path / "a").write_bytes(b"\x80\x02}" + kept + b".")
    with pytest.raises(ValueError, match=r"refused.*it keeps an object as number \d+, and has made"):
        read_pickle(tmp_path / "a")


def test_a_pickle_of_something_else_is_named(tmp_path: Path):
    (tmp_path / "a").write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match="expected a dictionary, got list"):
        read_pickle(tmp_path / "a")

"""Files that are valid and meant badly: a few bytes that ask for hours or gigabytes get a sentence at once."""

from __future__ import annotations

import json
import os
import pickle
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from affinear.tasks.detect.coco import mask_of
from affinear.tasks.detect.opening import open_coco
from affinear.tasks.images.labelled.pickles import read_pickle
from affinear.tasks.language.reading import Reading, open_texts
from affinear.tasks.language.spelling import Spelling
from affinear.tasks.segment.opening import open_scenes
from affinear.tasks.speech.audio import CorruptAudio, read_audio, seconds_of
from affinear.tasks.speech.opening import open_voices
from affinear.tasks.told import json_of, text_of

SIZE = (10, 12)


def test_a_tuple_of_tuples_of_tuples_is_no_key(tmp_path: Path):
    steps = b"\x80\x02}K\x00\x85q\x00" + b"".join(
        b"h" + bytes([n]) + b"h" + bytes([n]) + b"\x86q" + bytes([n + 1]) for n in range(60)
    )
    (tmp_path / "a").write_bytes(steps + b"K\x01s.")  # its hash alone would take 2^60 steps
    with pytest.raises(ValueError, match="it uses a tuple again"):
        read_pickle(tmp_path / "a")


def test_a_text_that_a_pickle_names_often_is_kept_once(tmp_path: Path):
    text = "x" * 2**20

    class Again:
        def __reduce__(self) -> tuple[Any, ...]:
            return (__import__("_codecs").encode, (text, "latin1"))

    (tmp_path / "a").write_bytes(pickle.dumps({"labels": [Again() for _ in range(3000)]}, 2))
    labels = read_pickle(tmp_path / "a")["labels"]
    assert len(labels) == 3000
    assert len({id(one) for one in labels}) == 1


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a":' * 100_000, "9" * 10**6, '{"a": -' + "1" * 5000 + "}", "{", ""]
)
def test_json_that_goes_too_far_is_told(content: str):
    with pytest.raises(
        ValueError, match=r"^a.json: expected JSON, got what cannot be read as such \([^\n]{5,120}\)$"
    ) as told:
        json_of(content, "a.json")
    assert "set_int_max" not in str(told.value)


def test_a_pipe_is_no_text(tmp_path: Path):
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(ValueError, match="expected a file, got something else"):
        text_of(tmp_path / "a.json")


@pytest.mark.parametrize(
    "shape",
    [
        {"size": [10, 12], "counts": [2**60]},
        {"size": [10, 12], "counts": [2**62, 2**62, 2**62, 2**62, 120]},  # whose sum in 64 bits is right
        {"size": [2**30, 2**30], "counts": [2**60]},
        {"size": [10, 12], "counts": "o" * 100_000 + "0"},
        {"size": [float("inf"), 12], "counts": [120]},
        {"size": [10, 12], "counts": [10**30]},
        [[0, 0, 1e9, 0, 1e9, 1e9]],
        [[0, 0, 1e308, 0, 0, -1e308]],
        [[0, 0, float("nan"), 0, 1, 1]],
        [[0, 0, 10**400, 0, 1, 1]],
        [[0, 0, 1, 0, 1, 1] * 10**6],
        [["a", "b", "c", "d", "e", "f"]],
        [[[1, 2], [3, 4], [5, 6]]],
    ],
    ids=lambda shape: str(shape)[:40],
)
def test_masks_that_claim_too_much_are_told(shape: Any):
    with pytest.raises(ValueError, match="expected"):
        mask_of(shape, SIZE)


def coco(folder: Path, spoil: Callable[[dict[str, Any]], Any]) -> str:
    (folder / "annotations").mkdir()
    for half in ("train", "val"):
        (folder / half).mkdir()
        Image.new("RGB", (12, 10)).save(folder / half / "a.png")
        told = {
            "images": [{"id": 1, "file_name": "a.png", "height": 10, "width": 12}],
            "categories": [{"id": 1, "name": "cat"}],
            "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 5, 4], "area": 20}],
        }
        spoil(told)
        (folder / "annotations" / f"instances_{half}.json").write_text(json.dumps(told))
    return str(folder)


@pytest.mark.parametrize(
    ("part", "name", "value", "said"),
    [
        ("images", "height", 2**80, "expected images with"),
        ("images", "width", float("inf"), "expected images with"),
        ("images", "file_name", "../train/a.png", "there is no ../train/a.png"),
        ("images", "file_name", "pipe.png", "there is no pipe.png"),
        ("categories", "id", float("inf"), "expected categories with"),
        ("annotations", "image_id", [1], "which is not listed"),
        ("annotations", "category_id", {}, "which is not listed"),
        ("annotations", "bbox", [10**400, 0, 1, 1], "which is not left, top, width and height"),
        ("annotations", "bbox", ["x" * 10**6], "which is not left, top, width and height"),
        ("annotations", "area", [], "no number of pixels"),
        ("annotations", "segmentation", "x", "neither outlines nor runs"),
    ],
)
def test_objects_that_say_what_they_may_not_are_told(tmp_path: Path, part: str, name: str, value: Any, said: str):
    spec = coco(tmp_path, lambda told: told[part][0].update({name: value}))
    os.mkfifo(tmp_path / "train" / "pipe.png")
    with pytest.raises(ValueError, match=said) as error:
        open_coco(spec)
    assert len(str(error.value)) < 2000


def scenes(folder: Path, numbers: Any = 1) -> str:
    for part in ("images", "annotations"):
        (folder / part).mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (4, 4)).save(folder / "images" / f"{name}.png")
        Image.fromarray(np.full((4, 4), numbers, np.int32)).save(folder / "annotations" / f"{name}.tif")
    return str(folder)


def test_a_map_of_two_billion_classes_is_told(tmp_path: Path):
    with pytest.raises(ValueError, match="expected class numbers up to 254, got 2,147,483,647"):
        open_scenes(scenes(tmp_path, 2**31 - 1), zero_is_class=False, test_split=None, memory=False)


def test_links_that_lead_back_are_told(tmp_path: Path):
    spec = scenes(tmp_path)
    for name in ("one", "other"):
        (tmp_path / "images" / name).symlink_to(".")
    with pytest.raises(ValueError, match="a link that leads back to"):
        open_scenes(spec, zero_is_class=False, test_split=None, memory=False)


def test_a_map_is_no_program(tmp_path: Path):
    spec = scenes(tmp_path)
    (tmp_path / "annotations" / "a.tif").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n")
    data = open_scenes(spec, zero_is_class=False, test_split=None, memory=False)
    assert data.train.sizes.count((0, 0)) + data.test.sizes.count((0, 0)) == 1  # passed over, never handed on


def test_recordings_that_claim_hours_hold_what_they_hold(tmp_path: Path):
    path = tmp_path / "a.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(1600))
    content = bytearray(path.read_bytes())
    content[4:8] = content[40:44] = (2**32 - 2).to_bytes(4, "little")
    path.write_bytes(content)
    assert len(read_audio(path, 8000)) == 800


def test_silence_packed_into_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import soundfile

    monkeypatch.setattr("affinear.tasks.speech.audio.LONGEST", 2)
    soundfile.write(tmp_path / "a.flac", np.zeros(8000 * 20, np.int16), 8000)
    assert (tmp_path / "a.flac").stat().st_size < 3000
    with pytest.raises(CorruptAudio, match="hours of sound at once"):
        read_audio(tmp_path / "a.flac", 8000)
    assert len(read_audio(tmp_path / "a.flac", 8000, 3.0, 4.0)) == 8000


def test_a_pipe_is_no_recording(tmp_path: Path):
    os.mkfifo(tmp_path / "a.wav")
    for read in (seconds_of, lambda path: read_audio(path, 8000)):
        with pytest.raises(CorruptAudio, match="expected a recording, got no file"):
            read(tmp_path / "a.wav")


@pytest.mark.parametrize(
    ("name", "value"),
    [("begin", 1e308), ("end", 10**400), ("duration", float("inf")), ("audio", ["x" * 10**6]), ("text", {})],
)
def test_manifests_that_say_what_they_may_not_are_told(tmp_path: Path, name: str, value: Any):
    row = {"audio": "a.wav", "text": "hello", name: value}
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=f"line 1: expected .* in the field '{name}'") as told:
        open_voices(str(tmp_path / "train.jsonl"), sample_rate=8000, test_split=None, memory=False)
    assert len(str(told.value)) < 500


@pytest.mark.parametrize("line", ["[" * 100_000, '{"audio": ' + "9" * 10**5 + "}"])
def test_manifests_that_go_too_deep_are_told(tmp_path: Path, line: str):
    (tmp_path / "train.jsonl").write_text(line)
    with pytest.raises(ValueError, match="line 1: expected an object of JSON"):
        open_voices(str(tmp_path / "train.jsonl"), sample_rate=8000, test_split=None, memory=False)


def tokenizer(**changes: Any) -> str:
    told: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"<|end|>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
    }
    return json.dumps({**told, **changes})


def test_a_tokenizer_cannot_ask_for_texts_to_be_filled_up():
    padding = {"strategy": {"Fixed": 2**31}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "<|end|>"}  # fmt: skip
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    spelling = Spelling(tokenizer(padding=padding, truncation=truncation))
    assert spelling.encode(["aba"]) == [[3, 1]]


def test_a_tokenizer_whose_numbers_have_gaps_is_told():
    model = {"type": "BPE", "vocab": {"<|end|>": 0, "a": 4_000_000_000}, "merges": []}
    with pytest.raises(ValueError, match="expected 2 tokens with the numbers from 0 to 1, got one of 4000000000"):
        Spelling(tokenizer(model=model))


def test_a_tokenizer_that_makes_its_library_give_up_is_told():
    model = json.loads(tokenizer())["model"]
    with pytest.raises(ValueError, match=r"tokenizer: .*it does not fit together \("):
        Spelling(tokenizer(model={**model, "continuing_subword_prefix": "x" * 5000}))


def test_a_tokenizer_of_ten_million_merges_is_told_before_it_is_read():
    with pytest.raises(ValueError, match="tokenizer: expected at most 8,388,608 characters, got"):
        Spelling('{"model": {"type": "BPE", "merges": [' + '"a b",' * 2 * 10**6 + "]}}")


def test_a_text_that_parquet_tells_a_million_times_is_in_memory_once(tmp_path: Path):
    import pyarrow as pa
    from pyarrow import parquet

    arrow: Any = pa
    column = arrow.DictionaryArray.from_arrays(np.zeros(20_000, np.int32), arrow.array(["x" * 2**20]))
    writer: Any = parquet
    writer.write_table(arrow.table({"text": column}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 2**21
    found = 0
    for text in _texts(tmp_path / "a.parquet"):
        found += len(text)
        if found >= 2**25:
            break  # of twenty gigabytes in all
    assert arrow.total_allocated_bytes() < 2**26


def _texts(path: Path) -> Any:
    from affinear.tasks.language.reading import documents

    return documents([path], [], Reading(), "train")


@pytest.mark.parametrize("line", ["[" * 100_000, '{"text": ' + "9" * 10**5 + "}"])
def test_lines_that_go_too_far_are_told(tmp_path: Path, line: str):
    (tmp_path / "a.jsonl").write_text(line)
    with pytest.raises(ValueError, match="line 1: expected JSON, got what cannot be read as such") as told:
        open_texts(tmp_path / "a.jsonl", Reading())
    assert "set_int_max" not in str(told.value)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"content": ["a"]}, "expected a text in the field 'text', got content; --set text_field=NAME says which"),
        ({"text": [3]}, "expected a text in the field 'text'"),
        ({"text": [["a", "b"]]}, "expected texts in the column 'text', got one of several parts"),
        ({"text": [None]}, "expected a text in the field 'text'"),
    ],
)
def test_tables_without_texts_are_told(tmp_path: Path, columns: Any, said: str):
    import pyarrow as pa
    from pyarrow import parquet

    arrow: Any = pa
    writer: Any = parquet
    writer.write_table(arrow.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=said):
        open_texts(tmp_path / "a.parquet", Reading())

"""COCO's layout is opened, and what is wrong with it is said before anything is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from affinear.tasks.detect.opening import Reading, open_coco
from affinear.tasks.images.reading import CorruptImage

Make = Callable[..., Path]


def edit(root: Path, change: Callable[[dict[str, Any]], object], split: str = "train") -> None:
    file = root / "annotations" / f"instances_{split}.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_images_objects_and_classes_are_read(coco: Make) -> None:
    data = open_coco(str(coco()))
    assert data.sizes == (6, 4)
    assert (data.class_names, data.categories) == (("box", "bar"), (3, 7))  # by their numbers, not as they are listed
    assert data.masks
    image, objects = data.train[0]
    assert (image.height, image.width) == data.train.sizes[0]
    assert objects.crowd.tolist() == [False, False, True]
    assert objects.labels.tolist() == [0, 1, 0]
    assert len(data.train[1][1].labels) == 0
    assert data.train.most == 3


def test_masks_told_in_three_ways_are_the_same_rectangle(coco: Make) -> None:
    data = open_coco(str(coco()))
    for half in (data.train, data.test):
        for objects, size in zip(half.objects, half.sizes, strict=True):
            truth = objects.truth(size, masks=True)
            assert truth.masks is not None
            for mask, box, area in zip(truth.masks, truth.boxes.tolist(), truth.areas.tolist(), strict=True):
                assert mask.box == tuple(box)
                assert mask.area == area


def test_boxes_alone_are_a_data_set_without_masks(coco: Make) -> None:
    assert not open_coco(str(coco(masks=False))).masks


def test_the_half_to_be_judged_by_can_be_chosen(coco: Make) -> None:
    root = coco()
    for name in ("val", "annotations/instances_val.json"):
        (root / name).rename(root / name.replace("val", "test"))
    assert open_coco(str(root), test_split="test").name.endswith("(train, test)")
    with pytest.raises(ValueError, match=r"found no annotations/instances_val2017.json; there are instances_test.json"):
        open_coco(str(root), test_split="val2017")


def test_images_in_memory_are_the_same(coco: Make) -> None:
    root = str(coco())
    plain, stored = open_coco(root), open_coco(root, reading=Reading(memory=True))
    assert plain.fingerprint == stored.fingerprint
    assert plain.train[2][0].tobytes() == stored.train[2][0].tobytes()


def test_other_objects_have_another_fingerprint(coco: Make) -> None:
    root = coco()
    before = open_coco(str(root)).fingerprint
    edit(root, lambda content: content["annotations"][0]["bbox"].__setitem__(2, 7), "val")
    assert open_coco(str(root)).fingerprint != before


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: content["annotations"][0].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_set("bbox", [5, 5, 0, 9]), r"annotation 1 has the box \[5, 5, 0, 9\] in 0.png of .*skip_bad_boxes=true"),
        (_set("bbox", [500, 5, 9, 9]), r"annotation 1 has the box \[500, 5, 9, 9\] in 0.png"),
        (_set("bbox", [5, 5, 9]), r"annotation 1 has the box \[5, 5, 9\], which is not left, top, width and height"),
        (_set("category_id", 99), "annotation 1 is of the category 99, which is not listed"),
        (_set("image_id", 99), "annotation 1 is of the image 99, which is not listed"),
        (_set("segmentation", {"size": [9, 9], "counts": [81]}), "mask of object 0 in .*0.png cannot be drawn"),
        (_set("iscrowd", "0"), "annotation 1 has iscrowd '0', which is neither 0 nor 1"),
        (lambda content: content["images"][0].__setitem__("file_name", "gone.png"), "there is no gone.png"),
        (lambda content: content["images"][0].__setitem__("width", 7), "annotation|its JSON says .* x 7"),
        (lambda content: content["images"][0].pop("height"), "expected images with id, file_name, height and width"),
        (lambda content: content.pop("categories"), "expected COCO's JSON with lists of images"),
        (lambda content: content["categories"].append({"id": 3, "name": "x"}), "each with an id of its own"),
        (lambda content: content["categories"].pop(), "is of the category|expected the same categories"),
        (lambda content: content.__setitem__("annotations", []), "expected images with objects to learn from"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence_that_names_the_file(
    coco: Make, change: Callable[[dict[str, Any]], object], text: str
) -> None:
    root = coco()
    edit(root, change)
    with pytest.raises(ValueError, match=text) as caught:
        open_coco(str(root))
    assert (
        "instances_train.json" in str(caught.value)
        or "0.png" in str(caught.value)
        or "instances_val" in str(caught.value)
    )


@pytest.mark.parametrize(("split", "purpose"), [("train", "learn from"), ("val", "be judged by")])
def test_a_half_without_objects_is_refused(coco: Make, split: str, purpose: str) -> None:
    root, expected = coco(), rf"instances_{split}.json: expected images with objects to {purpose}, got none"
    edit(root, lambda content: [one.__setitem__("iscrowd", 1) for one in content["annotations"]], split)
    with pytest.raises(ValueError, match=f"{expected} but crowd regions$"):
        open_coco(str(root))
    edit(root, lambda content: content["annotations"].clear(), split)
    with pytest.raises(ValueError, match=f"{expected}$"):
        open_coco(str(root))
    edit(root, lambda content: content["images"].clear(), split)
    with pytest.raises(ValueError, match=f"{expected}$"):
        open_coco(str(root))


def test_bad_boxes_can_be_left_out(coco: Make) -> None:
    root = coco()
    edit(root, _set("bbox", [5, 5, 0, 9]))
    data = open_coco(str(root), reading=Reading(skip_bad_boxes=True))
    assert len(data.train.objects[0].labels) == 2


def test_folders_that_are_no_data_set_and_broken_files_are_refused(coco: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which is no folder"):
        open_coco(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"found no annotations/instances_train.json; there are no such files"):
        open_coco(str(tmp_path))
    root = coco()
    (root / "val" / "2.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"2.png: cannot be read as an image"):
        open_coco(str(root))
    (root / "annotations" / "instances_val.json").write_text("{")
    with pytest.raises(ValueError, match="expected JSON"):
        open_coco(str(root))


def test_an_image_that_changed_its_size_since_is_noticed(coco: Make) -> None:
    root = coco()
    data = open_coco(str(root))
    Image.new("RGB", (9, 9)).save(root / "train" / "3.png")
    with pytest.raises(CorruptImage, match="is 9 x 9, but its JSON says"):
        data.train[3]

"""`--data`, open: folders of images beside COCO's JSON, checked before anything is trained."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ...lens.budget import LONGEST
from ...models.making import short
from ..images.reading import CorruptImage, open_image, size_of
from ..threads import in_threads
from ..told import json_of, text_of
from .coco import Coco, Half, Objects, Shape, mask_of, other_size

TRAINS = ("train", "train2017", "train2014", "training")
TESTS = ("val", "val2017", "val2014", "validation", "valid", "test")
LAYOUT = "train/, val/ and annotations/instances_train.json, annotations/instances_val.json, as COCO has it"
NAMED = 3  # faults that an error names; the others are counted
LOOKED_AT = 20_000  # files of a half whose first bytes are looked at before training; all others when they come
DRAWN = 500  # masks of a half that are drawn before training
BEYOND = 2.0**62  # numbers that no image has anything to do with
OVER = 1.0  # pixels that a box may stick out of its image: annotators round


@dataclass(frozen=True)
class Reading:
    """How JSON is read.

    Attributes:
        skip_bad_boxes: Whether boxes of no area, or outside of their image, are left out instead of refused.
        memory: Whether all images are decoded now and kept.
    """

    skip_bad_boxes: bool = False
    memory: bool = False


def open_coco(spec: str, *, test_split: str | None = None, reading: Reading | None = None) -> Coco:
    """A folder of images and COCO's JSON, open, and looked through.

    Args:
        spec: The folder.
        test_split: Name of the split to be judged by; None for the first of `TESTS` that is there.
        reading: How JSON is read.

    Raises:
        ValueError: If the folder is not there or not of this kind, JSON is damaged or speaks of images or classes that
            are not there, boxes or masks do not fit their images, or a half has no object. Files are named.
    """
    root, reading = Path(spec).expanduser(), reading or Reading()
    if not root.is_dir():
        raise ValueError(f"data: expected a folder with {LAYOUT}, got {spec!r}, which is no folder")
    names = _splits(root, test_split)
    files = [root / "annotations" / f"instances_{name}.json" for name in names]
    contents = [_read_json(file) for file in files]
    categories = _categories(files[0], contents[0])
    if _categories(files[1], contents[1]) != categories:
        raise ValueError(f"{files[1]}: expected the same categories as in {files[0].name}, got others")
    halves = [
        _half(root / name, file, content, categories, reading)
        for name, file, content in zip(names, files, contents, strict=True)
    ]
    for file, half, purpose in zip(files, halves, ("learn from", "be judged by"), strict=True):
        if not half.most:
            crowds = " but crowd regions" if any(len(one.crowd) for one in half.objects) else ""
            raise ValueError(f"{file}: expected images with objects to {purpose}, got none{crowds}")
    masks = all(_shaped(half) for half in halves)
    print_of = hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=8).hexdigest()
    about = f"objects in {root} ({names[0]}, {names[1]})"
    train, test = halves
    return Coco(about, train, test, tuple(categories.values()), tuple(categories), masks, print_of)


def _splits(root: Path, test_split: str | None) -> tuple[str, str]:
    """Names of the halves that have both a folder and a JSON."""
    told = sorted((root / "annotations").glob("instances_*.json"))
    names = [file.stem.removeprefix("instances_") for file in told]
    train = next((name for name in TRAINS if name in names), None)
    test = test_split or next((name for name in TESTS if name in names), None)
    if train is None or test is None or test not in names:
        missing = "train" if train is None else (test_split or "val")
        raise ValueError(
            f"data: expected in {root} {LAYOUT}, found no annotations/instances_{missing}.json; there are "
            f"{', '.join(file.name for file in told[:8]) or 'no such files'}"
        )
    for name in (train, test):
        if not (root / name).is_dir():
            raise ValueError(
                f"data: expected the images of instances_{name}.json in {root / name}, found no such folder"
            )
    return train, test


def _read_json(file: Path) -> Mapping[str, Any]:
    content = json_of(text_of(file), str(file))
    keys = ("images", "annotations", "categories")
    if not isinstance(content, dict) or not all(isinstance(content.get(key), list) for key in keys):
        raise ValueError(f"{file}: expected COCO's JSON with lists of images, annotations and categories")
    return content


def _categories(file: Path, content: Mapping[str, Any]) -> dict[int, str]:
    """Names of classes by their numbers, in the order of the numbers."""
    try:
        found = {int(one["id"]): str(one["name"]) for one in content["categories"]}
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{file}: expected categories with an id and a name each") from None
    if not found or len(found) != len(content["categories"]):
        raise ValueError(f"{file}: expected categories, each with an id of its own, got {len(found)} different ids")
    return dict(sorted(found.items()))


def _half(
    folder: Path, file: Path, content: Mapping[str, Any], categories: Mapping[int, str], reading: Reading
) -> Half:
    images = _images(file, content)
    gone = [one["file_name"] for one in images.values() if not _is_in(folder, one["file_name"])]
    if gone:
        raise ValueError(f"{file}: expected its images in {folder}, but there is no {_some(gone)}")
    numbers = list(images)
    objects = _objects(file, content, images, categories, reading)
    half = Half(
        [str(folder / images[number]["file_name"]) for number in numbers],
        numbers,
        [(images[number]["height"], images[number]["width"]) for number in numbers],
        [objects[number] for number in numbers],
    )
    _check_files(half)
    _check_masks(file, half)
    return _stored(half) if reading.memory else half


def _images(file: Path, content: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for one in content["images"]:
        try:
            number, told = int(one["id"]), {"height": int(one["height"]), "width": int(one["width"])}
            found[number] = {"file_name": str(one["file_name"]), **told}
            if not all(0 < side <= LONGEST for side in told.values()):
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ValueError(
                f"{file}: expected images with id, file_name, height and width, got {short(one)}"
            ) from None
    if len(found) != len(content["images"]):
        raise ValueError(f"{file}: expected images, each with an id of its own, got {len(found)} different ids")
    return found


def _objects(
    file: Path,
    content: Mapping[str, Any],
    images: Mapping[int, Mapping[str, Any]],
    categories: Mapping[int, str],
    reading: Reading,
) -> dict[int, Objects]:
    """What each image shows; faults of all annotations together in one sentence."""
    label = {number: place for place, number in enumerate(categories)}
    rows: dict[int, list[tuple[list[float], int, float, bool, Shape]]] = {number: [] for number in images}
    wrong: list[str] = []
    bad_boxes = 0
    for one in content["annotations"]:
        name = f"annotation {short(one.get('id', one))}" if isinstance(one, dict) else short(one)
        fault = _fault(one, images, label)
        if fault is not None:
            wrong.append(f"{name} {fault}")
            continue
        image = images[one["image_id"]]
        box = _box(one["bbox"], image)
        if box is None:
            bad_boxes += 1
            if not reading.skip_bad_boxes:
                size = f"{image['height']} x {image['width']}"
                wrong.append(f"{name} has the box {short(one['bbox'])} in {image['file_name']} of {size}")
            continue
        shape = one.get("segmentation") or None
        area = float(one.get("area") or 0) or (box[2] - box[0]) * (box[3] - box[1])
        rows[one["image_id"]].append((box, label[one["category_id"]], area, bool(one.get("iscrowd", 0)), shape))
    if wrong:
        hint = "; set skip_bad_boxes=true to leave such boxes out" if bad_boxes and not reading.skip_bad_boxes else ""
        raise ValueError(
            f"{file}: expected annotations of known images and categories, with boxes of some area inside of their "
            f"images, but {_some(wrong)}{hint}"
        )
    return {number: _gathered(found) for number, found in rows.items()}


def _gathered(rows: Sequence[tuple[list[float], int, float, bool, Shape]]) -> Objects:
    return Objects(
        np.array([row[0] for row in rows], np.float64).reshape(-1, 4),
        np.array([row[1] for row in rows], np.int64),
        np.array([row[2] for row in rows], np.float64),
        np.array([row[3] for row in rows], np.bool_),
        tuple(row[4] for row in rows),
    )


def _fault(one: Any, images: Mapping[int, Any], label: Mapping[int, int]) -> str | None:
    if not isinstance(one, dict) or not {"image_id", "category_id", "bbox"} <= one.keys():
        return "has no image_id, category_id or bbox"
    for name, known, noun in (("image_id", images, "image"), ("category_id", label, "category")):
        if not isinstance(one[name], (int, float)) or one[name] not in known:
            return f"is of the {noun} {short(one[name])}, which is not listed"
    box, area, shape, crowd = one["bbox"], one.get("area"), one.get("segmentation"), one.get("iscrowd")
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        return f"has the box {short(box)}, which is not left, top, width and height"
    if area is not None and not (_is_number(area) and 0 <= area < math.inf):
        return f"has the area {short(area)}, which is no number of pixels"
    if shape is not None and not isinstance(shape, (dict, list)):
        return f"has the segmentation {short(shape)}, which is neither outlines nor runs"
    if crowd not in (None, 0, 1):
        return f"has iscrowd {short(crowd)}, which is neither 0 nor 1"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < BEYOND


def _box(box: Sequence[float], image: Mapping[str, Any]) -> list[float] | None:
    """Left, top, right and bottom inside of the image; None if the box has no area or is elsewhere."""
    left, top, width, height = (float(x) for x in box)
    right, bottom = left + width, top + height
    if not all(map(math.isfinite, (left, top, right, bottom))) or width <= 0 or height <= 0:
        return None
    if min(left, top) < -OVER or right > image["width"] + OVER or bottom > image["height"] + OVER:
        return None
    clipped = [max(left, 0.0), max(top, 0.0), min(right, float(image["width"])), min(bottom, float(image["height"]))]
    return clipped if clipped[2] > clipped[0] and clipped[3] > clipped[1] else None


def _check_files(half: Half) -> None:
    """Raise ValueError for images whose first bytes are of no image, or that are of another size than JSON says."""

    def look(index: int) -> str | None:
        path, told = half.paths[index], half.sizes[index]
        try:
            found = size_of(path)
        except CorruptImage as error:
            return str(error)
        return None if found == told else other_size(path, found, told)

    faults = [fault for fault in in_threads(look, range(min(len(half), LOOKED_AT))) if fault is not None]
    if faults:
        raise ValueError(_some(faults))


def _check_masks(file: Path, half: Half) -> None:
    """Raise ValueError for masks that cannot be drawn; of many, some are tried, evenly among all."""
    every = [(i, k) for i, one in enumerate(half.objects) for k, shape in enumerate(one.shapes) if shape is not None]
    step = max(1, len(every) // DRAWN)
    faults: list[str] = []
    for i, k in every[::step]:
        try:
            mask_of(half.objects[i].shapes[k], half.sizes[i])
        except ValueError as error:
            faults.append(f"the mask of object {k} in {half.paths[i]} cannot be drawn ({error})")
    if faults:
        raise ValueError(f"{file}: {_some(faults)}")


def _shaped(half: Half) -> bool:
    """Whether every single object has a shape."""
    return all(
        shape is not None
        for one in half.objects
        for shape, crowd in zip(one.shapes, one.crowd.tolist(), strict=True)
        if not crowd
    )


def _stored(half: Half) -> Half:
    """The half with all images decoded; one that cannot be read stops here."""
    try:
        return replace(half, stored=[np.asarray(image) for image in in_threads(open_image, half.paths)])
    except CorruptImage as error:
        raise ValueError(str(error)) from None


def _is_in(folder: Path, name: str) -> bool:
    """Whether there is a file of this name, as JSON has it, below a folder and nowhere else."""
    path = PurePosixPath(name)
    try:
        return not path.is_absolute() and ".." not in path.parts and (folder / path).is_file()
    except (OSError, ValueError):  # a name too long for any file, or of letters that none can have
        return False


def _some(texts: Sequence[str]) -> str:
    return ", ".join(texts[:NAMED]) + (f", and {len(texts) - NAMED} more" if len(texts) > NAMED else "")

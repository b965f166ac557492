"""Folders that transformers wrote, read as a stranger's: configurations within bounds, weights as safetensors, no code.

Nothing is fetched, and nothing in a folder is run. Transformers never sees the folder: it is handed fields that were
checked and tensors that were read here, so that nothing else beside them can be read or decide what is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ...models import making
from ...models.checkpoints import FLOATS, room_for
from ..told import json_of, text_of
from .quiet import without_bars

CONFIG = "config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST = 2**20  # bytes of a configuration
LONGEST_INDEX = 2**26  # bytes of an index, of which the largest networks have some
MOST_FILES = 4096  # that weights may be in
DEEPEST = 5
# What a configuration may say that is of no use for making a network, or is nobody's to say.
DROPPED = (
    "auto_map", "architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config",
    "num_labels", "id2label", "label2id", "problem_type", "name_or_path", "transformers_weights",
    "attn_implementation", "experts_implementation", "fusion_config", "distributed_config",
    "return_dict", "output_attentions", "output_hidden_states",
)  # fmt: skip
ADDRESS = re.compile(r"[/\\:]")  # in a text: it names a place, and no activation or kind of layer
# Whole numbers that say how often something is made or done, and the most that they may be.
COUNTS = re.compile(r"layer|block|depth|dense|head|stage|codebook|types|cycle|iter|ngram|hash|mtp|nextn|loop|interval")
SIZES = re.compile(r"size|vocab|dim")
MOST_COUNTED = 4096
MOST_SIZED = 2**25
BASES = re.compile(r"theta|base|freq")  # of angles: no list and no tensor is as long
LARGEST = 2**40
MOST_IN_TABLES = 2**24  # numbers of tables that are made in plain Python


def is_hugging(path: Path) -> bool:
    """Whether a folder is one that transformers wrote."""
    return (path / CONFIG).is_file()


def file_in(folder: Path, name: str) -> Path:
    """A file of a folder.

    Raises:
        ValueError: If it is no regular file, or a link that leads out of the folder. Within the cache that the hub's
            own programs make, links to the files it keeps beside are as good.
    """
    path, home = folder / name, folder.resolve()
    if not path.is_file():  # a pipe would never end
        raise ValueError(f"teacher: expected the file {making.short(name)} in {folder}, got none")
    beside = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not path.resolve().is_relative_to(home) and not path.resolve().is_relative_to(beside):
        raise ValueError(f"teacher: expected {making.short(name)} in {folder} itself, got a link that leads out of it")
    return path


def fields_in(path: Path) -> dict[str, Any]:
    """The fields of a file of JSON, as its writer told them.

    Raises:
        ValueError: If it is none, too long for a configuration, or a link that leads out of its folder.
    """
    return _object_in(path, LONGEST)


def _object_in(path: Path, longest: int) -> dict[str, Any]:
    if file_in(path.parent, path.name).stat().st_size > longest:
        raise ValueError(f"{path}: expected at most {longest:,} bytes of JSON")
    told = json_of(text_of(path), str(path))
    if not isinstance(told, dict):
        raise ValueError(f"{path}: expected an object of fields in JSON, got {making.short(told)}")
    return cast("dict[str, Any]", told)


def check_asked(model: str, model_args: Mapping[str, Any], kind: str) -> None:
    """Raise ValueError unless a network is asked for as the teacher is, which tells all about it."""
    if model != kind:
        raise ValueError(f"model: expected {kind}, as the teacher is, got {making.short(model)}")
    if model_args:
        raise ValueError(f"model_args: expected none, as the teacher tells all, got {', '.join(model_args)}")


def checked_fields(told: Any, source: str, kinds: Container[str], what: str) -> dict[str, Any]:
    """The fields of a configuration that a network is made with.

    Args:
        told: What stands in the file.
        source: What the error begins with.
        kinds: The values of `model_type` that will do.
        what: What these are, in words.

    Raises:
        ValueError: If it is none, names another kind of network, or says what it may not.
    """
    fields = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{source}: expected {what} of transformers, got {making.short(kind)}")
    check_plain(fields, source)
    kept = _kept(fields, source)
    _check_numbers(kept, source)
    return kept


def _kept(value: Any, source: str) -> Any:
    """Fields, and those within them, without what is nobody's to say: no code, no place, no choice of the loader's."""
    if isinstance(value, list):
        return [_kept(item, source) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    fields = cast("dict[str, Any]", value)
    if fields.get("quantization_config"):
        raise ValueError(
            f"{source}: expected a network with its own weights, got one that is quantized or linear already"
        )
    return {
        name: _kept(item, source)
        for name, item in fields.items()
        if name not in DROPPED
        and not name.startswith("_")
        and not (isinstance(item, str) and (ADDRESS.search(item) or not item.isprintable()))
    }


def check_plain(value: Any, source: str, depth: int = 0) -> None:
    """Raise ValueError for what no configuration would say: lists without end, numbers beyond any network."""
    if isinstance(value, (dict, list)):
        items = cast("list[Any]", list(value.values() if isinstance(value, dict) else value))  # pyright: ignore
        if depth == DEEPEST or len(items) > 4096:
            raise ValueError(f"{source}: expected a configuration of plain fields, got {making.short(items)}")
        for item in items:
            check_plain(item, source, depth + 1)
    elif isinstance(value, (int, float)) and not abs(value) <= LARGEST:
        raise ValueError(f"{source}: expected numbers that a network can have, got {making.short(value)}")


def _check_numbers(value: Any, source: str, name: str = "") -> None:
    """Raise ValueError for a whole number that would have lists, layers or steps without end made of it."""
    if isinstance(value, dict):
        for inner, item in cast("dict[str, Any]", value).items():
            _check_numbers(item, source, inner)
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            _check_numbers(item, source, name)
    elif isinstance(value, (int, float)) and not BASES.search(name) and (isinstance(value, int) or value.is_integer()):
        most = MOST_COUNTED if COUNTS.search(name) and not SIZES.search(name) else MOST_SIZED
        if abs(value) > most:
            raise ValueError(f"{source}: {name[:40]}: expected a number of at most {most:,}, got {making.short(value)}")


def loaded(folder: Path, fields: Mapping[str, Any], auto: Any, dtype: torch.dtype) -> Any:
    """The network of a folder, with softmax.

    Args:
        folder: As `save_pretrained` writes it.
        fields: Of its configuration, checked.
        auto: One of transformers' automatic classes.
        dtype: Of its weights.

    Raises:
        ValueError: If its weights cannot be read, some are missing, or the configuration asks for far more than there
            are.
    """
    tensors = tensors_in(folder)
    outline = _outline(fields, auto, room_for(tensors), f"teacher: {folder}")
    try:
        # Without a path there is nothing that transformers could look for beside the weights.
        with without_bars():
            network, told = type(outline).from_pretrained(
                None, config=outline.config, state_dict=tensors, local_files_only=True, use_safetensors=True,
                trust_remote_code=False, attn_implementation="sdpa", dtype=dtype, output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # transformers raises whatever comes up
        raise ValueError(f"teacher: {folder}: {said(error)}") from None
    missing = sorted(told["missing_keys"])
    if missing:
        raise ValueError(
            f"teacher: {folder}: expected all weights of {type(network).__name__}, got none for {len(missing)} of "
            f"them, {missing[0]} the first; is it a network of another kind?"
        )
    return network


def made(fields: Mapping[str, Any], auto: Any, room: int) -> Any:
    """A softmax network of checked fields, with fresh weights.

    Args:
        fields: `model_type` among them.
        auto: One of transformers' automatic classes.
        room: How many numbers it may have.

    Raises:
        ValueError: If it cannot be made, or would be too large.
    """
    outline = _outline(fields, auto, room, "config")
    try:
        return type(outline)._from_config(outline.config, attn_implementation="sdpa")  # pyright: ignore
    except Exception as error:  # constructors of others raise whatever comes up
        raise ValueError(f"config: {said(error)}") from None


def _outline(fields: Mapping[str, Any], auto: Any, room: int, source: str) -> Any:
    """The network of checked fields without memory: names, shapes and its configuration."""
    from transformers import AutoConfig

    others = dict(fields)
    kind = others.pop("model_type")
    try:
        whole = AutoConfig.for_model(kind, **others)
        _check_parts(whole)
        with torch.random.fork_rng(devices=[]), torch.device("meta"), making.patience():
            outline: Any = auto.from_config(whole, attn_implementation="sdpa")
        _check_room(kind, outline, room)
        return outline
    except Exception as error:  # constructors of others raise whatever comes up
        raise ValueError(f"{source}: {said(error)}") from None


def _check_parts(config: Any) -> None:
    """Raise ValueError if a network has a part that is made by name: of any kind, or by timm, which reads files."""
    usual = type(config)()
    for name in config.sub_configs:
        part, expected = getattr(config, name, None), getattr(usual, name, None)
        if part is None:
            continue
        if type(part) is not type(expected) or hasattr(part, "architecture") or hasattr(part, "backbone"):
            raise ValueError(f"{name}: expected the part that {config.model_type} has, got one that is chosen by name")
        _check_parts(part)


def _check_room(kind: str, outline: nn.Module, room: int) -> None:
    """Raise ValueError if a network would be too large, tables included."""
    numbers = sum(tensor.numel() for tensor in (*outline.parameters(), *outline.buffers()))
    if numbers > room:
        raise ValueError(f"{kind} would have {numbers:,} numbers, and there is room for {room:,}")
    slow = sum(
        sum(weight.numel() for weight in module.parameters(recurse=False))
        for module in outline.modules()
        if hasattr(module, "create_weight")
    )
    if slow > MOST_IN_TABLES:
        raise ValueError(f"{kind} would have {slow:,} numbers in tables of positions; expected {MOST_IN_TABLES:,}")


def weights_in(folder: Path) -> list[Path]:
    """The files of a folder that decide about its weights: one, or an index and those that it names.

    Raises:
        ValueError: If there are none as safetensors, or the index names something else.
    """
    if (folder / WEIGHTS).exists():
        return [file_in(folder, WEIGHTS)]
    if not (folder / INDEX).exists():
        raise ValueError(f"teacher: {folder} has no weights as safetensors; convert what it has")
    told: Any = _object_in(folder / INDEX, LONGEST_INDEX).get("weight_map")
    names = cast("dict[str, Any]", told).values() if isinstance(told, dict) else ()
    found: dict[str, Path] = {}
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
            raise ValueError(f"{folder / INDEX}: expected names of safetensors in its folder, got {making.short(name)}")
        if name not in found:
            found[name] = file_in(folder, name)
        if len(found) > MOST_FILES:
            raise ValueError(f"{folder / INDEX}: expected at most {MOST_FILES} files of weights, got more")
    if not found:
        raise ValueError(f"{folder / INDEX}: expected the file of each weight in weight_map, got none")
    return [folder / INDEX, *(found[name] for name in sorted(found))]


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """The weights of a folder by name.

    Raises:
        ValueError: If there are none, they cannot be read, or one is not finite.
    """
    found = {name: tensor for file in weights_in(folder) for name, tensor in _tensors_of(file)}
    for name, tensor in found.items():
        if tensor.dtype in FLOATS and not bool(tensor.isfinite().all()):
            raise ValueError(f"teacher: {folder}: expected finite weights, got others in {making.short(name)}")
    return found


def _tensors_of(file: Path) -> Iterator[tuple[str, Tensor]]:
    if file.name == INDEX:
        return
    try:
        yield from load_file(file).items()
    except Exception as error:  # safetensors has an error of its own, and raises others
        raise ValueError(f"teacher: {file}: it cannot be read as safetensors ({said(error)})") from None


def digest_in(folder: Path) -> str:
    """Of the weights of a folder, and of the index that says where they are.

    Raises:
        ValueError: If there are none as safetensors.
    """
    return digest_of(weights_in(folder))


def digest_of(files: list[Path]) -> str:
    """Of the content of files, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while part := opened.read(2**24):
                digest.update(part)
    return digest.hexdigest()


def said(error: Exception) -> str:
    """What an error says, in a line: of several the first, and the next where that one only announces it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])[:200]

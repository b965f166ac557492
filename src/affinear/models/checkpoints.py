"""Checkpoint files of others, read without running their code, and written as safetensors."""

from __future__ import annotations

import argparse
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from .. import __version__
from . import released
from .making import check_name, make, outline, short
from .recognising import complaint, would_run
from .sealing import sealed

NESTS = ("model", "state_dict", "model_ema", "state_dict_ema", "params", "params_ema")
# Harmless things that training programs save beside the weights; a dict of theirs is read as one of ours.
HARMLESS = (argparse.Namespace, (OrderedDict, "yacs.config.CfgNode"))
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
NUMBERS = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
PREFIXES = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before every name


@dataclass(frozen=True)
class Weights:
    """Tensors of a checkpoint under the names it gives them.

    Attributes:
        tensors: By name, without what wrappers put before it.
        nest: Where in the file they were; "" for its top.
        others: Where else in the file there are weights.
    """

    tensors: dict[str, Tensor]
    nest: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Converted:
    """A released checkpoint as one of our networks.

    Attributes:
        content: The safetensors file.
        model: The network with the weights.
        weights: What was read.
    """

    content: bytes
    model: nn.Module
    weights: Weights


def convert(
    path: Path,
    name: str,
    *,
    nest: str | None = None,
    img_size: int | tuple[int, int] | None = None,
    finite: bool = True,
) -> Converted:
    """Read a released checkpoint into the network of this name.

    Args:
        path: A file that torch or safetensors wrote.
        name: A network of ours or of timm's, such as "mavit_tiny". Classes and channels are those of the checkpoint.
        nest: Which weights to take where the file has several, such as "model_ema"; None for the first of `NESTS`.
        img_size: Side, or height and width, that position tables are resized for; None for the network's own.
        finite: Whether weights that are NaN or infinite are refused.

    Raises:
        ValueError: If the file is not a checkpoint, wants to run code, or does not fit; every tensor that does not is
            named.
    """
    weights = read(path, nest, finite=finite)
    model = filled(name, weights, **({} if img_size is None else {"img_size": img_size}))
    about = {"format": "pt", "model": name, "source": path.name, "nest": weights.nest, "affinear": __version__}
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    return Converted(sealed(tensors, about), model, weights)


def filled(name: str, weights: Weights, **given: Any) -> nn.Module:
    """The network of this name with these weights, and with their number of classes and image channels."""
    check_name(name)
    ends = shape_of_ends(weights.tensors, outline(name, given))
    model = make(name, {**ends, **given}, room=room_for(weights.tensors))
    released.load(model, weights.tensors)
    return model


def shape_of_ends(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, int]:
    """Image channels and classes of a checkpoint, as far as its first and last layer can be found."""
    ours = translated(tensors, model)
    config: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    first, last = (ours.get(f"{config.get(end)}.weight") for end in ("first_conv", "classifier"))
    found = {}
    if first is not None and first.ndim == 4:
        found["in_chans"] = first.shape[1]
    if last is not None and last.ndim >= 1:
        found["num_classes"] = last.shape[0]
    return found


def translated(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights under our names, if they have those of a release.

    Raises:
        ValueError: If they are of another network.
    """
    try:
        return released.translate(tensors, model)
    except (RuntimeError, IndexError, ValueError) as error:  # shapes that no release has
        said = str(error).partition("\n")[0]
        raise ValueError(f"these weights are of another network than {type(model).__name__}: {said}") from None


def room_for(tensors: Mapping[str, Tensor]) -> int:
    """How many numbers a network may have that these weights are for: theirs, and tables that are not saved."""
    return 16 * sum(tensor.numel() for tensor in tensors.values()) + 2**26  # as none of them is larger than its bytes


def read(path: Path, nest: str | None = None, *, finite: bool = True) -> Weights:
    """The weights in a file of torch or safetensors, found wherever training programs put them.

    Args:
        path: The file.
        nest: Which entry holds the weights; None for the first of `NESTS` that is there, or the file itself.
        finite: Whether weights that are NaN or infinite are refused.

    Raises:
        ValueError: If there are none, one of them is not finite, or the file wants to run code.
    """
    content = _load(path)
    nests = tuple(key for key in NESTS if isinstance(content.get(key), Mapping))
    if nest is None:
        nest = nests[0] if nests else ""
    elif nest not in nests:
        raise ValueError(f"nest: {path.name} has weights under {', '.join(nests) or 'no name'}, not under {nest!r}")
    inner = cast("Mapping[Any, Any]", content[nest] if nest else content)
    found = {name: tensor for name, tensor in inner.items() if isinstance(tensor, Tensor)}
    for name, tensor in found.items():
        _check_tensor(path, name, tensor, finite)
    tensors = {_bare(name): tensor for name, tensor in found.items()}
    if not tensors:
        raise ValueError(f"{path.name}: expected tensors by name, or under {', '.join(NESTS)}, got {_seen(inner)}")
    return Weights(tensors, nest, tuple(key for key in nests if key != nest))


def _load(path: Path) -> Mapping[str, Any]:
    said = complaint(path)
    if said:
        raise ValueError(f"{path.name}: {said}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        _check_packing(path)
        with torch.serialization.safe_globals(list(HARMLESS)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice about pickle's protocols
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path.name}: {_refusal(path, str(error))}") from None
    except OSError:
        raise
    except Exception as error:  # damaged files make their readers raise nearly anything
        said = str(error).partition("\n")[0][:200] or type(error).__name__
        raise ValueError(f"{path.name}: not a whole file of torch or safetensors ({said})") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"{path.name}: expected tensors by name, got {type(content).__name__}")
    return cast("Mapping[str, Any]", content)


def _check_packing(path: Path) -> None:
    """Refuse an archive that unpacks to more than it is; torch itself packs nothing."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                raise ValueError("packed, which torch does not do")


def _check_tensor(path: Path, name: Any, tensor: Tensor, finite: bool) -> None:
    """Raise ValueError unless something in a checkpoint is a named, plain and, if it must be, finite tensor."""
    if not isinstance(name, str):
        raise ValueError(f"{path.name}: expected names of tensors, got {short(name)}")
    kind = (
        "a nested one"
        if tensor.is_nested
        else "a sparse one"
        if tensor.layout != torch.strided
        else "a quantised one"
        if tensor.is_quantized
        else "one without content"
        if tensor.is_meta
        else f"one of {tensor.dtype}"
        if tensor.dtype not in NUMBERS
        else "one that is larger than its bytes"
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()
        else ""
    )
    if kind:
        raise ValueError(f"{path.name}: {short(name)}: expected a plain tensor of numbers, got {kind}")
    if finite and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        count = int((~torch.isfinite(tensor)).sum())
        raise ValueError(
            f"{path.name}: {name}: expected finite numbers, got {count} of {tensor.numel()} that are NaN or infinite; "
            "these weights are broken; `affinear convert --allow-nan` takes them all the same"
        )


def _refusal(path: Path, message: str) -> str:
    # Never in torch's own words, which advise to switch safety off.
    found = re.search(r"GLOBAL ([\w.]+)", message)
    name = would_run(path) if found is None else found[1]
    if name is None:
        return "not a whole file of torch or safetensors; get a whole copy of it"
    return (
        f"refused, because reading it would run {name}; if you trust the file, save its state dict alone "
        "elsewhere, with torch.save(model.state_dict(), FILE), and convert that"
    )


def _bare(name: str) -> str:
    while name.startswith(PREFIXES):
        name = name.partition(".")[2]
    return name


def _seen(content: Mapping[str, Any]) -> str:
    names = [f"{name} ({type(value).__name__})" for name, value in content.items()]
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "") or "nothing"

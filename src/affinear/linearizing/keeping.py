"""Linearized networks in files: weights as safetensors, and beside them a JSON that says what was swapped.

Networks of transformers have their own way: `save_pretrained` and `from_pretrained` (`recorded.py`).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn

from .. import __version__
from .choices import Choices
from .report import checked_names
from .swap import apply, is_of, report_of

FORMAT = 1
LONGEST = 2**22  # bytes of JSON


def save(
    model: nn.Module, path: str | os.PathLike[str], *, model_args: Mapping[str, Any] | None = None
) -> tuple[Path, Path]:
    """Write a linearized network: its weights, and a JSON of the same name beside them.

    Args:
        model: What `linearize` gave.
        path: A file that ends in .safetensors and does not exist yet.
        model_args: What timm's `create_model` was given beside the name, which timm does not remember. That the network
            can be made again with it is tried before anything is written.

    Returns:
        Both paths.

    Raises:
        ValueError: If a file is there already, the network is not linearized, or cannot be made again from what is
            known of it.

    Example:
        >>> import affinear, tempfile, timm
        >>> from affinear import linearizing
        >>> student, _ = affinear.linearize(timm.create_model("vit_tiny_patch16_224", depth=1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path, _ = linearizing.save(student, f"{folder}/student.safetensors", model_args={"depth": 1})
        ...     type(linearizing.load(path)).__name__
        'VisionTransformer'
    """
    from safetensors.torch import save as to_bytes

    weights, beside = _paths(path)
    for file in (weights, beside):
        if file.exists():
            raise ValueError(f"{file}: expected a new file, got one that exists; remove it or choose another name")
    if is_of("transformers", "PreTrainedModel", model):
        raise ValueError("model: expected one of timm or diffusers; those of transformers have save_pretrained")
    report = report_of(model)
    about: dict[str, Any] = {
        "format": FORMAT,
        "affinear": __version__,
        "model": _name(model),
        "model_args": dict(model_args or {}),
        "choices": report.choices.as_dict(),
        "layers": [layer.name for layer in report.swapped],
    }
    if about["model"] is not None:
        _check_again(model, about)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    _write(beside, json.dumps(about, indent=2).encode())
    _write(weights, to_bytes(tensors, {"format": "pt"}))
    return weights, beside


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """The network that `save` wrote, in evaluation mode. Nothing in the files is run (see the page on safety).

    Args:
        path: The file of weights; its JSON lies beside it.
        model: The softmax network that was linearized, with any weights, where the JSON cannot name it: all that timm
            did not make. It is changed in place.

    Raises:
        ValueError: If files and network do not go together, or a file says what it may not.
    """
    from ..models.checkpoints import read, room_for
    from ..models.making import make

    weights, beside = _paths(path)
    about = _read(beside)
    tensors = read(weights).tensors
    if model is None:
        if about["model"] is None:
            raise ValueError(f"{beside}: it names no network of timm; pass the softmax network as model=")
        model = make(about["model"], about["model_args"], room=room_for(tensors))
    apply(model, about["choices"], about["layers"])
    _check_names(model, tensors, str(weights))
    model.load_state_dict(tensors)
    return model.eval()


def _paths(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    weights = Path(path)
    if weights.suffix != ".safetensors":
        raise ValueError(f"path: expected a name that ends in .safetensors, got {weights.name!r}")
    return weights, weights.with_suffix(".json")


def _name(model: nn.Module) -> str | None:
    """What timm calls it, or None if timm did not make it."""
    config: Any = getattr(model, "pretrained_cfg", None)
    name = config.get("architecture") if isinstance(config, Mapping) else getattr(config, "architecture", None)
    return name if isinstance(name, str) else None


def _check_again(model: nn.Module, about: Mapping[str, Any]) -> None:
    """Raise ValueError unless the network can be made again, name by name and shape by shape."""
    from ..models.making import outline

    again = outline(about["model"], about["model_args"])
    apply(again, Choices.from_dict(about["choices"]), about["layers"])
    _check_names(again, model.state_dict(), "this network; pass model_args= as it was made with")


def _check_names(model: nn.Module, tensors: Mapping[str, Any], source: str) -> None:
    ours = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"weights: {name}: expected {ours.get(name, 'none')}, got {theirs.get(name, 'none')} in {source}"
            + (f" ({len(wrong)} differ)" if len(wrong) > 1 else "")
        )


def _read(path: Path) -> dict[str, Any]:
    """What the JSON says, each field checked."""
    from ..models.making import NAME, check_plain, short

    if not path.is_file():
        raise ValueError(f"{path}: expected the JSON that was saved beside the weights, got no such file")
    if path.stat().st_size > LONGEST:
        raise ValueError(f"{path}: expected at most {LONGEST} bytes of JSON, got {path.stat().st_size}")
    try:
        told = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got what cannot be read as such ({error})") from None
    if not isinstance(told, dict):
        raise ValueError(f"{path}: expected an object of fields in JSON, got {short(told)}")
    told = cast("dict[str, Any]", told)
    if told.get("format") != FORMAT:
        raise ValueError(f"{path}: format: expected {FORMAT}, got {short(told.get('format'))}")
    model, args, choices = told.get("model"), told.get("model_args"), told.get("choices")
    if model is not None and not (isinstance(model, str) and NAME.fullmatch(model)):
        raise ValueError(f"{path}: model: expected the name of a network, got {short(model)}")
    if not isinstance(args, dict) or not isinstance(choices, dict):
        raise ValueError(f"{path}: expected model_args and choices, each with named fields")
    for name, value in cast("dict[str, Any]", args).items():
        check_plain(value, f"{path}: model_args: {name}")
    for name, value in cast("dict[str, Any]", choices).items():
        check_plain(value, f"{path}: choices: {name}")
    layers = checked_names(told.get("layers"), str(path))
    made = Choices.from_dict(cast("dict[str, Any]", choices))
    return {"model": model, "model_args": args, "choices": made, "layers": layers}


def _write(path: Path, content: bytes) -> None:
    """A file that is whole or not there."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise

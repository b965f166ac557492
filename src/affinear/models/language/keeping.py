"""Caches in files: a long text once read, and gone on from at any time."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...ops import State
from ...ops.mechanisms import Mechanism, find
from ..sealing import broken, sealed
from .cache import SHAPE, AffinearCache, KeysLayer, Past, StateLayer
from .config import AffinearConfig

if TYPE_CHECKING:
    from .model import AffinearPreTrainedModel

FORMAT = "affinear.AffinearCache"
STATE = ("count", "key_mean", "value_mean", "covariance", "rotated_key_mean")
SAMPLE = 64  # numbers of each weight that tell two models apart


def tensors_of(cache: AffinearCache) -> dict[str, Tensor]:
    """All that a cache holds, by name."""
    found: dict[str, Tensor | None] = {"key_mask": cache.key_mask}
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, StateLayer):
            parts = {name: getattr(layer.memory.state, name, None) for name in STATE}
        else:
            assert isinstance(layer, KeysLayer)
            parts = {"keys": layer.keys, "values": layer.values}
        found |= {f"{i}.{name}": part for name, part in parts.items()} | {f"{i}.recent": layer.recent}
    return {name: part for name, part in found.items() if part is not None}


def save(cache: AffinearCache, path: str | os.PathLike[str], model: AffinearPreTrainedModel) -> Path:
    """Write a cache to a sealed file that does not exist yet; see `AffinearCache.save`."""
    target = Path(path)
    if target.exists():
        raise ValueError(f"path: expected a file that does not exist yet, got {target}; remove it or choose another")
    if not cache.get_seq_length():
        raise ValueError("cache: expected one that has seen a text, got an empty one; call the model with it first")
    cache.check_fits(model.config)
    metadata = {
        "format": FORMAT,
        "seen": str(cache.get_seq_length()),
        "shape": _shape(model.config),
        "dtype": str(model.dtype),
        "model": fingerprint(model),
    }
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors_of(cache).items()}
    handle, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(sealed(tensors, metadata))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, target)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise
    return target


def load(path: str | os.PathLike[str], model: AffinearPreTrainedModel) -> AffinearCache:
    """Read what `save` wrote, on the model's device; see `AffinearCache.load`."""
    from safetensors import SafetensorError, safe_open

    source = Path(path)
    try:
        if broken(source):
            raise ValueError("its checksum does not fit: it was changed or cut short")
        with safe_open(source, "pt") as file:  # pyright: ignore[reportUnknownVariableType]
            told: dict[str, str] = file.metadata() or {}
            if told.get("format") != FORMAT:
                raise ValueError(f"it is a {told.get('format', 'file of another kind')}")
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        seen = int(told["seen"])
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"path: expected a file that AffinearCache.save wrote, got {source} ({error})") from error
    _check_model(source, told, model)
    cache = AffinearCache(model.config)
    try:
        _fill(cache, {name: x.to(model.device) for name, x in tensors.items()}, seen)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"path: expected the tensors of a cache, got others in {source} ({error})") from error
    return cache


def fingerprint(model: AffinearPreTrainedModel) -> str:
    """A checksum of a model's configuration and of some numbers of each of its weights."""
    digest = hashlib.sha256(_shape(model.config).encode())
    for name, weight in model.base_model.state_dict().items():
        sample = weight.detach().flatten()[:SAMPLE].to("cpu", torch.float64)
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(bytes(sample.numpy().data))
    return digest.hexdigest()


def _shape(config: AffinearConfig) -> str:
    return json.dumps({name: getattr(config, name) for name in SHAPE}, sort_keys=True)


def _check_model(source: Path, told: Mapping[str, str], model: AffinearPreTrainedModel) -> None:
    """Raise ValueError unless a file is of this model."""
    wanted = {"shape": _shape(model.config), "dtype": str(model.dtype), "model": fingerprint(model)}
    reasons = {
        "shape": "one of another shape",
        "dtype": f"one in {told.get('dtype')} for a model in {model.dtype}",
        "model": "one of a model with other weights",
    }
    for name, value in wanted.items():
        if told.get(name) != value:
            raise ValueError(
                f"path: expected a cache of this model, got {reasons[name]} in {source}; read the text again"
            )


def _fill(cache: AffinearCache, tensors: dict[str, Tensor], seen: int) -> None:
    """Put tensors into the layers of a new cache."""
    rule = find(cache.config.mechanism)
    cache.key_mask = tensors.pop("key_mask", None)
    for i, layer in enumerate(cache.layers):
        parts = {
            name: tensors.pop(f"{i}.{name}")
            for name in (*STATE, "keys", "values", "recent")
            if f"{i}.{name}" in tensors
        }
        recent = parts.pop("recent", None)
        if isinstance(layer, StateLayer):
            layer.memory = Past(_state(parts, rule, cache.config), recent, seen)
        else:
            assert isinstance(layer, KeysLayer)
            layer.update(parts["keys"], parts["values"])
            layer.recent = recent
    if tensors:
        raise ValueError(f"{next(iter(tensors))} is of no layer")


def _state(parts: dict[str, Any], rule: Mechanism, config: AffinearConfig) -> State:
    from ...ops.state import check_fits_together

    state = State(mechanism=rule, **parts)
    check_fits_together(state)
    if state.covariance.shape[1] != config.key_heads or state.covariance.shape[3] != config.head_width:
        raise ValueError(f"a state of shape {tuple(state.covariance.shape)}")
    return state

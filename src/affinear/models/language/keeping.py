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
from ...ops.precision import statistics_dtype
from ..sealing import broken, sealed
from .cache import SHAPE, AffinearCache, KeysLayer, Past, StateLayer
from .config import AffinearConfig

if TYPE_CHECKING:
    from .model import AffinearPreTrainedModel

FORMAT = "affinear.AffinearCache"
STATE = ("count", "key_mean", "value_mean", "covariance", "rotated_key_mean")
LONGEST = 2**53  # tokens: positions are multiplied out in float64
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
        if not 0 < seen < LONGEST:
            raise ValueError(f"it tells of {seen} tokens")
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ValueError(f"path: expected a file that AffinearCache.save wrote, got {source} ({error})") from error
    _check_model(source, told, model)
    cache = AffinearCache(model.config)
    try:
        _fill(cache, {name: x.to(model.device) for name, x in tensors.items()}, seen, model.dtype)
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


def _fill(cache: AffinearCache, tensors: dict[str, Tensor], seen: int, dtype: torch.dtype) -> None:
    """Put tensors into the layers of a new cache, each checked: nobody knows who wrote the file."""
    config, rule = cache.config, find(cache.config.mechanism)
    batch = _batch(tensors)
    heads, width = config.key_heads, config.head_width
    inner = (config.num_attention_heads + 2 * heads) * width
    cache.key_mask = _taken(tensors, "key_mask", (batch, seen), torch.bool, optional=True)
    for i, layer in enumerate(cache.layers):
        recent = None
        if config.conv_size:
            recent = _taken(tensors, f"{i}.recent", (batch, config.conv_size - 1, inner), dtype)
        if isinstance(layer, StateLayer):
            layer.memory = Past(_state(tensors, i, rule, config, batch, dtype), recent, seen)
        else:
            assert isinstance(layer, KeysLayer)
            keys, values = (_taken(tensors, f"{i}.{x}", (batch, heads, seen, width), dtype) for x in ("keys", "values"))
            assert keys is not None
            assert values is not None
            layer.update(keys, values)
            layer.recent = recent
    if tensors:
        raise ValueError(f"{next(iter(tensors))} is of no layer")


def _batch(tensors: Mapping[str, Tensor]) -> int:
    """How many texts a file is of."""
    first = tensors.get("0.count", tensors.get("0.keys"))
    if first is None or not first.ndim:
        raise ValueError("nothing of the first layer")
    return first.shape[0]


def _state(
    tensors: dict[str, Tensor], layer: int, rule: Mechanism, config: AffinearConfig, batch: int, dtype: torch.dtype
) -> State:
    heads, width, kind = config.key_heads, config.head_width, statistics_dtype(dtype)
    features = rule.key_map(torch.zeros(1, 1, 1, width)).shape[-1]
    shapes = {"count": (), "key_mean": (features,), "value_mean": (width,), "covariance": (features, width)}
    if config.rope_theta is not None:
        shapes["rotated_key_mean"] = (features,)
    parts: dict[str, Any] = {
        name: _taken(tensors, f"{layer}.{name}", (batch, heads, *shape), torch.int64 if name == "count" else kind)
        for name, shape in shapes.items()
    }
    return State(mechanism=rule, **parts)


def _taken(
    tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype, optional: bool = False
) -> Tensor | None:
    """A tensor taken out of a file's, which has to have this shape and type."""
    if optional and name not in tensors:
        return None
    found = tensors.pop(name)
    if tuple(found.shape) != shape or found.dtype != dtype:
        raise ValueError(f"{name} is {tuple(found.shape)} in {found.dtype}, not {shape} in {dtype}")
    return found

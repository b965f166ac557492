"""The tasks by name, imported when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any

from ..train.task import Task

# Modules that have TASK. A task of one's own needs no entry: hand the value to `Setup`.
MODULES: Mapping[str, str] = MappingProxyType(
    {
        "classify": "affinear.tasks.classify",
        "detect": "affinear.tasks.detect",
        "distil": "affinear.tasks.distil",
        "distil_language": "affinear.tasks.distil.language",
        "distil_speech": "affinear.tasks.distil.speech",
        "generate": "affinear.tasks.generate",
        "language": "affinear.tasks.language",
        "ranges": "affinear.tasks.ranges",
        "segment": "affinear.tasks.segment",
        "speech": "affinear.tasks.speech",
        "upscale": "affinear.tasks.upscale",
    }
)


def names() -> tuple[str, ...]:
    """What `--task` takes.

    Examples:
        >>> "classify" in names()
        True
    """
    return tuple(MODULES)


def find(name: str) -> Task[Any, Any]:
    """The task of this name.

    Raises:
        ValueError: If there is none, with those that come near, or if a package that it needs is missing.

    Examples:
        >>> find("classify").metric.title
        'top-1'
        >>> find("clasify")
        Traceback (most recent call last):
        ValueError: task: expected one of classify..., got 'clasify'; did you mean 'classify'?
    """
    if name not in MODULES:
        near = get_close_matches(name, MODULES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"task: expected one of {', '.join(MODULES)}, got {name!r}{hint}")
    return import_module(MODULES[name]).TASK

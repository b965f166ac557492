"""What was written before there were tasks, read as what it would be today: all of it was classification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from .recipe import Recipe

TASK = "classify"
FACTS = ("class_names", "channels")
RENAMED = {"train_images": "train_samples", "test_images": "test_samples"}
ADDED = ("steps", "power", "milestones", "decay_rate", "warmup_steps", "checkpointing", "eval_steps")  # with the tasks
POWER = 0.1  # that "poly" had, whatever one wanted


def upgraded(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is, from `run.json` or from weights, in today's words; what is so already comes back as it is.

    Example:
        >>> upgraded({"model": "a", "recipe": {"lr": 1.0, "mixup": 0.8}, "channels": 3})["settings"]
        {'mixup': 0.8}
    """
    flat = told.get("recipe")
    if "task" in told or not isinstance(flat, dict):
        return dict(told)
    recipe, settings = split(cast("dict[str, Any]", flat))
    kept = {RENAMED.get(name, name): value for name, value in told.items() if name not in (*FACTS, "recipe")}
    facts = {name: told[name] for name in FACTS if name in told}
    return {"task": TASK, **kept, "recipe": recipe, "settings": settings, "facts": facts}


def split(flat: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The engine's fields of a flat recipe, and the others."""
    known = {name: value for name, value in flat.items() if name in Recipe.names()}
    others = {name: value for name, value in flat.items() if name not in known}
    added = {name: value for name, value in Recipe().as_dict().items() if name in ADDED}
    if known.get("sched") == "poly":
        added["power"] = POWER
    return {**added, **known}, others


def upgraded_record(told: Mapping[str, Any]) -> dict[str, Any]:
    """An epoch in numbers in today's words; what is so already comes back as it is.

    Example:
        >>> upgraded_record({"epoch": 1, "images_per_second": 9.0, "top1": 0.5, "ema_top1": None})
        {'epoch': 1, 'per_second': 9.0, 'test': {'top1': 0.5}, 'averaged': None}
    """
    if "images_per_second" not in told:
        return dict(told)
    names = {"test_loss": "loss", "top1": "top1", "top5": "top5"}
    test = {new: told[old] for old, new in names.items() if told.get(old) is not None}
    kept = {name: value for name, value in told.items() if name not in (*names, "ema_top1", "images_per_second")}
    ema = told.get("ema_top1")
    return {
        **kept,
        "per_second": told["images_per_second"],
        "test": test or None,
        "averaged": None if ema is None else {"top1": ema},
    }

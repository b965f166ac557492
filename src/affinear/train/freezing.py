"""Parts of a network that keep their weights while the rest learns."""

from __future__ import annotations

from typing import Any

from torch import nn

BODY = "body"


def freeze(network: nn.Module, what: str | None) -> tuple[nn.Module, ...]:
    """Take parameters out of training.

    Args:
        network: Its frozen parameters no longer ask for gradients.
        what: "body" for all but the head: a classifier, or whatever stands on a backbone. Or how names of parameters
            begin, with commas, such as "stem,stages.0". None for nothing.

    Returns:
        The modules that are frozen whole, to be kept in evaluation mode: their statistics stay, too, and nothing is
        dropped at random in them.

    Raises:
        ValueError: If no parameter is called so, or none would be left to learn.

    Example:
        >>> from affinear.train.freezing import freeze
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> _ = freeze(network, "0")
        >>> [name for name, parameter in network.named_parameters() if parameter.requires_grad]
        ['1.weight', '1.bias']
    """
    if what is None:
        return ()
    names = [name for name, _ in network.named_parameters()]
    chosen = _body(network, names) if what == BODY else _beginning(names, what)
    if len(chosen) == len(names):
        raise ValueError(f"freeze: expected to leave something to learn, got {what!r}, which is all of the network")
    for name, parameter in network.named_parameters():
        if name in chosen:
            parameter.requires_grad_(False)
    return tuple(module for module in network.modules() if _is_frozen(module))


def _body(network: nn.Module, names: list[str]) -> set[str]:
    if isinstance(getattr(network, "backbone", None), nn.Module):
        return {name for name in names if name.startswith("backbone.")}
    config: Any = getattr(network, "pretrained_cfg", None) or {}
    found = config.get("classifier") or "head"
    heads = tuple(f"{head}." for head in ((found,) if isinstance(found, str) else found))
    body = {name for name in names if not name.startswith(heads)}
    if len(body) == len(names):
        raise ValueError(
            f"freeze: no part of {type(network).__name__} is known as its head; name what to freeze instead"
        )
    return body


def _beginning(names: list[str], what: str) -> set[str]:
    found: set[str] = set()
    for begin in (part.strip().rstrip(".") for part in what.split(",")):
        these = {name for name in names if name == begin or name.startswith(f"{begin}.")}
        if not begin or not these:
            parts = list(dict.fromkeys(name.partition(".")[0] for name in names))
            raise ValueError(
                f"freeze: expected {BODY!r}, or how names of parameters begin, such as {', '.join(parts[:6])}, got "
                f"{begin!r}"
            )
        found |= these
    return found


def _is_frozen(module: nn.Module) -> bool:
    held = list(module.parameters())
    return bool(held) and not any(parameter.requires_grad for parameter in held)

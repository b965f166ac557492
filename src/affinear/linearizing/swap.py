"""A trained softmax network becomes a linear one: find its attention, put ours there, say what was done."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar, cast

from torch import nn

from ..ops import Mechanism
from ..ops import find as find_mechanism
from .choices import Bias, Choices, FeatureMap
from .core import LinearCore
from .report import Layer, Report
from .sites import Site, core_for

M = TypeVar("M", bound=nn.Module)
RECORD = "affinear_linearized"  # the report that a swapped network carries
STAYS = "it is to be left as it is"


def linearize(
    model: M,
    mechanism: str | Mechanism = "mala",
    layers: str | Sequence[int | str] = "all",
    *,
    leave: Sequence[int | str] = (),
    feature_map: FeatureMap = "own",
    gain: bool = False,
    norm: bool = False,
    window: int = 0,
    sinks: int = 0,
    convolution: int = 0,
    bias: Bias = "position",
    in_place: bool = False,
) -> tuple[M, Report]:
    """Put linear attention in the place of a network's softmax attention, around the weights that it has.

    What comes out answers otherwise than before: it has to be distilled (see `affinear.linearizing.distil`), or at
    least judged. The report says of every layer what it was, what it is, and why it was left alone; print it.

    Args:
        model: A network of timm, transformers or diffusers, or any module with such networks in it.
        mechanism: A registered name with a state, or "none" with a window: the window alone.
        layers: "all", or which of the layers that were found: numbers from 0 in their order, and names, which may have
            wildcards. Cross-attention is swapped only if it is named.
        leave: Which of these stay as they are, in the same spelling; `affinear.linearizing.leaving` finds the few that
            are worth it.
        feature_map: "own", "learned" or "hedgehog"; see `Choices`, as for all that follow.
        gain: Whether each head learns a factor of what it adds to the mean value.
        norm: Whether each head learns to normalise its answer.
        window: Latest tokens that are still seen by softmax; where layers are not causal, as many after each, too.
        sinks: First tokens that they see as well.
        convolution: Side of a depthwise convolution of the values, added.
        bias: What becomes of a bias of position: "position", "leave" or "drop".
        in_place: Whether to change the network itself; a copy is changed if not.

    Returns:
        The network and the report.

    Raises:
        ValueError: If nothing could be swapped, a layer that was named does not exist, or choices do not go together.

    Example:
        >>> import affinear, timm, torch
        >>> teacher = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64)
        >>> student, report = affinear.linearize(teacher, "mala")
        >>> student(torch.randn(1, 3, 64, 64)).shape
        torch.Size([1, 1000])
        >>> print(report)
        2 of 2 attention layers are linear, 0 parameters added
          blocks.0.attn  Attention -> mala
          blocks.1.attn  Attention -> mala
    """
    choices = Choices(_name_of(mechanism), feature_map, gain, norm, window, sinks, convolution, bias)
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"model: expected a network, a torch module, got {type(model).__name__}")
    if any(isinstance(module, LinearCore) for module in model.modules()):
        raise ValueError("model: expected a network with softmax attention, got one that is linearized already")
    return apply(model if in_place else copy.deepcopy(model), choices, layers, leave)


def apply(
    model: M, choices: Choices, layers: str | Sequence[int | str] = "all", leave: Sequence[int | str] = ()
) -> tuple[M, Report]:
    """Swap, in place, under choices that are made; `linearize` with everything said."""
    found = find(model)
    if not found:
        raise ValueError(
            f"model: expected a network of timm, transformers or diffusers with attention, got {type(model).__name__}, "
            "in which none was found"
        )
    reasons = [
        (STAYS if stays else site.why_not(choices)) if asked else _unasked(site)
        for site, asked, stays in zip(found, _wanted(found, layers), _matching(found, leave, "leave"), strict=True)
    ]
    _check_free(model, [site.name for site, reason in zip(found, reasons, strict=True) if not reason])
    told: list[Layer] = []
    for site, reason in zip(found, reasons, strict=True):
        told.append(Layer(site.name, site.was, site.was, False, remark=reason) if reason else _swap(site, choices))
    report = Report(tuple(told), choices)
    if not report.swapped:
        raise ValueError(f"model: nothing could be swapped:\n{report}")
    record(model, report)
    return model, report


def find(model: nn.Module) -> list[Site]:
    """Every attention layer of a network, in order, whether it can be swapped or not."""
    return [
        replace(site, name=_joined(name, site.name)) for name, part in _parts(model) for site in _sites_of_part(part)
    ]


def _parts(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The networks, or layers, of the three libraries that a module is or has in it, with their names."""
    if is_of("transformers", "PreTrainedModel", model):
        yield name, model
        inner = ((_joined(name, deep), part) for deep, part in model.named_modules())
        yield from ((deep, part) for deep, part in inner if _is_of_timm(part, networks_only=True))
    elif is_of("diffusers", "ModelMixin", model) or _is_of_timm(model):
        yield name, model
    else:
        for child, part in model.named_children():
            yield from _parts(part, _joined(name, child))


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


def _is_of_timm(model: nn.Module, networks_only: bool = False) -> bool:
    if "timm" not in sys.modules:
        return False
    from . import in_timm

    return hasattr(model, "pretrained_cfg") or (not networks_only and in_timm.is_layer(model))


def _sites_of_part(part: nn.Module) -> Iterator[Site]:
    if is_of("transformers", "PreTrainedModel", part):
        from . import in_transformers

        return in_transformers.sites(part)  # pyright: ignore[reportArgumentType]
    if is_of("diffusers", "ModelMixin", part):
        from . import in_diffusers

        return in_diffusers.sites(part)
    from . import in_timm

    return in_timm.sites(part)


def is_of(package: str, kind: str, model: nn.Module) -> bool:
    """Whether a network is of a class of a package, which nobody has made one of if it was never loaded."""
    module = sys.modules.get(package)
    return module is not None and isinstance(model, getattr(module, kind))


def report_of(model: nn.Module) -> Report:
    """What became of each layer of a network when it was linearized.

    Raises:
        ValueError: If it was not.
    """
    report = getattr(model, RECORD, None)
    if not isinstance(report, Report):
        raise ValueError(f"model: expected a linearized network, got {type(model).__name__}; linearize it first")
    return report


def record(model: nn.Module, report: Report) -> None:
    """Note in a network and in those within it what became of layers, where their own way of saving keeps it."""
    object.__setattr__(model, RECORD, report)  # no parameter, no module: nothing for torch to look after
    for first, part in _noting(model):
        from . import recorded

        inside = [layer for layer in report.layers if layer.name.startswith(first)]
        own = Report(tuple(replace(layer, name=layer.name.removeprefix(first)) for layer in inside), report.choices)
        if own.swapped:
            object.__setattr__(part, RECORD, own)
            recorded.note(part, own)


def _noting(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The networks whose configuration notes a swap, transformers', and what the names of their layers begin with."""
    for name, part in _parts(model):
        if is_of("transformers", "PreTrainedModel", part):
            yield (f"{name}." if name else ""), part


def _check_free(model: nn.Module, names: Sequence[str]) -> None:
    """Raise ValueError if the swap of these layers could not be noted in the end; nothing is changed by then."""
    noted: dict[int, tuple[str, list[str]]] = {}
    for first, part in _noting(model):
        from . import recorded

        recorded.check_free(part)
        own = [layer.removeprefix(first) for layer in names if layer.startswith(first)]
        other, before = noted.setdefault(id(part.config), (first, own))
        if before != own:
            raise ValueError(
                f"model: {other.rstrip('.')} and {first.rstrip('.')} share one configuration, which notes what is "
                "swapped; name the same layers of both, or give each a configuration of its own"
            )


def _name_of(mechanism: str | Mechanism) -> str:
    """The name under which a mechanism is registered, as files keep names alone."""
    if not isinstance(mechanism, Mechanism):
        return mechanism
    if find_mechanism(mechanism.name) != mechanism:
        raise ValueError(
            f"mechanism: expected one that is registered, got another that is called {mechanism.name!r} as well; "
            "give it a name of its own and register it with affinear.register"
        )
    return mechanism.name


def _swap(site: Site, choices: Choices) -> Layer:
    assert site.install is not None
    core = core_for(site, choices)
    site.install(core)
    now = choices.mechanism
    if choices.window:
        now = f"{now} beside a window of {choices.window}" + (f" and {choices.sinks} sinks" if choices.sinks else "")
    added = sum(parameter.numel() for parameter in core.parameters())
    return Layer(site.name, site.was, now, True, added, site.told(choices))


def _unasked(site: Site) -> str:
    if site.install is None:
        return site.reason
    return "cross-attention: name it in layers= to have it swapped" if site.optional else "not among the layers asked"


def _wanted(found: Sequence[Site], layers: str | Sequence[int | str]) -> list[bool]:
    """Which of the layers are asked for."""
    if isinstance(layers, str) and layers == "all":
        return [not site.optional for site in found]
    return _matching(found, layers, "layers")


def _matching(found: Sequence[Site], asked: str | Sequence[int | str], argument: str) -> list[bool]:
    """Which of the layers some numbers and names mean; `argument` is what the user calls them."""
    given = cast(Any, asked)
    expected = '"all", or numbers and names in a list' if argument == "layers" else "numbers and names in a list"
    several = isinstance(given, Iterable) and not isinstance(given, str)
    each: list[Any] = list(cast("Iterable[Any]", given)) if several else [given]
    for one in each:
        if not isinstance(one, int | str) or isinstance(one, bool):
            raise ValueError(f"{argument}: expected {expected}, got {one!r}")
    if isinstance(given, int):
        raise ValueError(f"{argument}: expected {expected}, got {given}; write [{given}]")
    wanted = [False] * len(found)
    for one in each:
        if isinstance(one, int):
            if not -len(found) <= one < len(found):
                raise ValueError(f"{argument}: expected numbers from 0 to {len(found) - 1}, got {one}")
            wanted[one] = True
            continue
        named = [i for i, site in enumerate(found) if fnmatchcase(site.name, one)]
        if not named:
            near = ", ".join(site.name for site in found[:3])
            raise ValueError(f"{argument}: expected names such as {near}, or patterns of them, got {one!r}")
        for i in named:
            wanted[i] = True
    return wanted

"""A trained softmax network becomes a linear one: find its attention, put ours there, say what was done."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from ..ops import Mechanism
from .choices import Bias, Choices, FeatureMap
from .report import Layer, Report
from .sites import Site, core_for

M = TypeVar("M", bound=nn.Module)
RECORD = "affinear_linearized"  # the report that a swapped network carries


def linearize(
    model: M,
    mechanism: str | Mechanism = "mala",
    layers: str | Sequence[int | str] = "all",
    *,
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
        model: A network of timm, transformers or diffusers.
        mechanism: A registered name with a state, or "none" with a window: the window alone.
        layers: "all", or which of the layers that were found: numbers from 0 in their order, and names, which may have
            wildcards. Cross-attention is swapped only if it is named.
        feature_map: "own", "learned" or "hedgehog"; see `Choices`, as for all that follow.
        gain: Whether each head learns a factor of what it adds to the mean value.
        norm: Whether each head learns to normalise its answer.
        window: Latest tokens that causal layers still see by softmax.
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
    name = mechanism.name if isinstance(mechanism, Mechanism) else mechanism
    choices = Choices(name, feature_map, gain, norm, window, sinks, convolution, bias)
    if getattr(model, RECORD, None) is not None:
        raise ValueError("model: expected a network with softmax attention, got one that is linearized already")
    return apply(model if in_place else copy.deepcopy(model), choices, layers)


def apply(model: M, choices: Choices, layers: str | Sequence[int | str] = "all") -> tuple[M, Report]:
    """Swap, in place, under choices that are made; `linearize` with everything said."""
    found = find(model)
    if not found:
        raise ValueError(
            f"model: expected a network of timm, transformers or diffusers with attention, got {type(model).__name__}, "
            "in which none was found"
        )
    wanted = _wanted(found, layers)
    told: list[Layer] = []
    for site, asked in zip(found, wanted, strict=True):
        reason = site.why_not(choices) if asked else _unasked(site)
        told.append(Layer(site.name, site.was, site.was, False, remark=reason) if reason else _swap(site, choices))
    report = Report(tuple(told), choices)
    if not report.swapped:
        raise ValueError(f"model: nothing could be swapped:\n{report}")
    record(model, report)
    return model, report


def find(model: nn.Module) -> list[Site]:
    """Every attention layer of a network, in order, whether it can be swapped or not."""
    if is_of("transformers", "PreTrainedModel", model):
        from . import in_transformers

        return list(in_transformers.sites(model))  # pyright: ignore[reportArgumentType]
    if is_of("diffusers", "ModelMixin", model):
        from . import in_diffusers

        return list(in_diffusers.sites(model))
    if "timm" in sys.modules:
        from . import in_timm

        return list(in_timm.sites(model))
    return []


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
    """Note in a network what became of its layers, where its own way of saving keeps it."""
    object.__setattr__(model, RECORD, report)  # no parameter, no module: nothing for torch to look after
    if is_of("transformers", "PreTrainedModel", model):
        from . import recorded

        recorded.note(model, report)  # pyright: ignore[reportArgumentType]


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
    if layers == "all":
        return [not site.optional for site in found]
    asked: Iterable[int | str] = [layers] if isinstance(layers, str) else layers
    wanted = [False] * len(found)
    for one in asked:
        if isinstance(one, int):
            if not -len(found) <= one < len(found):
                raise ValueError(f"layers: expected numbers from 0 to {len(found) - 1}, got {one}")
            wanted[one] = True
            continue
        named = [i for i, site in enumerate(found) if fnmatchcase(site.name, one)]
        if not named:
            near = ", ".join(site.name for site in found[:3])
            raise ValueError(f"layers: expected names such as {near}, or patterns of them, got {one!r}")
        for i in named:
            wanted[i] = True
    return wanted

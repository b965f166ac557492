"""What a linearized network learns from its teacher: layer by layer, then as a whole.

Stage one: every swapped layer answers what the one it replaced answers, on the teacher's own inputs. Stage two: the
network says what its teacher says. `affinear distil` does both on the engine (`affinear.tasks.distil`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from .core import LinearCore

WRAPPERS = ("module.", "_orig_mod.")  # what DistributedDataParallel and torch.compile put before every name


def swapped_layers(student: nn.Module) -> dict[str, nn.Module]:
    """The layers of a linearized network that are linear, by the names they have in its teacher."""
    found: dict[str, nn.Module] = {}
    for name, module in student.named_modules():
        if isinstance(getattr(module, "linearized", None), LinearCore):
            found[_bare(name)] = module
    if not found:
        raise ValueError("student: expected a linearized network, got one without a linear layer")
    return found


def layer_errors(teacher: nn.Module, student: nn.Module, call: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """How far each swapped layer's answer is from the one it replaced, both asked what the teacher's layer was asked.

    Args:
        teacher: The softmax network, in evaluation mode.
        student: Its linearized copy.
        call: Calls a network on a batch, such as `lambda network: network(images)`. Both are called once; in the
            student every swapped layer gets the teacher's input, and hands on the teacher's answer.

    Returns:
        For each layer the mean square error over the variance of the teacher's answer: 0 is the same, 1 is no better
        than their mean.

    Example:
        >>> import affinear, timm, torch
        >>> from affinear.linearizing.distil import layer_errors
        >>> teacher = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64).eval()
        >>> student, _ = affinear.linearize(teacher)
        >>> images = torch.randn(2, 3, 64, 64)
        >>> sorted(layer_errors(teacher, student, lambda network: network(images)))
        ['blocks.0.attn', 'blocks.1.attn']
    """
    layers = swapped_layers(student)
    asked: dict[str, tuple[Any, Any, Any]] = {}
    errors: dict[str, Tensor] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            asked[name] = (args, kwargs, out)

        return hook

    def ask(name: str) -> Callable[..., tuple[Any, Any]]:
        def hook(_: nn.Module, __: Any, ___: Any) -> tuple[Any, Any]:
            return asked[name][0], asked[name][1]

        return hook

    def judge(name: str) -> Callable[..., Any]:
        def hook(_: nn.Module, __: Any, ___: Any, out: Any) -> Any:
            errors[name] = relative_error(first_tensor(out), first_tensor(asked[name][2]))
            return asked[name][2]

        return hook

    originals = {name: teacher.get_submodule(name) for name in layers}
    with torch.no_grad(), _hooks(o.register_forward_hook(record(n), with_kwargs=True) for n, o in originals.items()):
        call(teacher)
    before = (layer.register_forward_pre_hook(ask(n), with_kwargs=True) for n, layer in layers.items())
    after = (layer.register_forward_hook(judge(n), with_kwargs=True) for n, layer in layers.items())
    with _hooks(before), _hooks(after):
        call(student)
    return errors


def relative_error(found: Tensor, target: Tensor) -> Tensor:
    """Mean square error over the variance of the target."""
    found, target = found.float(), target.float()
    return (found - target).square().mean() / target.var(correction=0).clamp(min=1e-12)


@dataclass(frozen=True)
class Weights:
    """What the parts of the second stage's loss count.

    Attributes:
        logits: Divergence from the teacher's distribution.
        hidden: Relative error of the final features.
        labels: Cross entropy with the labels.
        temperature: Of both distributions.
    """

    logits: float = 1.0
    hidden: float = 1.0
    labels: float = 0.0
    temperature: float = 1.0


def network_loss(
    teacher: nn.Module,
    student: nn.Module,
    call: Callable[[nn.Module], Any],
    *,
    weights: Weights,
    labels: Tensor | None = None,
    features: str | None = None,
) -> Tensor:
    """The loss of the second stage on one batch.

    Args:
        teacher: The softmax network, in evaluation mode.
        student: Its linearized copy.
        call: Calls a network on a batch and gives its logits, (..., classes).
        weights: What each part counts.
        labels: Classes, or a distribution over them, where there are any.
        features: Name of the layer whose answer is the final features, as where an encoder is linear and a decoder
            speaks: "model.encoder.layer_norm". None for the last normalisation after the blocks.
    """
    with torch.no_grad(), _features(teacher, features) as theirs:
        target = first_tensor(call(teacher)).float()
    with _features(student, features) as ours:
        logits = first_tensor(call(student)).float()
    loss = logits.new_zeros(())
    if weights.logits:
        heat = weights.temperature
        divergence = F.kl_div(
            (logits / heat).log_softmax(-1).flatten(0, -2),
            (target / heat).log_softmax(-1).flatten(0, -2),
            reduction="batchmean",
            log_target=True,
        )
        loss = loss + weights.logits * heat**2 * divergence
    if weights.hidden:
        loss = loss + weights.hidden * relative_error(ours[-1], theirs[-1])
    if weights.labels:
        if labels is None:
            raise ValueError("labels: expected classes, as weights.labels is not 0, got None")
        loss = loss + weights.labels * F.cross_entropy(logits, labels)
    return loss


def first_tensor(out: Any) -> Tensor:
    """The answer among what a layer or network gives: itself, its logits, or the first of several."""
    if isinstance(out, Tensor):
        return out
    logits = getattr(out, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    return first_tensor(next(iter(out.values() if isinstance(out, Mapping) else out)))


@contextmanager
def _features(model: nn.Module, name: str | None) -> Generator[list[Tensor]]:
    """The final features of what is called meanwhile: what the layer of that name gives, or the last norm."""
    found: list[Tensor] = []
    layer = last_norm(model) if name is None else _named(model, name)
    handle = layer.register_forward_hook(lambda _, __, out: found.append(first_tensor(out)))
    with _hooks(iter([handle])):
        yield found


def _named(model: nn.Module, name: str) -> nn.Module:
    """A layer by the name that it has in the network itself, whatever is wrapped around it."""
    modules = {_bare(key): module for key, module in model.named_modules()}
    if name not in modules:
        raise ValueError(f"features: expected the name of a layer, such as {next(reversed(modules))}, got {name!r}")
    return modules[name]


def _bare(name: str) -> str:
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name


def last_norm(model: nn.Module) -> nn.Module:
    """The normalisation that the final features come out of: the last one that stands in no list of blocks."""
    norms = [
        module
        for name, module in model.named_modules()
        if "Norm" in type(module).__name__ and not any(part.isdigit() for part in name.split("."))
    ]
    if not norms:
        raise ValueError("hidden: expected a network with a normalisation after its blocks, got none; set it to 0")
    return norms[-1]


@contextmanager
def _hooks(handles: Any) -> Generator[None]:
    held: list[RemovableHandle] = list(handles)
    try:
        yield
    finally:
        for handle in held:
            handle.remove()

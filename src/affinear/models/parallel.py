"""Networks over images that lie in strips on many devices, parallelized in the manner of torch's styles.

Language models, over texts in pieces, have a file of their own, which needs transformers: `language/parallel.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from timm.layers import PatchEmbed
from timm.layers.adaptive_avgmax_pool import SelectAdaptivePool2d
from timm.models.swin_transformer import PatchMerging
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ..layers import Attention, AxialRotary, ChannelRotary, LearnedPosition, LocalResidual
from ..layers.strips import (
    InStrips,
    Shrinking,
    StripAttention,
    StripBatchNorm,
    StripConv,
    StripPool,
    StripPosition,
    StripResidual,
    StripRotary,
    Strips,
    adopt,
)
from ..ops.distributed.group import Mesh, group_of
from ._pyramid import Pyramid
from .inline_cswin import StripeAttention
from .inline_deit import InLineDeiT
from .inline_pvt import ReducedAttention
from .inline_swin import SwinBlock, WindowAttention
from .rmt import ManhattanPositions
from .secvit import ClusterAttention

KINDS: tuple[tuple[type[nn.Module], type[InStrips]], ...] = (
    (Attention, StripAttention),
    (AxialRotary, StripRotary),
    (LearnedPosition, StripPosition),
    (LocalResidual, StripResidual),
    (nn.BatchNorm2d, StripBatchNorm),
    (SelectAdaptivePool2d, StripPool),
)


class ImageStrips(ParallelStyle):
    """A style for `torch.distributed.tensor.parallel.parallelize_module`: every rank holds some rows of every image.

    Example:
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from affinear.models.parallel import ImageStrips
        >>> def over_strips(model, mesh):  # on every rank of a mesh of one dimension
        ...     return parallelize_module(model, mesh, ImageStrips())
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return parallelize(module, device_mesh)


def parallelize(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Let a network work on images in strips, or texts in pieces, in place; weights and their names stay as they are.

    Every rank passes its own rows of the images, (B, C, rows, W), from the top on: a multiple of `unit(model)` rows on
    each but the last; `cut` takes them from whole images. Logits come out the same on every rank, maps of features in
    strips. Convolutions exchange the rows at the borders, linear attention its states, softmax its keys and values,
    and batch norms their sums in training.

    Ranks of a language model pass their own tokens, (B, N), in order, and `cu_seqlens` of all; `cut` takes them from
    whole texts. Logits are those of a rank's tokens, the loss that of all. States of linear layers travel, and the few
    tokens that a short convolution needs; there is no cache.

    A rank's gradient is that of the sum of all ranks' losses, so the weights' gradients are averaged over ranks as data
    parallelism and FSDP do: over all dimensions of a mesh, if data lie along another.

    Args:
        model: MAViT, NaLaFormer, InLine-DeiT, -PVT, -CSwin, -Swin, or a language model of linear layers. Softmax in
            windows, stripes or over reduced maps, and linear windows smaller than the map, are not served: choose
            `stage_types` with linear blocks there.
        mesh: A `DeviceMesh` of one dimension, or a process group.

    Returns:
        The model.

    Raises:
        ValueError: If the network has a part that strips cannot serve. The message names it.

    Example:
        >>> from affinear.models.parallel import cut, parallelize
        >>> def logits_of(images, model, mesh):  # whole images; large ones are read strip by strip instead
        ...     return parallelize(model, mesh)(cut(images, model, mesh))
    """
    if _is_of_language(model):
        from .language import parallel

        return parallel.parallelize(model, mesh)  # pyright: ignore[reportArgumentType]
    if not isinstance(model, Pyramid | InLineDeiT):
        raise ValueError(
            f"model: expected a network of affinear.models, got {type(model).__name__}; its layers are not known"
        )
    for name, module in model.named_modules():
        _check(name, module)
    strips, level = Strips(group_of(mesh)), 0
    for module in _in_order(model):
        level = _place(module, strips, level)
    first = model.stem if isinstance(model, Pyramid) else model.patch_embed
    first.register_forward_pre_hook(lambda _, args: strips.begin(args[0]))
    return model


def unit(model: nn.Module) -> int:
    """Rows of which every strip but the last has a multiple: how many pixels a place of the last map is high."""
    info: list[dict[str, int]] = model.feature_info  # pyright: ignore[reportAssignmentType]
    return info[-1]["reduction"]


def cut(images: Tensor, model: nn.Module, mesh: Mesh) -> Tensor:
    """This rank's strip of images (B, C, H, W), as even as whole units of the network allow, or piece of texts (B, N).

    Args:
        images: The same whole images on every rank, or texts and labels for a language model.
        model: The network that will see them.
        mesh: A `DeviceMesh` of one dimension, or a process group.

    Returns:
        (B, C, rows, W) or (B, tokens), a view.
    """
    if _is_of_language(model):
        from .language import parallel

        return parallel.cut(images, mesh)
    group, step, height = group_of(mesh), unit(model), images.shape[2]
    units = -(-height // step)
    if units < group.size():
        raise ValueError(
            f"images: expected at least {group.size()} x {step} rows, {step} for every rank, got {height}; "
            "use fewer ranks for so small an image"
        )
    starts = [min(step * (units * rank // group.size()), height) for rank in range(group.size() + 1)]
    rank = group.rank()
    return images[:, :, starts[rank] : height if rank == group.size() - 1 else starts[rank + 1]]


def _is_of_language(model: nn.Module) -> bool:
    """Whether it is one of our language models, told without loading what they need."""
    return any(kind.__module__.startswith(f"{__package__}.language.") for kind in type(model).__mro__)


def _in_order(model: Pyramid | InLineDeiT) -> Iterator[nn.Module]:
    """All layers, those of the first maps first."""
    parts = [model.stem, *model.stages, model.head] if isinstance(model, Pyramid) else [model]
    for part in parts:
        yield from part.modules()


def _place(module: nn.Module, strips: Strips, level: int) -> int:
    """Adopt one layer that sees maps of a level, and say the level of what comes out."""
    if isinstance(module, PatchEmbed):
        whole = None if module.dynamic_img_pad else 0
        strips.shrinkings.append(Shrinking(module.proj.kernel_size[0], module.proj.stride[0], whole))  # pyright: ignore
        return level + 1
    if isinstance(module, PatchMerging):
        strips.shrinkings.append(Shrinking(2, 2, None))
        return level + 1
    if isinstance(module, nn.Conv2d):
        kernel, stride, padding = module.kernel_size[0], module.stride[0], module.padding[0]
        if kernel == stride and not padding:  # of patches, which nobody shares
            return level
        adopt(module, StripConv, strips, level)
        if stride > 1:
            strips.shrinkings.append(Shrinking(kernel, stride, int(padding)))
        return level + (stride > 1)
    for own, kind in KINDS:
        if isinstance(module, own) and getattr(module, "pool_type", "avg") == "avg":
            adopt(module, kind, strips, level)
    return level


def _check(name: str, module: nn.Module) -> None:
    """Whether strips can serve a layer."""
    reason = None
    if isinstance(module, InStrips):
        reason = "has been parallelized already; make the network anew"
    elif isinstance(module, WindowAttention | StripeAttention | ReducedAttention):
        reason = "is softmax within windows, which strips would cut; choose stage_types that make it linear"
    elif isinstance(module, SwinBlock) and module.window is not None:
        reason = f"looks at windows of {module.window[0]} rows, which strips would cut; choose a window_size of the map"
    elif isinstance(module, Attention) and module.parts.weighed and module.linear:
        reason = "weighs its keys by the mean query of the whole image; choose another family, such as MAViT"
    elif isinstance(module, ChannelRotary | ManhattanPositions | ClusterAttention):
        reason = "needs to know the whole map; choose another family, such as MAViT"
    elif isinstance(module, SelectAdaptivePool2d) and module.pool_type not in ("avg", ""):
        reason = f"pools by {module.pool_type!r}; choose global_pool='avg', or '' for none"
    elif isinstance(module, InLineDeiT) and module.global_pool == "avg":
        reason = "pools all patches; choose global_pool='token', or '' for none"
    if reason is not None:
        raise ValueError(f"model: expected layers that strips can serve, but {name or type(module).__name__} {reason}")

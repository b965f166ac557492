"""What every network of four shrinking stages owes timm, written once.

Maps keep their channels last inside, (B, H, W, C); images come in, and features go out, as (B, C, H, W).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, cast

from timm.layers import DropPath, Mlp, get_device_dtype
from timm.models import register_notrace_module
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..layers import AddNorm, blank
from ..layers.narrowing import with_narrow_weights
from ..ops import Mechanism


class Block(nn.Module):
    """Attention and MLP, each added to the map after a norm.

    Args:
        dim: Channels C.
        attn: Takes tokens (B, N, C) and their grid.
        mlp_ratio: Hidden width of the MLP over C.
        drop_path: Stochastic depth.
        eps: Of the norms.
        dd: Device and dtype.
    """

    def __init__(
        self, dim: int, attn: nn.Module, mlp_ratio: float, drop_path: float, eps: float = 1e-5, **dd: Any
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps, **dd)
        self.attn = attn
        self.norm2 = AddNorm(dim, eps=eps, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), **dd)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """A map (B, H, W, C) of the same size; the mask (B, H, W) is False where it is padding."""
        # Tokens (B, N, C), which compilers keep for backward as they lie; see `ops.depthwise` about maps.
        tokens, normed = self.norm2(x.flatten(1, 2), self.drop_path(self.attend(x, mask).flatten(1, 2)))
        return (tokens + self.drop_path(self.mlp(normed))).unflatten(1, (x.shape[1], x.shape[2]))

    def attend(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """What attention adds to the map."""
        grid = (x.shape[1], x.shape[2])
        key_mask = None if mask is None else mask.flatten(1)
        return self.attn(self.norm1(x.flatten(1, 2)), grid, key_mask=key_mask).unflatten(1, grid)


class Stage(nn.Module):
    """Halves the map, if it is not the first stage, and sends it through blocks.

    Args:
        downsample: From a map, and a mask or None, to a map of half the size; the identity in a first stage.
        blocks: Each takes a map, a mask or None, and what `rotary` makes if the stage has it; it gives a map of the
            same size.
        rotary: Makes what all blocks of the stage share of a map's places: rotary tables, or more.
        kept: Which of the two rows or columns of a pair must be image for the smaller map to have it: 0 where the
            downsampling rounds an odd side up, 1 where it leaves what is over out.
    """

    def __init__(
        self, downsample: nn.Module, blocks: Sequence[nn.Module], rotary: nn.Module | None = None, kept: int = 0
    ) -> None:
        super().__init__()
        self.downsample, self.rotary, self.kept = downsample, rotary, kept
        self.blocks = nn.ModuleList(blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The map after all blocks, (B, H, W, C); the mask is that of the map before."""
        if not isinstance(self.downsample, nn.Identity):
            x = self.downsample(x, mask)
        given = (self.shrink(mask),) if self.rotary is None else (self.shrink(mask), self.rotary(x))
        for block in self.blocks:
            x = checkpoint(block, x, *given, use_reentrant=False) if self.grad_checkpointing else block(x, *given)
        return x

    def shrink(self, mask: Tensor | None) -> Tensor | None:
        """The mask of the map after the stage."""
        if mask is None or isinstance(self.downsample, nn.Identity):
            return mask
        return mask[:, self.kept :: 2, self.kept :: 2]

    def extra_repr(self) -> str:
        """What `print` shows: which blocks are linear."""
        return describe(self)


register_notrace_module(Stage)  # torch.fx takes a stage as one node


class Pyramid(nn.Module):
    """Stem, stages, norm and head, with the methods timm's users and tools call.

    A family's class makes the modules and passes them here.

    Args:
        stem: From images (B, 3, H, W), and a mask or None, to maps (B, H / 4, W / 4, C).
        stages: Each halves the map but the first.
        norm: Of the last map.
        head: With `reset(num_classes, pool_type)` and `forward(x, pre_logits)`, on features (B, C, H, W).
        dims: Channels of each stage.
        num_classes: Classes; 0 for none.
    """

    stem_pattern = r"^stem"
    knows_padding = True  # whether a mask keeps padding out of an image's maps
    divisor = 1  # what sides must be multiples of
    stem_kept = 0  # which of four rows or columns of pixels must be image for the stem's map to have them

    def __init__(
        self,
        *,
        stem: nn.Module,
        stages: Sequence[Stage],
        norm: nn.Module,
        head: nn.Module,
        dims: Sequence[int],
        num_classes: int,
        head_hidden_size: int | None = None,
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.num_features = dims[-1]
        self.head_hidden_size = head_hidden_size or dims[-1]
        self.stem, self.norm, self.head = stem, norm, head
        self.stages = nn.ModuleList(stages)
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(dims)
        ]

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimizers leave out of weight decay, beside biases and norms."""
        return set()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """How parameters group into layers, for layer-wise learning rates."""
        blocks: Any = r"^stages\.(\d+)"
        if not coarse:
            blocks = [
                (r"^stages\.(\d+)\.downsample", (0,)),
                (r"^stages\.(\d+)\.blocks\.(\d+)", None),
                (r"^norm", (99999,)),
            ]
        return {"stem": self.stem_pattern, "blocks": blocks}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether training recomputes the blocks' activations instead of keeping them."""
        for stage in self.stages:
            assert isinstance(stage, Stage)
            stage.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """The last linear layer."""
        return self.head.fc  # pyright: ignore[reportReturnType]

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Start the classifier anew with other classes, or none (0), and another pooling, or none ('')."""
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool, **get_device_dtype(self))  # pyright: ignore[reportCallIssue]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        mask: Tensor | None = None,
    ) -> Any:
        """The stages' maps, and the final features unless `intermediates_only`.

        Args:
            x: Images (B, 3, H, W).
            indices: Stages to return; the last so many if a number, all if None.
            norm: Whether the last map is normalised as the head would have it.
            stop_early: Whether to skip stages that are not asked for.
            output_fmt: "NCHW" or "NHWC", the layout of the maps.
            intermediates_only: Whether to leave the final features out.
            mask: (B, H, W), boolean, as `affinear.layers.mask_of` makes it: False where the batch is padding. An
                image's maps then are those it has alone, and zeros beyond.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt: expected 'NCHW' or 'NHWC', got {output_fmt!r}")
        wanted, last = feature_take_indices(len(self.stages), indices)  # pyright: ignore[reportArgumentType]
        x, mask = self._embed(x, mask)
        maps: list[Tensor] = []
        for i, stage in enumerate(self.stages):
            if stop_early and i > last:
                break
            x, mask = self._run(stage, x, mask)
            if i in wanted:
                out = blank(self.norm(x) if norm and i == len(self.stages) - 1 else x, mask)
                maps.append(out.permute(0, 3, 1, 2) if output_fmt == "NCHW" else out)
        if intermediates_only:
            return maps
        return blank(self.norm(x), mask).permute(0, 3, 1, 2), maps

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the given stages do not need."""
        wanted, last = feature_take_indices(len(self.stages), indices)  # pyright: ignore[reportArgumentType]
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return wanted

    def forward_features(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Features (B, C, H / 32, W / 32) of images (B, 3, H, W); of a mask, see `forward_intermediates`."""
        x, mask = self._embed(x, mask)
        for stage in self.stages:
            x, mask = self._run(stage, x, mask)
        return blank(self.norm(x), mask).permute(0, 3, 1, 2)

    def masks_of(self, mask: Tensor) -> list[Tensor]:
        """The masks of the stages' maps for one (B, H, W) of the images."""
        masks = [mask[:, self.stem_kept :: 4, self.stem_kept :: 4]]
        for stage in self.stages:
            assert isinstance(stage, Stage)
            masks.append(cast(Tensor, stage.shrink(masks[-1])))
        return masks[1:]

    def _embed(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The first map and its mask."""
        if mask is not None and not self.knows_padding:
            raise ValueError(
                f"mask: expected None, as {type(self).__name__} cannot tell padding from image, got one; "
                "give it images of one size at a time"
            )
        return self.stem(x, mask), None if mask is None else mask[:, self.stem_kept :: 4, self.stem_kept :: 4]

    def _run(self, stage: nn.Module, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The map after a stage and its mask."""
        assert isinstance(stage, Stage)
        return stage(x, mask), stage.shrink(mask)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits (B, num_classes) of features, or what the classifier would see."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, num_classes) of images (B, 3, H, W)."""
        return with_narrow_weights(self, lambda: self.forward_head(self.forward_features(x)), x)


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width of an image that may be given by its side."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def describe(module: nn.Module) -> str:
    """Which attention the blocks of a module use, in order, such as "2 x mala_released, 6 x softmax"."""
    runs = groupby(mechanism.name for mechanism in mechanisms_of(module))
    return ", ".join(f"{len(list(run))} x {name}" for name, run in runs)


def mechanisms_of(module: nn.Module) -> list[Mechanism]:
    """The mechanism of every attention in a module, in order."""
    found = (getattr(layer, "mechanism", None) for layer in module.modules())
    return [mechanism for mechanism in found if isinstance(mechanism, Mechanism)]

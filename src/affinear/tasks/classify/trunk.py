"""The trunk of the comparison: a plain vision transformer in which nothing but the attention changes.

No convolution beyond the patches, no gate, no class token: patches, learned positions, blocks of attention and MLP, and
the mean of the tokens. The learned positions stay where rotary ones are added, so that a variant with and one without
differ in their attention and in nothing else.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from timm.layers import DropPath, Mlp, PatchEmbed, calculate_drop_path_rates
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, register_notrace_module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...layers import AddNorm, Attention, AxialRotary, LearnedPosition, Parts
from ...models._column import Column
from ...models._config import config
from ...models._pyramid import describe, pair
from ...ops import Mechanism
from .variants import Variant, variant

NORM_EPS = 1e-6
CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Block(nn.Module):
    """Attention and MLP, each added to the tokens after a norm."""

    def __init__(
        self, dim: int, num_heads: int, chosen: Variant, mlp_ratio: float, drop_path: float, **dd: Any
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=NORM_EPS, **dd)
        self.attn = chosen.layer(dim, num_heads, chosen.parts, **dd)
        self.norm2 = AddNorm(dim, eps=NORM_EPS, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), **dd)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, grid: tuple[int, int], rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """Tokens (B, N, C)."""
        x, normed = self.norm2(x, self.drop_path(self.attn(self.norm1(x), grid, rotary=rotary)))
        return x + self.drop_path(self.mlp(normed))


register_notrace_module(Block)  # torch.fx takes a block as one node


class Trunk(Column):
    """A plain vision transformer around any attention.

    Weights that all variants have are the same numbers for the same seed of torch, whatever the variant, and making a
    trunk uses up one random number, whatever the variant: two trunks made after the same `torch.manual_seed` differ
    in their attention alone.

    Args:
        img_size: Side, or height and width, that the position table is made for; any other may come.
        patch_size: Side of a patch; images that it does not divide get zeros below and to the right.
        in_chans: Channels of the images.
        num_classes: Classes; 0 for no classifier.
        global_pool: "avg" for the mean of the tokens, "" for all of them.
        embed_dim: Channels.
        depth: Blocks.
        num_heads: Heads; with rotary positions their width has to be a multiple of four.
        mlp_ratio: Hidden width of the MLP over channels.
        mechanism: A name that `affinear.tasks.classify.variants` knows, a `Variant`, a `Mechanism`, or `Parts`.
        rotary: Whether queries and keys turn with their place, beyond what the mechanism says.
        drop_rate: Dropout before the classifier.
        drop_path_rate: Stochastic depth of the last block.
        init_std: Deviation of fresh weights; 0.02 is too little for a narrow trunk that trains for seconds.
        device: Where the weights live.
        dtype: Their dtype.

    Example:
        >>> import timm, torch
        >>> import affinear.tasks.classify.trunk
        >>> model = timm.create_model("affinear_trunk_micro", mechanism="mala", rotary=True).eval()
        >>> model(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 32,
        patch_size: int = 2,
        in_chans: int = 3,
        num_classes: int = 10,
        global_pool: str = "avg",
        embed_dim: int = 192,
        depth: int = 8,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        mechanism: str | Mechanism | Parts | Variant = "softmax",
        rotary: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        init_std: float = 0.02,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        chosen = _variant(mechanism, rotary)
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        seed = int(torch.randint(2**62, (), device="cpu"))
        self.num_classes, self.global_pool = num_classes, self.check_pool(global_pool)
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.num_prefix_tokens = 0
        self.grad_checkpointing = False
        grid = [-(-side // patch_size) for side in pair(img_size)]
        rates = calculate_drop_path_rates(drop_path_rate, depth)
        with torch.random.fork_rng(devices=[]):  # how much a variant draws shall not be felt outside
            torch.manual_seed(seed)
            self.patch_embed = PatchEmbed(
                None, patch_size, in_chans, embed_dim, output_fmt="NHWC", dynamic_img_pad=True, **dd
            )
            self.position = LearnedPosition((grid[0], grid[1]), embed_dim, **dd)
            self.rotary = AxialRotary(embed_dim // num_heads) if chosen.parts.rotary else None
            self.blocks = nn.ModuleList(
                Block(embed_dim, num_heads, chosen, mlp_ratio, rates[i], **dd)  # pyright: ignore[reportArgumentType]
                for i in range(depth)
            )
            self.norm = nn.LayerNorm(embed_dim, eps=NORM_EPS, **dd)
            self.head_drop = nn.Dropout(drop_rate)
            self.head = nn.Linear(embed_dim, num_classes, **dd) if num_classes else nn.Identity()
        draw_by_name(self, seed, embed_dim, init_std)

    @staticmethod
    def check_pool(global_pool: str) -> str:
        """The pooling, if it is one that a transformer without a class token has."""
        if global_pool not in ("avg", ""):
            raise ValueError(f"global_pool: expected 'avg' or '', as there is no class token, got {global_pool!r}")
        return global_pool

    def no_weight_decay(self) -> set[str]:
        """Parameters that timm's optimizers leave out of weight decay, beside biases and norms."""
        return {"position.table"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """How parameters group into layers, for layer-wise learning rates."""
        return {"stem": r"^position|^patch_embed", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}

    def forward_features(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C) of images (B, channels, H, W)."""
        x = self.position(self.patch_embed(x))
        grid = (x.shape[1], x.shape[2])
        tables = None if self.rotary is None else self.rotary(x)
        x = x.flatten(1, 2)
        for block in self.blocks:
            given = (x, grid, tables)
            x = checkpoint(block, *given, use_reentrant=False) if self.grad_checkpointing else block(*given)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits (B, num_classes) of tokens, or what the classifier would see."""
        x = self.head_drop(x.mean(dim=1) if self.global_pool == "avg" else x)
        return x if pre_logits else self.head(x)

    def extra_repr(self) -> str:
        """What `print` shows: the attention of the blocks."""
        return describe(self)


def draw_by_name(network: nn.Module, seed: int, rows: int, std: float) -> None:
    """Draw weights of linear layers, patches and positions anew, each from a generator that its own name seeds.

    What one weight gets then does not depend on which others there are. A matrix is drawn so many rows at a time: one
    that is longer, because it also makes a gate, begins with the same numbers. Biases of these layers are zero, all
    other parameters stay as they are.

    Args:
        network: On any device; nothing is drawn on the meta device.
        seed: From 0 to 2**62 - 1.
        rows: Of a matrix at a time.
        std: Deviation of what is drawn, a normal distribution cut off at two.
    """
    for name, module in network.named_modules():
        if isinstance(module, LearnedPosition):
            _draw(module.table, seed, name, len(module.table), std)
        elif isinstance(module, (nn.Linear, nn.Conv2d)):
            _draw(module.weight, seed, name, rows, std)
            if module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                nn.init.zeros_(module.bias)


def _draw(weight: Tensor, seed: int, name: str, rows: int, std: float) -> None:
    if weight.is_meta:
        return
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    for part in weight.detach().split(rows):
        drawn = torch.empty(part.shape, dtype=torch.float32, device="cpu")
        part.copy_(nn.init.trunc_normal_(drawn, std=std, a=-2 * std, b=2 * std, generator=generator))


def _variant(mechanism: str | Mechanism | Parts | Variant, rotary: bool) -> Variant:
    if isinstance(mechanism, str):
        chosen = variant(mechanism)
    elif isinstance(mechanism, Variant):
        chosen = mechanism
    else:
        parts = mechanism if isinstance(mechanism, Parts) else Parts(mechanism)
        chosen = Variant("given", "given", parts, Attention)
    return chosen.turned() if rotary else chosen


def _config(size: tuple[int, int, int], mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, Any]:
    return config(
        input_size=size,
        pool_size=None,
        num_classes=10,
        crop_pct=1.0,
        mean=mean,
        std=std,
        first_conv="patch_embed.proj",
        classifier="head",
    )


SIZES: dict[str, dict[str, Any]] = {
    "affinear_trunk_micro": {
        "img_size": 8,
        "in_chans": 1,
        "patch_size": 2,
        "embed_dim": 64,
        "depth": 3,
        "num_heads": 4,
        "mlp_ratio": 2.0,
        "init_std": 0.1,
    },
    "affinear_trunk_cifar": {"img_size": 32, "patch_size": 2, "embed_dim": 192, "depth": 8, "num_heads": 6},
}
default_cfgs = generate_default_cfgs(
    {
        "affinear_trunk_micro": _config((1, 8, 8), (0.5,), (0.5,)),
        "affinear_trunk_cifar": _config((3, 32, 32), CIFAR_MEAN, CIFAR_STD),
    }
)


@register_model
def affinear_trunk_micro(pretrained: bool = False, **given: Any) -> Trunk:
    """The trunk for images of 8 x 8 pixels, 16 tokens, 0.1 million parameters: trained in seconds."""
    return _build("affinear_trunk_micro", pretrained, given)


@register_model
def affinear_trunk_cifar(pretrained: bool = False, **given: Any) -> Trunk:
    """The trunk for CIFAR: patches of 2 x 2 pixels, 256 tokens, width 192, 8 blocks, 3.6 million parameters."""
    return _build("affinear_trunk_cifar", pretrained, given)


def _build(name: str, pretrained: bool, given: dict[str, Any]) -> Trunk:
    return build_model_with_cfg(Trunk, name, pretrained, **{**SIZES[name], **given})

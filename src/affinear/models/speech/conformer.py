"""The Conformer encoder with an output for CTC, over whole recordings or, if it is causal, as they come.

Paper: Conformer: Convolution-augmented Transformer for Speech Recognition, arXiv 2005.08100.

Its attention is a choice: any mechanism with rotary positions, softmax with relative positions as published, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ... import ops
from ...ops import rotary_1d
from .attention import POSITIONS, MechanismAttention, RelativeAttention, distance_table
from .blocks import Block, BlockStream

FACTOR = 4  # frames of a token
REACH = 7  # frames that a token is made of
AT_ONCE = 3000  # tokens that are made together where nothing is learnt: an hour takes no more memory than two minutes
NONE = "none"


@dataclass(frozen=True)
class Stream:
    """What a causal encoder remembers of a recording that goes on: of one size, however long it lasts.

    Attributes:
        position: Tokens so far.
        frames: (B, at most 6, F), features that are part of tokens to come.
        blocks: What each block remembers.
    """

    position: int
    frames: Tensor
    blocks: tuple[BlockStream, ...]

    @property
    def numbers(self) -> int:
        """How many numbers are remembered, but for the frames."""
        states = [block.attention for block in self.blocks if block.attention is not None]
        means = sum(state.key_mean.numel() + state.value_mean.numel() + state.covariance.numel() for state in states)
        turned = sum(state.rotated_key_mean.numel() for state in states if state.rotated_key_mean is not None)
        return means + turned + sum(block.tail.numel() for block in self.blocks)


class Subsampling(nn.Module):
    """Two 3 x 3 convolutions of stride 2 and a layer: a token for every four frames, made of seven.

    Nothing is padded, so a token depends on its own frames alone, and frames that come in pieces give the same tokens.
    """

    def __init__(self, in_features: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, dim, 3, 2), nn.Conv2d(dim, dim, 3, 2)
        self.proj = nn.Linear(dim * (((in_features - 1) // 2 - 1) // 2), dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """Tokens (B, N, C) of features (B, T, F), N = ((T - 1) // 2 - 1) // 2."""
        count = tokens_of(features.shape[1])
        if torch.is_grad_enabled() or count <= AT_ONCE:
            return self._some(features)
        pieces = range(0, count, AT_ONCE)
        return torch.cat(
            [self._some(features[:, FACTOR * i : FACTOR * (i + AT_ONCE) + REACH - FACTOR]) for i in pieces], 1
        )

    def _some(self, features: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(features[:, None]))))
        return self.dropout(self.proj(x.transpose(1, 2).flatten(2)))


class Conformer(nn.Module):
    """Features of speech in, a score for every piece of text at every token out.

    Args:
        num_tokens: Pieces of text, the blank of CTC included, which is the first.
        in_features: Bands F of the features.
        dim: Channels C.
        depth: Blocks.
        num_heads: Heads, a divisor of C.
        mechanism: Of the attention: a registered name, or "none" for none at all.
        positions: "rotary" for any mechanism, "relative" for softmax as published, or "none".
        causal: Whether a token sees those before it and itself alone; then recordings can be heard as they come.
        kernel_size: Tokens that a convolution sees, odd.
        conv_norm: "batch", as published, or "layer"; None for "layer" if it is causal, else "batch".
        expansion: Width of the feed-forward over C.
        dropout: Of everything that is added.

    Example:
        >>> import torch
        >>> from affinear.models.speech import Conformer
        >>> network = Conformer(29, dim=32, depth=2, num_heads=2)
        >>> logits, lengths = network(torch.randn(2, 200, 80), torch.tensor([200, 120]))
        >>> logits.shape, lengths.tolist()
        (torch.Size([2, 49, 29]), [49, 29])
    """

    def __init__(
        self,
        num_tokens: int = 29,
        in_features: int = 80,
        dim: int = 144,
        depth: int = 16,
        num_heads: int = 4,
        mechanism: str = "mala",
        positions: str = "rotary",
        causal: bool = False,
        kernel_size: int = 31,
        conv_norm: str | None = None,
        expansion: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        conv_norm = conv_norm or ("layer" if causal else "batch")
        _check(dim, num_heads, mechanism, positions, kernel_size, conv_norm, in_features)
        self.num_tokens, self.in_features, self.dim, self.num_heads = num_tokens, in_features, dim, num_heads
        self.mechanism, self.positions, self.causal, self.kernel_size = mechanism, positions, causal, kernel_size
        self.stem = Subsampling(in_features, dim, dropout)
        self.blocks = nn.ModuleList(
            Block(
                dim,
                self._attention(dropout),
                kernel_size=kernel_size,
                causal=causal,
                conv_norm=conv_norm,
                expansion=expansion,
                dropout=dropout,
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(dim, num_tokens)
        self.checkpointing = False

    def _attention(self, dropout: float) -> MechanismAttention | RelativeAttention | None:
        if self.mechanism == NONE:
            return None
        if self.positions == "relative":
            return RelativeAttention(self.dim, self.num_heads, self.causal, dropout)
        return MechanismAttention(self.dim, self.num_heads, self.mechanism, self.causal, dropout)

    @property
    def streams(self) -> bool:
        """Whether a recording can be heard as it comes, in memory of one size."""
        attention = cast(Block, self.blocks[0]).attention
        return self.causal and (attention is None or attention.streams)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether activations are computed anew in the backward pass."""
        self.checkpointing = enable

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits (B, N, num_tokens) of features (B, T, F), and how many of the N tokens each recording has, (B,).

        Args:
            features: At least 7 frames.
            lengths: (B,), int64, frames of each recording; None where all of them fill the batch.

        Raises:
            ValueError: If there are too few frames or other bands.
        """
        self._check_features(features, REACH)
        x = self.stem(features)
        if lengths is None:
            counts, mask = torch.full((len(x),), x.shape[1], device=x.device), None
        else:
            counts = tokens_of(lengths).clamp(min=1, max=x.shape[1])
            mask = torch.arange(x.shape[1], device=x.device) < counts[:, None]
        tables = self._tables(x.shape[1], 0, x.device)
        for block in self.blocks:
            if self.checkpointing and self.training:
                x = cast(Tensor, checkpoint(block, x, mask, tables, use_reentrant=False))
            else:
                x = block(x, mask, tables)
        return self.head(x), counts

    def begin(self, batch: int = 1) -> Stream:
        """What is remembered before a stream begins.

        Raises:
            ValueError: If this network cannot hear a recording as it comes.
        """
        if not self.streams:
            raise ValueError(
                "stream: expected a causal network whose attention has a state of one size, or none, got "
                f"{'a causal' if self.causal else 'a bidirectional'} one with {self.mechanism}; train one with "
                "--model-arg causal=true and a linear mechanism"
            )
        like = self.head.weight
        tail = like.new_zeros(batch, self.kernel_size - 1, self.dim)
        blocks = tuple(BlockStream(None, tail) for _ in self.blocks)
        return Stream(0, like.new_zeros(batch, 0, self.in_features), blocks)

    @torch.no_grad()
    def hear(self, features: Tensor, stream: Stream) -> tuple[Tensor, Stream]:
        """The logits of all tokens that are whole with the next features (B, T, F) of a stream, and what is remembered.

        Example:
            >>> network = Conformer(29, dim=32, depth=2, num_heads=2, causal=True).eval()
            >>> features, stream, heard = torch.randn(1, 90, 80), network.begin(), []
            >>> for piece in features.split(13, dim=1):
            ...     logits, stream = network.hear(piece, stream)
            ...     heard.append(logits)
            >>> torch.allclose(torch.cat(heard, dim=1), network(features)[0], atol=1e-5)
            True
        """
        self._check_features(features, 0)
        frames = torch.cat((stream.frames.to(features.dtype), features), dim=1)
        count = tokens_of(frames.shape[1])
        if count == 0:
            return features.new_zeros(len(features), 0, self.num_tokens), Stream(stream.position, frames, stream.blocks)
        x = self.stem(frames)
        tables = self._tables(count, stream.position, x.device)
        remembered: list[BlockStream] = []
        for block, before in zip(self.blocks, stream.blocks, strict=True):
            x, after = cast(Block, block).step(x, before, tables)
            remembered.append(after)
        left = frames[:, FACTOR * count :].clone()  # or all of the piece would be kept
        return self.head(x), Stream(stream.position + count, left, tuple(remembered))

    def _tables(self, length: int, offset: int, device: torch.device) -> Any:
        if self.mechanism == NONE or self.positions == "none":
            return None
        if self.positions == "relative":
            return distance_table(length, self.dim, device)
        return rotary_1d(length, self.dim // self.num_heads, offset=offset, device=device)

    def _check_features(self, features: Tensor, least: int) -> None:
        if features.ndim != 3 or features.shape[2] != self.in_features or features.shape[1] < least:
            raise ValueError(
                f"features: expected (batch, frames, {self.in_features}) with {least} frames or more, got "
                f"{tuple(features.shape)}"
            )


def tokens_of(frames: Any) -> Any:
    """How many tokens so many frames give: a number, or a tensor of numbers.

    Example:
        >>> tokens_of(6), tokens_of(7), tokens_of(100)
        (0, 1, 24)
    """
    found = ((frames - 1) // 2 - 1) // 2
    return found.clamp(min=0) if isinstance(found, Tensor) else max(0, found)


def _check(
    dim: int, num_heads: int, mechanism: str, positions: str, kernel_size: int, conv_norm: str, in_features: int
) -> None:
    if dim % num_heads or (positions == "rotary" and dim // num_heads % 2):
        raise ValueError(
            f"num_heads: expected a divisor of dim = {dim} into heads of even width, as channels turn in pairs, got "
            f"{num_heads}"
        )
    if mechanism != NONE:
        ops.find(mechanism)
    if positions not in POSITIONS:
        raise ValueError(f"positions: expected one of {', '.join(POSITIONS)}, got {positions!r}")
    if positions == "relative" and mechanism not in ("softmax", NONE):
        raise ValueError(
            f"positions: expected 'rotary' or 'none' for {mechanism}, whose keys are summed up before a query comes, "
            "got 'relative', which softmax alone can have"
        )
    if kernel_size % 2 == 0:
        raise ValueError(f"kernel_size: expected an odd number, got {kernel_size}")
    if conv_norm not in ("batch", "layer"):
        raise ValueError(f"conv_norm: expected 'batch' or 'layer', got {conv_norm!r}")
    if in_features < REACH:
        raise ValueError(f"in_features: expected {REACH} bands or more, got {in_features}")


SIZES: dict[str, dict[str, Any]] = {
    "conformer_small": {"dim": 144, "depth": 16, "num_heads": 4},
    "conformer_medium": {"dim": 256, "depth": 16, "num_heads": 4},
    "conformer_large": {"dim": 512, "depth": 17, "num_heads": 8},
}
TIMMS = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")  # what timm passes to every network: for images
default_cfgs = generate_default_cfgs({name: {"first_conv": "stem.first", "classifier": "head"} for name in SIZES})


@register_model
def conformer_small(pretrained: bool = False, **given: Any) -> Conformer:
    """The paper's small encoder: 16 blocks of 144 channels, 4 heads."""
    return _build("conformer_small", pretrained, given)


@register_model
def conformer_medium(pretrained: bool = False, **given: Any) -> Conformer:
    """The paper's medium encoder: 16 blocks of 256 channels, 4 heads."""
    return _build("conformer_medium", pretrained, given)


@register_model
def conformer_large(pretrained: bool = False, **given: Any) -> Conformer:
    """The paper's large encoder: 17 blocks of 512 channels, 8 heads."""
    return _build("conformer_large", pretrained, given)


def _build(name: str, pretrained: bool, given: Mapping[str, Any]) -> Conformer:
    if pretrained:
        raise ValueError(f"pretrained: expected False, as nobody has published weights of {name}, got True")
    own = {key: value for key, value in given.items() if key not in TIMMS}
    return Conformer(**{**SIZES[name], **own})

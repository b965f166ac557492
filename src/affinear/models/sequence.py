"""An encoder of token sequences with any mechanism, in the sizes that the Long Range Arena was published with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .. import ops
from ..layers.padding import masked_mean
from . import making

NONE = "none"
POOLINGS = ("mean", "cls")
MATCHES = ("four", "two")


@dataclass(frozen=True)
class EncoderSize:
    """How large an encoder is, and how it ends.

    Attributes:
        width: Channels of a token.
        depth: Blocks.
        heads: Heads of each block's attention, a divisor of `inner`.
        inner: Channels of queries, keys and values, of all heads together.
        hidden: Channels inside the MLP.
        mechanism: A registered name, or "none": tokens meet in the pooling alone.
        pooling: "mean" of all tokens, or "cls", a token in front of them.
        match: Of pairs, what the classifier sees: "four" for [a, b, a * b, a - b], "two" for [a, b].
    """

    width: int = 64
    depth: int = 2
    heads: int = 2
    inner: int = 64
    hidden: int = 128
    mechanism: str = "mala"
    pooling: str = "mean"
    match: str = "four"

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "inner", "hidden"):
            value: Any = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**14:
                raise ValueError(f"{name}: expected a whole number from 1 to {2**14}, got {making.short(value)}")
        if self.inner % self.heads:
            raise ValueError(f"heads: expected a divisor of inner = {self.inner}, got {self.heads}")
        if self.mechanism != NONE:
            ops.find(self.mechanism)
        for name, known in (("pooling", POOLINGS), ("match", MATCHES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")


# The protocol that papers on linear attention compare in (Skyformer's), and the sizes of the benchmark's own code.
SIZES: Mapping[str, EncoderSize] = MappingProxyType(
    {
        "sequence_small": EncoderSize(),
        "sequence_lra_listops": EncoderSize(512, 4, 8, 512, 1024, pooling="cls"),
        "sequence_lra_text": EncoderSize(256, 4, 4, 256, 1024, pooling="cls"),
        "sequence_lra_retrieval": EncoderSize(128, 4, 4, 128, 512, pooling="cls", match="two"),
        "sequence_lra_image": EncoderSize(128, 1, 8, 64, 128, pooling="cls"),
        "sequence_lra_pathfinder": EncoderSize(32, 4, 4, 16, 64, pooling="cls"),
    }
)


def size_of(model: str, given: Mapping[str, Any]) -> EncoderSize:
    """The size of a name, with some fields set.

    Args:
        model: One of `SIZES`.
        given: Fields of `EncoderSize`.

    Raises:
        ValueError: If there is no such name or field, or a field holds what it may not.

    Example:
        >>> from affinear.models.sequence import size_of
        >>> size_of("sequence_small", {"mechanism": "softmax"}).heads
        2
        >>> size_of("sequence_smal", {})
        Traceback (most recent call last):
        ValueError: model: expected one of sequence_small, ..., got 'sequence_smal'; did you mean 'sequence_small'?
    """
    if model not in SIZES:
        near = get_close_matches(model[:100], SIZES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model: expected one of {', '.join(SIZES)}, got {making.short(model)}{hint}")
    known = [field.name for field in fields(EncoderSize)]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it takes {', '.join(known)}"
            raise ValueError(f"model_args: {model} takes no {name!r}; {hint}")
    try:
        return replace(SIZES[model], **given)
    except ValueError as error:
        raise ValueError(f"model_args: {error}") from None


class Mixing(nn.Module):
    """Attention of all tokens among each other, of any mechanism, and nothing around it.

    Args:
        width: Channels of a token.
        inner: Channels of queries, keys and values.
        heads: Heads.
        mechanism: A registered name.
    """

    def __init__(self, width: int, inner: int, heads: int, mechanism: str) -> None:
        super().__init__()
        self.heads, self.mechanism = heads, mechanism
        self.qkv = nn.Linear(width, 3 * inner)
        self.proj = nn.Linear(inner, width)

    def forward(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """Tokens (B, N, C) that have looked at each other; those that `key_mask` (B, N) leaves out are not seen."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        out = ops.attention(query, key, value, self.mechanism, key_mask=key_mask)
        return self.proj(out.flatten(2))

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"{self.mechanism}, heads={self.heads}"


class SequenceBlock(nn.Module):
    """Attention and an MLP, each after a norm and beside what it was given.

    Args:
        size: Of the encoder.
        dropout: Of what both add.
    """

    def __init__(self, size: EncoderSize, dropout: float) -> None:
        super().__init__()
        self.norm1 = self.attn = None
        if size.mechanism != NONE:
            self.norm1 = nn.LayerNorm(size.width)
            self.attn = Mixing(size.width, size.inner, size.heads, size.mechanism)
        self.norm2 = nn.LayerNorm(size.width)
        self.rise, self.fall = nn.Linear(size.width, size.hidden), nn.Linear(size.hidden, size.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """Tokens (B, N, C)."""
        if self.attn is not None and self.norm1 is not None:
            x = x + self.dropout(self.attn(self.norm1(x), key_mask))
        return x + self.dropout(self.fall(self.dropout(F.gelu(self.rise(self.norm2(x))))))


class SequenceEncoder(nn.Module):
    """A class for a sequence of tokens, or for two of them: learned positions, blocks, pooling and a classifier.

    Args:
        size: How large it is, and which mechanism it has.
        symbols: Kinds of tokens, from 1 on; 0 is padding.
        length: The longest sequence.
        num_classes: Classes.
        pairs: Whether two sequences are judged together. One encoder reads both.
        dropout: After the embedding and inside of blocks.

    Example:
        >>> import torch
        >>> from affinear.models.sequence import SequenceEncoder, size_of
        >>> encoder = SequenceEncoder(size_of("sequence_small", {"mechanism": "mala"}), 15, 100, 10)
        >>> encoder(torch.randint(1, 16, (2, 100)), torch.tensor([100, 60])).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        size: EncoderSize,
        symbols: int,
        length: int,
        num_classes: int,
        *,
        pairs: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.size, self.length, self.pairs, self.checkpointing = size, length, pairs, False
        self.tokens = nn.Embedding(symbols + 1, size.width)
        self.positions = nn.Parameter(torch.empty(length, size.width))
        self.cls = nn.Parameter(torch.zeros(size.width)) if size.pooling == "cls" else None
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(SequenceBlock(size, dropout) for _ in range(size.depth))
        self.norm = nn.LayerNorm(size.width)
        parts = (4 if size.match == "four" else 2) if pairs else 1
        self.head = nn.Sequential(
            nn.Linear(parts * size.width, size.hidden), nn.GELU(), nn.Linear(size.hidden, num_classes)
        )
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def no_weight_decay(self) -> set[str]:
        """What no optimizer shall shrink."""
        return {"positions", "cls", "tokens.weight"}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute what blocks hold anew in the backward pass, or not."""
        self.checkpointing = enable

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits (B, classes).

        Args:
            tokens: (B, N), integers; of pairs (B, 2, N).
            lengths: How many of each row are tokens, (B,) or (B, 2); None if all are.
        """
        if tokens.shape[-1] > self.length:
            raise ValueError(f"tokens: expected at most {self.length} in a row, got {tokens.shape[-1]}; cut them off")
        if not self.pairs:
            return self.head(self.pooled(tokens, lengths))
        if tokens.ndim != 3 or tokens.shape[1] != 2:
            raise ValueError(f"tokens: expected pairs, (B, 2, N), got {tuple(tokens.shape)}")
        rows = None if lengths is None else lengths.flatten()
        one, other = self.pooled(tokens.flatten(0, 1), rows).unflatten(0, (-1, 2)).unbind(1)
        both = [one, other] if self.size.match == "two" else [one, other, one * other, one - other]
        return self.head(torch.cat(both, dim=-1))

    def pooled(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        """A vector (B, C) for each row of tokens (B, N); what is beyond its length has no part in it."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        mask = None
        if lengths is not None:
            mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        if self.cls is not None:
            x = torch.cat((self.cls.expand(len(x), 1, -1), x), dim=1)
            mask = None if mask is None else F.pad(mask, (1, 0), value=True)
        x = self.dropout(x)
        for block in self.blocks:
            if self.checkpointing and self.training:
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
            assert isinstance(x, Tensor)
        x = self.norm(x)
        return x[:, 0] if self.cls is not None else masked_mean(x, mask)


def numbers_of(size: EncoderSize, symbols: int, length: int, num_classes: int, pairs: bool = False) -> int:
    """How many numbers an encoder would have, found without memory."""
    with torch.device("meta"):
        outline = SequenceEncoder(size, symbols, length, num_classes, pairs=pairs)
    return sum(math.prod(parameter.shape) for parameter in outline.parameters())

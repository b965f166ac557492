"""A causal language model of any family, fed with rows of packed documents, none of which sees its neighbour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .shapes import PACKED, POSITIONS, ROWS, shape_of

IGNORED = -100
CHUNK = 2048  # tokens whose logits are in memory at once
GROUPS = 4  # of documents of like lengths, where each has a row of its own


class LanguageNetwork(nn.Module):
    """What is trained: a model of transformers' kind, and how documents are kept apart in it.

    Args:
        model: A causal language model: ours, or one of transformers' or fla's.
        apart: "packed", "positions" or "rows".
    """

    def __init__(self, model: Any, apart: str) -> None:
        super().__init__()
        self.model, self.apart = model, apart

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute what layers hold anew in the backward pass, or not."""
        if enable:
            self.model.gradient_checkpointing_enable()
        else:
            self.model.gradient_checkpointing_disable()

    def forward(
        self, tokens: Tensor, targets: Tensor, fresh: Tensor | None, each: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """How surprising the targets are.

        Args:
            tokens: (B, N), int64.
            targets: (B, N), int64, what each token should foretell; -100 for nothing.
            fresh: (B, N), True where a document begins; None if each row is one.
            each: Whether to tell the loss of every target, and whether it was the likeliest token.

        Returns:
            The mean loss in nats; or losses (B, N), zero where there is no target, and (B, N), boolean.
        """
        hidden, weight = self.hidden(tokens, fresh), self.model.get_output_embeddings().weight
        if each:
            return judged(hidden, weight, targets)
        from ...models.language import chunked_cross_entropy

        return chunked_cross_entropy(hidden, weight, targets, chunk=CHUNK)

    def hidden(self, tokens: Tensor, fresh: Tensor | None) -> Tensor:
        """What the model makes of tokens, (B, N, C)."""
        if fresh is None:
            return self._called(tokens)
        fresh = fresh.clone()
        fresh[:, 0] = True
        if self.apart == POSITIONS:
            return self._called(tokens, position_ids=positions(fresh))
        if self.apart == PACKED:
            starts = fresh.flatten().nonzero().flatten()
            ends = F.pad(starts, (0, 1), value=fresh.numel()).int()
            return self._called(tokens.reshape(1, -1), cu_seqlens=ends).unflatten(1, tokens.shape)[0]
        return self._in_rows(tokens, fresh)

    def _called(self, tokens: Tensor, **given: Tensor) -> Tensor:
        out: Any = self.model.base_model(tokens, use_cache=False, **given)
        return out[0]

    def _in_rows(self, tokens: Tensor, fresh: Tensor) -> Tensor:
        """Every document in a row of its own, padded behind, where a causal model does not look; like ones together."""
        flat, starts = tokens.flatten(), fresh.flatten().nonzero().flatten()
        lengths = F.pad(starts, (0, 1), value=len(flat)).diff()
        pieces: list[Tensor] = []
        places: list[Tensor] = []
        for part in lengths.argsort().tensor_split(min(GROUPS, len(starts))):
            count = torch.arange(int(lengths[part].max()), device=flat.device)
            there, place = count < lengths[part, None], starts[part, None] + count
            hidden = self._called(flat[place.clamp(max=len(flat) - 1)].masked_fill(~there, 0))
            pieces.append(hidden[there])
            places.append(place[there])
        return torch.cat(pieces)[torch.cat(places).argsort()].unflatten(0, tokens.shape)


def positions(fresh: Tensor) -> Tensor:
    """How many tokens of its document stand before each, (B, N), int64, of where documents begin.

    Examples:
        >>> positions(torch.tensor([[True, False, True, False, False]])).tolist()
        [[0, 1, 0, 1, 2]]
    """
    count = torch.arange(fresh.shape[1], device=fresh.device).expand_as(fresh)
    return count - torch.where(fresh, count, 0).cummax(dim=1).values


@torch.no_grad()
def judged(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of every target (B, N), and whether it is the likeliest token; some logits at a time."""
    flat, wanted = hidden.flatten(0, 1), targets.flatten()
    losses, right = (
        torch.zeros(len(flat), device=flat.device),
        torch.zeros(len(flat), dtype=torch.bool, device=flat.device),
    )
    for first in range(0, len(flat), CHUNK):
        part = slice(first, first + CHUNK)
        logits = F.linear(flat[part], weight.to(flat.dtype)).float()
        losses[part] = F.cross_entropy(logits, wanted[part], ignore_index=IGNORED, reduction="none")
        right[part] = logits.argmax(-1) == wanted[part]
    return losses.view_as(targets), right.view_as(targets)


def _apart(model: Any, apart: str) -> str:
    """How documents are kept apart: packed softmax would weigh every token of a batch against every other."""
    types: Any = getattr(model.config, "layer_types", None) or ()
    return ROWS if apart == PACKED and "full_attention" in types else apart


def made(model: str, given: Mapping[str, Any], facts: Mapping[str, Any], room: int) -> LanguageNetwork:
    """The network of a name, with fresh weights.

    Args:
        model: One of `SHAPES`.
        given: Fields of its configuration.
        facts: Of the data: `vocabulary` and `end`.
        room: How many numbers its weights may have together.

    Raises:
        ValueError: If it cannot be made, or would be too large.
    """
    family, fields = shape_of(model, given)
    end = int(facts["end"])
    whole = {
        **fields,
        "vocab_size": int(facts["vocabulary"]),
        "eos_token_id": end,
        "bos_token_id": end,
        "pad_token_id": None,  # a token called padding would not learn, and every document begins with `end`
    }
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            outline = family.make(whole)
        numbers = sum(weight.numel() for weight in outline.parameters())
        if numbers > room:
            raise ValueError(f"{model} would have {numbers:,} numbers, and there is room for {room:,}")
        language = family.make(whole)
        return LanguageNetwork(language, _apart(language, family.apart))
    except ImportError as error:
        raise ValueError(f"model: {model} cannot be imported ({str(error).splitlines()[0][:120]})") from None
    except Exception as error:  # constructors of others raise whatever comes up
        said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(f"model_args: {said}") from None

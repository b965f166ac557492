"""What a model may be told: whether tokens, and a tokenizer, are of its vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.tracing import is_compiling


def check_length(input_ids: Tensor) -> None:
    """Raise ValueError for a prompt of no tokens, or one that is no batch of whole numbers."""
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids: expected (B, N), got {tuple(input_ids.shape)}; one text is a batch of one")
    if not input_ids.shape[1]:
        raise ValueError("input_ids: expected a prompt of at least one token, got none; begin with the bos token")
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"input_ids: expected tokens in int64, got {input_ids.dtype}; cast them")


def check_tokens(input_ids: Tensor, vocabulary: int, *, training: bool) -> None:
    """Raise ValueError for a prompt of no tokens, or tokens that are not of the vocabulary.

    On a GPU numbers are looked at where that costs little: in prompts, not in training, nor a token at a time.
    """
    check_length(input_ids)
    if is_compiling() or input_ids.is_meta:
        return
    if input_ids.device.type == "cpu" or (not training and input_ids.shape[1] > 1):
        smallest, largest = (int(x) for x in input_ids.aminmax())
        if smallest < 0 or largest >= vocabulary:
            raise ValueError(
                f"input_ids: expected tokens 0 to {vocabulary - 1}, got {smallest if smallest < 0 else largest}; the "
                "tokenizer is of another vocabulary"
            )


def check_tokenizer(tokenizer: Any, vocabulary: int) -> None:
    """Raise ValueError unless every token of a tokenizer is one of a model's.

    Args:
        tokenizer: Of transformers.
        vocabulary: `config.vocab_size` of the model.

    Example:
        >>> from affinear.models.language.tokens import check_tokenizer
        >>> check_tokenizer(range(100), 128)  # whatever has a length; unused rows do no harm
    """
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"tokenizer: expected at most the {vocabulary} tokens of the model, got {len(tokenizer)}; "
            "it was made for another vocabulary"
        )

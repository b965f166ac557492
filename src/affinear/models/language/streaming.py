"""Text as it comes: a prompt read in pieces, then one token after the other, in constant memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..letters import whole_letters
from .cache import AffinearCache
from .causal_lm import AffinearForCausalLM
from .stepper import Stepper, why_not
from .tokens import check_length, check_tokenizer

PIECE = 4096  # tokens of a prompt that are read together


def stream(
    model: AffinearForCausalLM,
    tokenizer: Any,
    prompt: str,
    *,
    cache: AffinearCache | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[str]:
    """Pieces of the text that goes on from a prompt, each as soon as it is known.

    Nothing grows but the keys of softmax layers: a model of linear layers goes on for ever in the memory it began with.

    Args:
        model: In evaluation mode.
        tokenizer: Of transformers, and of the model's vocabulary.
        prompt: What to go on from.
        cache: What came before the prompt; it learns the prompt and what is said. None for a start.
        max_new_tokens: When to stop at the latest; None for when the model ends its text, if ever.
        temperature: 0 for the likeliest token, higher for more surprising ones.
        top_k: Of how many of the likeliest tokens to choose; None for all.
        generator: Where chance comes from.

    Yields:
        Text without the prompt, never half a letter.

    Raises:
        ValueError: For a prompt of no tokens, or a tokenizer of another vocabulary.

    Example:
        >>> from affinear.models.language import stream
        >>> def answer(model, tokenizer, question):
        ...     for piece in stream(model, tokenizer, question, max_new_tokens=200):
        ...         print(piece, end="", flush=True)
    """
    check_tokenizer(tokenizer, model.config.vocab_size)
    ids: list[int] = tokenizer(prompt)["input_ids"]
    tokens = torch.tensor([ids], dtype=torch.long, device=model.device)
    said = stream_tokens(
        model, tokens, cache=cache, max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k,
        generator=generator,
    )  # fmt: skip
    return whole_letters((int(token) for token in said), partial(tokenizer.decode, skip_special_tokens=True))


def stream_tokens(
    model: AffinearForCausalLM,
    input_ids: Tensor,
    *,
    cache: AffinearCache | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """The tokens that `stream` spells, one (1,) at a time, after `input_ids`, (1, N). The end's token is the last."""
    check_length(input_ids)
    if input_ids.shape[0] != 1:
        raise ValueError(f"input_ids: expected one text, got {input_ids.shape[0]}; call generate for a batch")
    cache = AffinearCache(model.config) if cache is None else cache
    ends = _ends(model)
    with torch.no_grad():
        logits = read(model, input_ids, cache)
        step = Stepper(model, cache) if model.device.type == "cuda" and why_not(model) is None else None
        said = 0
        while max_new_tokens is None or said < max_new_tokens:
            token = _chosen(logits, temperature, top_k, generator)
            yield token
            said += 1
            if int(token) in ends or said == max_new_tokens:
                return
            logits = read(model, token[None], cache) if step is None else step(token)


@torch.no_grad()
def read(model: AffinearForCausalLM, input_ids: Tensor, cache: AffinearCache, piece: int = PIECE) -> Tensor:
    """Let a cache learn a text of any length, a piece at a time.

    Args:
        model: In evaluation mode.
        input_ids: (B, N), what comes next.
        cache: What came before; it learns these tokens.
        piece: Tokens to read together.

    Returns:
        (B, V), logits of what comes after them.

    Example:
        >>> import tempfile, torch
        >>> from affinear.models.language import AffinearCache, AffinearForCausalLM, preset, read
        >>> model = AffinearForCausalLM(preset("small", vocab_size=100, num_hidden_layers=1)).eval()
        >>> cache = AffinearCache(model.config)
        >>> logits = read(model, torch.randint(100, (1, 1000)), cache, piece=256)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = cache.save(f"{folder}/book.safetensors", model)
        ...     again = AffinearCache.load(path, model)
        >>> again.get_seq_length()
        1000
    """
    check_length(input_ids)
    *earlier, last = input_ids.split(piece, dim=1)
    for part in earlier:
        model.model(part, past_key_values=cache)
    return model(last, past_key_values=cache, logits_to_keep=1, return_dict=True).logits[:, -1]


def _chosen(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """The next token, (1,)."""
    if not temperature:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def _ends(model: AffinearForCausalLM) -> frozenset[int]:
    config = getattr(model, "generation_config", None) or model.config
    end = getattr(config, "eos_token_id", None)
    return frozenset() if end is None else frozenset(end if isinstance(end, list) else [end])

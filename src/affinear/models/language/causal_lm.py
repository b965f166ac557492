"""The decoder with its head: losses, logits, and what transformers' `generate` needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from ...ops.precision import widen
from .cache import AffinearCache
from .config import AffinearConfig
from .loss import IGNORED, chunked_cross_entropy
from .model import AffinearModel, AffinearPreTrainedModel
from .places import documents
from .share import Share, share_of
from .tokens import check_length

MADE = "_is_hf_initialized"  # transformers' mark on modules whose weights are not to be drawn anew


class Head(nn.Linear):
    """From tokens to logits, or, with targets, to the loss of each, without all logits in memory."""

    def forward(self, input: Tensor, targets: Tensor | None = None, chunk: int = 2048) -> Tensor:
        """Logits (..., V), or losses (...), zero where a target is -100."""
        if targets is None:
            return super().forward(input)
        return chunked_cross_entropy(input, self.weight, targets, chunk=chunk, reduction="none")


class AffinearForCausalLM(AffinearPreTrainedModel, GenerationMixin):
    """A causal language model: the decoder and its head.

    Args:
        config: Its shape.

    Example:
        >>> import torch
        >>> from affinear.models.language import AffinearForCausalLM, preset
        >>> model = AffinearForCausalLM(preset("small", vocab_size=100, num_hidden_layers=1))
        >>> tokens = torch.randint(100, (1, 30))
        >>> model(tokens, labels=tokens, cu_seqlens=torch.tensor([0, 10, 30])).loss.shape  # two documents
        torch.Size([])
        >>> model.eval().generate(tokens, max_new_tokens=5, do_sample=False).shape
        torch.Size([1, 35])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    accepts_loss_kwargs = True  # Trainer: it may tell how many targets a batch has over all its parts

    def __init__(self, config: AffinearConfig) -> None:
        super().__init__(config)
        self.model = AffinearModel(config)
        self.lm_head: nn.Module = Head(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: AffinearCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the next tokens, or the loss of having to foretell `labels`.

        Args:
            input_ids: (B, N), int64.
            attention_mask: As `AffinearModel` has it, like all that is not named here.
            position_ids: The same.
            past_key_values: The same.
            inputs_embeds: The same.
            labels: (B, N), the tokens themselves, -100 where one is not to be foretold. They are shifted here; the last
                token of a document foretells none.
            use_cache: The same.
            output_hidden_states: The same.
            output_attentions: The same.
            return_dict: False for a plain tuple; None for the configuration's word.
            logits_to_keep: Of how many of the latest tokens to make logits, 0 for all, or which tokens, (K,). None is
                all, but none beside a loss: those of a long text would not fit into memory.
            cu_seqlens: Where packed documents begin.
            num_items_in_batch: What to divide the sum of losses by; None for the number of targets.
            shift_labels: (B, N), what each token should foretell, shifted already, in place of `labels`: how trainers
                that cut texts into pieces tell the token after a piece.

        Returns:
            `loss` and `logits`, either of which may be None, `past_key_values` and `hidden_states`.

        Raises:
            ValueError: If the arguments do not fit.
        """
        context = self.model.context
        wanted = labels if shift_labels is None else shift_labels
        if wanted is not None and cu_seqlens is None and past_key_values is None and context is None:
            mask = None if attention_mask is None else attention_mask.bool()
            cu_seqlens = documents(wanted, position_ids, mask)
        out = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache,
            output_hidden_states, output_attentions, return_dict=True, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        assert isinstance(out, BaseModelOutputWithPast)
        hidden = out.last_hidden_state
        assert hidden is not None
        loss: Any = None
        if wanted is not None:
            share = None if context is None else share_of(wanted, context, 0)
            targets = shifted(wanted, cu_seqlens, share) if shift_labels is None else shift_labels
            total = self._losses(hidden, targets).sum()
            count: Any = (targets != IGNORED).sum()
            if share is not None:  # the loss of the whole text, on every rank
                total, count = share.sum(total), share.sum(count)
            loss = total / (count if num_items_in_batch is None else num_items_in_batch)
        logits = None
        if wanted is None or logits_to_keep is not None:
            logits = self.lm_head(_latest(hidden, logits_to_keep))
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )
        plain = not self.config.return_dict if return_dict is None else not return_dict
        return result.to_tuple() if plain else result

    @torch.no_grad()
    def token_losses(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """How surprising each token is after those before it, (B, N) in nats; NaN where nothing comes before it.

        Args:
            input_ids: (B, N), int64.
            attention_mask: (B, N), 0 where there is padding.
            cu_seqlens: Where packed documents begin.

        Example:
            >>> import torch
            >>> from affinear.models.language import AffinearForCausalLM, preset
            >>> model = AffinearForCausalLM(preset("small", vocab_size=100, num_hidden_layers=1)).eval()
            >>> losses = model.token_losses(torch.randint(100, (1, 8)), cu_seqlens=torch.tensor([0, 3, 8]))
            >>> losses.isnan().tolist()
            [[True, False, False, True, False, False, False, False]]
        """
        if self.model.context is not None:
            raise ValueError("model: expected one on one device to tell the losses of tokens, got one over a mesh")
        out = self.model(input_ids, attention_mask, use_cache=False, return_dict=True, cu_seqlens=cu_seqlens)
        there = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        targets = shifted(input_ids.masked_fill(~there, IGNORED), cu_seqlens).masked_fill(~there, IGNORED)
        losses = self._losses(out.last_hidden_state, targets)
        losses = losses.masked_fill(targets == IGNORED, torch.nan)
        return torch.cat((torch.full_like(losses[:, :1], torch.nan), losses[:, :-1]), dim=1)

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The loss of each token (B, N), zero where the target is -100."""
        if isinstance(self.lm_head, Head):  # called, not read: FSDP gathers its weights then
            return self.lm_head(hidden, targets, self.config.loss_chunk)
        logits: Tensor = self.lm_head(hidden)  # a head that somebody put there, such as an adapter of peft
        losses = F.cross_entropy(widen(logits).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
        return losses.view_as(targets)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Put another head there; transformers does so when the vocabulary is resized."""
        if type(new_embeddings) is nn.Linear and "bias" not in dict(new_embeddings.named_parameters()):
            head = Head(1, 1, bias=False, device="meta")
            head.in_features, head.out_features = new_embeddings.in_features, new_embeddings.out_features
            head.weight = new_embeddings.weight
            if getattr(new_embeddings, MADE, False):
                setattr(head, MADE, True)
            new_embeddings = head
        self.lm_head = new_embeddings

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """The `generate` of transformers, from a state: any length in constant memory.

        Args:
            inputs: (B, N), prompts, padded on the left. After a cache: the whole text, or new tokens alone with
                `attention_mask=cache.mask_with(input_ids)`.
            args: As transformers has them.
            kwargs: The same, but for `cache_implementation` and assistants, which a state has no use for.

        Returns:
            What transformers returns.

        Raises:
            ValueError: For a prompt of no tokens, tokens that would be taken for others, or what transformers refuses.
        """
        tokens = kwargs.get("input_ids") if inputs is None else inputs
        if tokens is not None:
            _check_prompt(tokens, kwargs.get("past_key_values"), kwargs.get("attention_mask"))
        return super().generate(inputs, *args, **kwargs)  # pyright: ignore

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """How transformers asks whether a cache of keys, plain or quantized, would do."""
        return False

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """A cache of states for `generate`, which would make one of keys."""
        given = model_kwargs.get("past_key_values")
        kind = generation_config.cache_implementation
        if kind is not None:
            raise ValueError(
                f"cache_implementation: expected None, as a state is the cache, got {kind!r}; leave it out"
            )
        if generation_config.prefill_chunk_size is not None and model_kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "prefill_chunk_size: expected None beside inputs_embeds, which transformers reads at once; leave it "
                "out, or give input_ids"
            )
        if given is not None or generation_config.use_cache is False:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # pyright: ignore
        else:
            model_kwargs["past_key_values"] = AffinearCache(self.config)


def shifted(labels: Tensor, cu_seqlens: Tensor | None, share: Share | None = None) -> Tensor:
    """What each token should foretell, (B, N): its successor's label, -100 at the end of a document."""
    end = labels.new_full((labels.shape[0], 1), IGNORED) if share is None else share.first_after(labels)
    targets = torch.cat((labels[:, 1:], end), dim=1)
    if cu_seqlens is None:
        return targets
    after = torch.arange(1, labels.shape[1] + 1, device=labels.device) + (0 if share is None else share.start)
    return targets.masked_fill(torch.isin(after, cu_seqlens.long()), IGNORED)


def _latest(hidden: Tensor, keep: int | Tensor | None) -> Tensor:
    """The tokens (B, K, C) that logits are wanted of."""
    if isinstance(keep, Tensor):
        return hidden[:, keep]
    return hidden[:, -keep:] if keep else hidden


def _check_prompt(tokens: Tensor, cache: Any, attention_mask: Tensor | None) -> None:
    """Raise ValueError for no tokens, and where `generate` would take new ones for the beginning of the text."""
    check_length(tokens)
    seen = cache.get_seq_length() if isinstance(cache, AffinearCache) else 0
    told = tokens.shape[1] if attention_mask is None else attention_mask.shape[1]
    if seen and told <= seen:
        raise ValueError(
            f"input_ids: expected the whole text, from the beginning, after a cache of {seen} tokens, got {told}; for "
            "new tokens alone pass attention_mask=cache.mask_with(input_ids)"
        )

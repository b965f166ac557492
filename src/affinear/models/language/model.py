"""The decoder without its head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast

from .blocks import AffinearBlock
from .cache import AffinearCache
from .config import AffinearConfig
from .convolution import ShortConvolution, fresh
from .places import Places, place
from .share import Share, share_of
from .tokens import check_tokens


class AffinearPreTrainedModel(PreTrainedModel):
    """What transformers has to know of all our models."""

    config_class = AffinearConfig
    config: AffinearConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["AffinearBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True  # no assistant: a state cannot take tokens back

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ShortConvolution):
            init.copy_(module.weight, fresh(*module.weight.shape).to(module.weight.device))
        else:
            super()._init_weights(module)


class AffinearModel(AffinearPreTrainedModel):
    """Embedding, layers and a norm.

    Args:
        config: Its shape.

    Example:
        >>> import torch
        >>> from affinear.models.language import AffinearModel, preset
        >>> model = AffinearModel(preset("small", vocab_size=100, num_hidden_layers=1))
        >>> model(torch.randint(100, (2, 30))).last_hidden_state.shape
        torch.Size([2, 30, 256])
    """

    def __init__(self, config: AffinearConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(AffinearBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.context: dist.ProcessGroup | None = None  # whose ranks each have some of the tokens; see `parallelize`
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: AffinearCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """What the decoder makes of tokens.

        Args:
            input_ids: (B, N), int64.
            attention_mask: (B, N), or (B, seen + N) after a cache; 0 where there is padding.
            position_ids: As transformers' tools pass them: counting up, or, for packed documents in a batch of one,
                beginning anew with each. Positions are columns otherwise, as rotary positions are relative.
            past_key_values: What came before.
            inputs_embeds: (B, N, C), in place of `input_ids`.
            use_cache: Whether to return a cache; None for the configuration's word outside training.
            output_hidden_states: Whether to return the tokens between all layers; None for the configuration's word.
            output_attentions: Not served: linear attention has no such matrix.
            return_dict: False for a plain tuple; None for the configuration's word.
            cu_seqlens: (S + 1,), int32 or int64. Where each of S documents in a batch of one begins, up to N: none sees
                its neighbour.

        Returns:
            The tokens after the last norm, the cache, and the tokens between layers if asked for.

        Raises:
            ValueError: If the arguments do not fit.
        """
        config = self.config
        if config.output_attentions if output_attentions is None else output_attentions:
            raise ValueError(
                "output_attentions: expected False, as linear attention never makes its weights; "
                "affinear.weights shows those of queries and keys"
            )
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "input_ids: expected either input_ids or inputs_embeds, got "
                + ("neither" if input_ids is None else "both")
            )
        share = self._share(input_ids if inputs_embeds is None else inputs_embeds, past_key_values, use_cache)
        x = inputs_embeds
        if x is None:
            assert input_ids is not None
            check_tokens(input_ids, self.config.vocab_size, training=self.training)
            x = self.embed_tokens(input_ids)
        assert x is not None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and cu_seqlens is None and share is None
        cache = self._cache(past_key_values, use_cache)
        places = self._places(x, attention_mask, position_ids, cu_seqlens, cache, share)
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        between: list[Any] | None = [x] if output_hidden_states else None
        for layer in self.layers:
            x = layer(x, places, past_key_values=cache)
            if between is not None:
                between.append(x)
        x = self.norm(x)
        if between is not None:
            between[-1] = x
        out = BaseModelOutputWithPast(
            last_hidden_state=x, past_key_values=cache, hidden_states=None if between is None else tuple(between)
        )
        plain = not config.return_dict if return_dict is None else not return_dict
        return out.to_tuple() if plain else out

    def _share(self, tokens: Any, given: AffinearCache | None, use_cache: bool | None) -> Share | None:
        """What of the text this rank has, where that lies over a mesh."""
        if self.context is None:
            return None
        if given is not None or use_cache:
            raise ValueError(
                "use_cache: expected False over a mesh, whose ranks have no text of their own; leave it out"
            )
        return share_of(tokens, self.context, self.config.conv_size - 1)

    def _cache(self, given: AffinearCache | None, use_cache: bool) -> AffinearCache | None:
        """The cache to fill: the one given, a new one, or none."""
        if given is None:
            kept = use_cache and not (self.gradient_checkpointing and self.training)
            return AffinearCache(self.config) if kept else None
        if not isinstance(given, AffinearCache):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"past_key_values: expected an AffinearCache, got {type(given).__name__}; leave it out, or "
                "take the one that this model returned"
            )
        given.check_fits(self.config)
        return given

    def _places(
        self,
        x: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: AffinearCache | None,
        share: Share | None,
    ) -> Places:
        places = place(
            x,
            head_width=self.config.head_width,
            rope_theta=self.config.rope_theta,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            seen=0 if cache is None else cache.get_seq_length(),
            share=share,
        )
        if cache is None:
            return places
        if places.cu_seqlens is not None:
            raise ValueError("cu_seqlens: expected use_cache=False beside packed documents, as a cache is of one text")
        whole = cache.extend_mask(places.key_mask, x.shape[0], x.shape[1], x.device)
        return replace(places, whole_mask=whole)

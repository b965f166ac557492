"""A layer of the decoder: attention and SwiGLU, each after a norm and added to the tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import CausalAttention
from .cache import AffinearCache, KeysLayer, StateLayer
from .config import AffinearConfig
from .places import Places


class SwiGLU(nn.Module):
    """Two linear layers, one of them the gate of the other, and a third back to the width of a token."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C) to tokens."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class AffinearBlock(GradientCheckpointingLayer):
    """A layer of the decoder.

    Args:
        config: Of the model.
        layer: Its number.
    """

    def __init__(self, config: AffinearConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = CausalAttention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor, places: Places, past_key_values: AffinearCache | None = None) -> Tensor:
        """Tokens (B, N, C) to tokens; the cache knows those before, and learns these."""
        kept = None
        if past_key_values is not None:
            kept = past_key_values.layers[self.layer]
            assert isinstance(kept, StateLayer | KeysLayer)
        x = x + self.self_attn(self.input_layernorm(x), places, kept)
        return x + self.mlp(self.post_attention_layernorm(x))

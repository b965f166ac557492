"""Small networks of three libraries, and the core that answers as softmax does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import transformers as hf
from torch import Tensor, nn

from affinear import ops
from affinear.linearizing import Choices, LinearCore


class SoftmaxCore(LinearCore):
    """Softmax where linear attention would be: a swapped network must then say what its teacher says."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        causal: bool = False,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        return ops.attention(query, key, value, "softmax", scale=scale, causal=causal, key_mask=key_mask)


def exact(model: nn.Module) -> nn.Module:
    """Put softmax into the swapped layers of a network."""
    for module in list(model.modules()):
        core = getattr(module, "linearized", None)
        if isinstance(core, LinearCore):
            module.linearized = SoftmaxCore(Choices("linear", bias=core.choices.bias))
    return model


VISION: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"depth": 2, "img_size": 64},
    "deit3_small_patch16_224": {"depth": 2, "img_size": 64},
    "swin_tiny_patch4_window7_224": {"depths": (2, 2), "embed_dim": 32, "num_heads": (2, 4), "img_size": 56},
    "eva02_tiny_patch14_224": {"depth": 2, "img_size": 56},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "beit_base_patch16_224": {"depth": 2, "embed_dim": 96, "num_heads": 4, "img_size": 64},
    "cait_xxs24_224": {"depth": 2, "img_size": 64, "init_values": 0.5},
    "vit_small_patch16_rope_224": {"depth": 2, "img_size": 64},
}


def vision(name: str) -> tuple[Any, Tensor]:
    """A network of timm with random weights, and images for it."""
    given: dict[str, Any] = {"num_classes": 7, **VISION[name]}
    model = timm.create_model(name, **given).eval()
    side = VISION[name].get("img_size", 64)
    return model, torch.randn(2, 3, side, side)


SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT: dict[str, Any] = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IMAGE: dict[str, Any] = {**SMALL, "image_size": 32, "patch_size": 8}


def _llama() -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, **TEXT, num_key_value_heads=2, max_position_embeddings=128))


def _gpt2() -> nn.Module:
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **TEXT))


def _bert() -> nn.Module:
    return hf.BertModel(hf.BertConfig(**SMALL, vocab_size=99))


def _vit() -> nn.Module:
    return hf.ViTForImageClassification(hf.ViTConfig(**IMAGE))


def _siglip() -> nn.Module:
    text = {**SMALL, **TEXT, "projection_size": 32}
    return hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=IMAGE))


def _whisper() -> nn.Module:
    sizes: dict[str, Any] = {
        f"{half}_{what}": number
        for half in ("encoder", "decoder")
        for what, number in {"layers": 2, "attention_heads": 4, "ffn_dim": 48}.items()
    }
    others: dict[str, Any] = {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 30}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **others, **TEXT, decoder_start_token_id=1))


def _ids() -> Tensor:
    return torch.randint(3, 99, (2, 12))


def _images() -> Tensor:
    return torch.randn(2, 3, 32, 32)


HUGGING: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], Callable[[Any], Tensor]]] = {
    "llama": (_llama, lambda: {"input_ids": _ids()}, lambda out: out.logits),
    "gpt2": (_gpt2, lambda: {"input_ids": _ids()}, lambda out: out.logits),
    "bert": (_bert, lambda: {"input_ids": _ids()}, lambda out: out.last_hidden_state),
    "vit": (_vit, lambda: {"pixel_values": _images()}, lambda out: out.logits),
    "siglip": (
        _siglip,
        lambda: {"input_ids": _ids(), "pixel_values": _images()},
        lambda out: torch.cat((out.text_embeds, out.image_embeds)),
    ),
    "whisper": (
        _whisper,
        lambda: {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": _ids()},
        lambda out: out.logits,
    ),
}


class Hugging:
    """A network of transformers with random weights, its inputs, and what is compared."""

    def __init__(self, name: str) -> None:
        make, inputs, read = HUGGING[name]
        self.name, self.inputs, self.read = name, inputs(), read
        self.model: Any = make().eval()

    def answer(self, model: Any, **others: Any) -> Tensor:
        return self.read(model(**{**self.inputs, **others}))


@pytest.fixture(params=list(HUGGING))
def hugging(request: pytest.FixtureRequest) -> Hugging:
    return Hugging(request.param)


@pytest.fixture(params=["llama", "gpt2"])
def decoder(request: pytest.FixtureRequest) -> Hugging:
    return Hugging(request.param)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def same_when_compiled(student: nn.Module, answer: Callable[[Any], Tensor], *, fullgraph: bool = False) -> None:
    """A network says the same compiled, and its weights get the same gradients."""
    torch.compiler.reset()

    def told(network: Any) -> tuple[Tensor, list[Tensor]]:
        student.zero_grad()
        out = answer(network)
        out.square().sum().backward()
        # What nobody asked for has no gradient, or, compiled, one of zeros.
        return out.detach(), [torch.zeros_like(p) if p.grad is None else p.grad for p in student.parameters()]

    plain, slopes = told(student)
    out, others = told(torch.compile(student, backend="aot_eager", fullgraph=fullgraph))
    assert distance(out, plain) < 1e-5
    for one, other in zip(slopes, others, strict=True):
        assert float((one - other).norm()) <= 1e-4 * float(one.norm()) + 1e-6

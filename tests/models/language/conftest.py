"""Small language models, each kind once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from affinear.models.language import AffinearConfig, AffinearForCausalLM

VOCABULARY = 37
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "mala": {"mechanism": "mala"},
    "nala with all parts": {
        "mechanism": "nala", "num_key_value_heads": 1, "qk_norm": True, "gate": True, "conv_size": 4,
    },
    "inline without positions": {"mechanism": "inline", "rope_theta": None},
    "hybrid": {"mechanism": "mala_released", "softmax_every": 2, "conv_size": 3},
    "softmax": {"mechanism": "softmax", "num_key_value_heads": 1},
}  # fmt: skip


def small(**changes: Any) -> AffinearConfig:
    """Two layers, two heads."""
    given: dict[str, Any] = dict(changes)
    for name, size in SIZES.items():
        given.setdefault(name, size)
    return AffinearConfig(**given)


def made(**changes: Any) -> AffinearForCausalLM:
    """A model that has opinions: fresh weights give every token nearly the same chance."""
    model = AffinearForCausalLM(small(**changes)).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.weight.mul_(4)
    return model


@pytest.fixture(params=KINDS, ids=lambda name: str(name).replace(" ", "_"))
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


@pytest.fixture
def model(kind: dict[str, Any]) -> AffinearForCausalLM:
    return made(**kind)

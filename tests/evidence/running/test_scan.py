"""The scan in products comes to what transformers comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("length", [24, 21, 5])
def test_a_model_says_the_same_and_learns_the_same(script: Any, length: int):
    config = transformers.Mamba2Config(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=6, num_heads=4, head_dim=8, n_groups=1,
        chunk_size=8,
    )  # fmt: skip
    model, tokens = transformers.Mamba2ForCausalLM(config).train(), torch.randint(50, (2, length))
    found: list[list[torch.Tensor]] = []
    for scanning in (False, True):
        model.zero_grad()
        if scanning:
            with script("running.scan").in_products():
                out = model(tokens, labels=tokens)
        else:
            out = model(tokens, labels=tokens)
        out.loss.backward()
        found.append([out.logits.detach(), *(one.grad.clone() for one in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_transformers_has_its_own_scan_back_afterwards(script: Any):
    from transformers.models.mamba2 import modeling_mamba2 as modeling

    theirs, scan = modeling.mamba2_chunk_scan, script("running.scan")
    with scan.in_products():
        assert modeling.mamba2_chunk_scan is scan.scan
    assert modeling.mamba2_chunk_scan is theirs

"""Language models on a GPU say what they say in float64 on a CPU, and take no more memory for a longer text."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from affinear.models.language import AffinearCache, AffinearConfig, AffinearForCausalLM, Stepper, read
from affinear.models.language.streaming import stream_tokens

from .conftest import DEVICE, SMALL

KINDS: dict[str, dict[str, Any]] = {
    "mala": {},
    "nala": {"mechanism": "nala", "num_key_value_heads": 1, "qk_norm": True, "gate": True, "conv_size": 4},
    "hybrid": {"softmax_every": 2, "conv_size": 3},
}
CUDA = torch.cuda.is_available()
LENGTH = 20 if SMALL else 700


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[AffinearForCausalLM, AffinearForCausalLM]:
    """A model in float32 on the GPU, and the same in float64 on the CPU."""
    config = AffinearConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        **KINDS[request.param],
    )  # fmt: skip
    model = AffinearForCausalLM(config).eval()
    exact = copy.deepcopy(model).double()
    return model.to(DEVICE), exact  # pyright: ignore


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(101, (batch, LENGTH))


def close(x: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(x.detach().cpu().double(), truth.detach(), rtol=1e-3, atol=1e-3)


def test_logits_loss_and_gradients(pair: tuple[AffinearForCausalLM, AffinearForCausalLM]):
    model, exact = pair
    text, starts = tokens(1), torch.tensor([0, 7, 8, LENGTH])
    close(model(text.to(DEVICE)).logits, exact(text).logits)
    for network, device in ((model, DEVICE), (exact, torch.device("cpu"))):
        network.train()(text.to(device), labels=text.to(device), cu_seqlens=starts.to(device)).loss.backward()
    for (name, x), y in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert x.grad is not None
        assert y.grad is not None
        assert (x.grad.cpu().double() - y.grad).norm() < 1e-3 * y.grad.norm(), name


def test_padded_prompts_and_steps(pair: tuple[AffinearForCausalLM, AffinearForCausalLM]):
    model, exact = pair
    text, mask = tokens(), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, : LENGTH // 3] = 0
    before = LENGTH - 6
    cache = AffinearCache(model.config)
    with torch.no_grad():
        truth = exact(text, attention_mask=mask).logits
        model(text[:, :before].to(DEVICE), attention_mask=mask[:, :before].to(DEVICE), past_key_values=cache)
        steps = [model(text[:, i : i + 1].to(DEVICE), past_key_values=cache).logits for i in range(before, LENGTH)]
    close(torch.cat(steps, dim=1), truth[:, before:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_takes_the_steps_that_the_model_takes(dtype: torch.dtype):
    config = AffinearConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, conv_size=3
    )
    model, text = AffinearForCausalLM(config).eval().to(DEVICE, dtype), tokens(3).to(DEVICE)  # pyright: ignore
    plain, stepped = AffinearCache(config), AffinearCache(config)
    for cache in (plain, stepped):
        read(model, text[:, :-8], cache)
    step = Stepper(model, stepped)
    for i in range(LENGTH - 8, LENGTH):
        wanted = read(model, text[:, i : i + 1], plain)
        torch.testing.assert_close(step(text[:, i]), wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)
    assert (step.graph is not None) == CUDA
    assert stepped.get_seq_length() == plain.get_seq_length() == LENGTH


@pytest.mark.alone
@pytest.mark.skipif(not CUDA, reason="memory is measured on a GPU")
def test_a_long_answer_takes_no_more_memory():
    config = AffinearConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2
    )
    model = AffinearForCausalLM(config).eval().to(DEVICE)  # pyright: ignore
    said = stream_tokens(model, tokens(1).to(DEVICE))
    list(itertools.islice(said, 50))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    list(itertools.islice(said, 2000))
    assert torch.cuda.max_memory_allocated() - before < 2**20


@pytest.mark.parametrize("beams", [1, 3])
def test_what_is_generated_is_what_recomputing_would_say(beams: int):
    config = AffinearConfig(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, conv_size=3
    )
    model, text = AffinearForCausalLM(config).eval().to(DEVICE), tokens().to(DEVICE)  # pyright: ignore
    told: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    kept, anew = (model.generate(text, **told, eos_token_id=None, use_cache=use) for use in (True, False))
    assert kept.shape == (2, LENGTH + 6)
    with torch.no_grad():  # equal but for ties, which rounding decides
        sums = [model(said).logits.log_softmax(-1)[:, LENGTH - 1 : -1] for said in (kept, anew)]
    likely = [x.gather(-1, said[:, LENGTH:, None]).sum(1) for x, said in zip(sums, (kept, anew), strict=True)]
    torch.testing.assert_close(likely[0], likely[1], rtol=1e-3, atol=1e-3)

"""The divergence of distributions, chunk by chunk, beside torch's own of whole logits in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from affinear.linearizing.divergence import chunked_divergence


def plain(hidden: Tensor, weight: Tensor, target: Tensor, labels: Tensor, by: tuple[float, float, float]) -> Tensor:
    there = labels.flatten() != -100
    given, wanted = (hidden @ weight.mT).flatten(0, 1)[there], target.flatten(0, 1)[there]
    log_q, log_p = (given / by[2]).log_softmax(-1), (wanted / by[2]).log_softmax(-1)
    loss = by[0] * by[2] ** 2 * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    return loss + by[1] * F.cross_entropy(given, labels.flatten()[there])


@pytest.mark.parametrize("by", [(1.0, 0.0, 1.0), (0.7, 0.3, 2.0), (0.0, 1.0, 1.0)])
@pytest.mark.parametrize("chunk", [3, 100])
def test_loss_and_gradients_are_those_of_whole_logits(by: tuple[float, float, float], chunk: int):
    hidden = torch.randn(2, 7, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(13, 5, dtype=torch.float64, requires_grad=True)
    target, head = torch.randn(2, 7, 8, dtype=torch.float64), torch.randn(13, 8, dtype=torch.float64)
    labels = torch.randint(13, (2, 7))
    labels[0, 2:4] = -100
    found = chunked_divergence(
        hidden, weight, target, head, labels, logits=by[0], label=by[1], temperature=by[2], chunk=chunk
    )
    expected = plain(hidden, weight, target @ head.mT, labels, by)
    torch.testing.assert_close(found, expected)
    ours = torch.autograd.grad(3 * found, (hidden, weight))
    theirs = torch.autograd.grad(3 * expected, (hidden, weight))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_rounds_logits_and_nothing_else():
    hidden, weight = torch.randn(1, 6, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    target, labels = torch.randn(1, 6, 16), torch.randint(40, (1, 6))
    exact = chunked_divergence(hidden, weight, target, weight, labels)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = chunked_divergence(hidden, weight, target, weight, labels)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
    rounded.backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_vocabularies_and_shapes_that_differ_are_told():
    hidden, labels = torch.randn(1, 4, 8), torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="one vocabulary, got 9 and 10"):
        chunked_divergence(hidden, torch.randn(9, 8), hidden, torch.randn(10, 8), labels)
    with pytest.raises(ValueError, match="hidden: expected features beside labels"):
        chunked_divergence(hidden[:, :3], torch.randn(9, 8), hidden, torch.randn(9, 8), labels)

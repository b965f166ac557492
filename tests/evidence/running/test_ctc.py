"""CTC's loss, and its gradient, are torch's, whatever lies behind the ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F


@pytest.fixture
def ctc(script: Any) -> Any:
    return script("running.ctc").ctc


@pytest.mark.parametrize("letters", [2, 30])  # few, so that many are doubled
def test_loss_and_gradient_are_torchs(ctc: Any, letters: int):
    batch, tokens, longest = 7, 40, 19
    logits = torch.randn(batch, tokens, letters + 1, dtype=torch.float64).mul(3).requires_grad_()
    pieces = torch.randint(1, letters + 1, (batch, longest))
    lengths = torch.randint(0, longest + 1, (batch,))
    lengths[0], lengths[1] = longest, 0
    counts = torch.randint(1, tokens + 1, (batch,))
    counts[0] = tokens
    counts[2] = 1
    weights = torch.rand(batch, dtype=torch.float64)
    theirs = F.ctc_loss(
        logits.log_softmax(-1).transpose(0, 1), pieces, counts, lengths, reduction="none", zero_infinity=True
    )
    (wanted,) = torch.autograd.grad((weights * theirs).sum(), logits)
    ours = ctc(logits.log_softmax(-1), counts, pieces, lengths)
    (found,) = torch.autograd.grad((weights * ours).sum(), logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


def test_in_single_precision_it_is_nearly_that_over_long_recordings(ctc: Any):
    logits = torch.randn(2, 304, 39).mul(4).requires_grad_()
    pieces, lengths, counts = torch.randint(1, 39, (2, 150)), torch.tensor([150, 90]), torch.tensor([304, 200])
    exact = logits.detach().double().requires_grad_()
    theirs = F.ctc_loss(exact.log_softmax(-1).transpose(0, 1), pieces, counts, lengths, reduction="none")
    theirs.sum().backward()
    ours = ctc(logits.log_softmax(-1), counts, pieces, lengths)
    ours.sum().backward()
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
    assert exact.grad is not None
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=0, atol=2e-3)


def test_what_cannot_be_said_costs_nothing_and_moves_nothing(ctc: Any):
    logits = torch.randn(1, 3, 4, requires_grad=True)
    loss = ctc(logits.log_softmax(-1), torch.tensor([3]), torch.tensor([[1, 1, 2]]), torch.tensor([3]))
    loss.sum().backward()
    assert loss.tolist() == [0.0]
    assert logits.grad is not None
    assert not logits.grad.any()

"""The loss in chunks is the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from affinear.models.language import chunked_cross_entropy


def drawn(dtype: torch.dtype = torch.float64, bias: bool = False) -> tuple[list[Tensor], Tensor]:
    """Tokens, weights and maybe a bias that need gradients, and targets, some of them ignored."""
    leaves = [torch.randn(3, 7, 5, dtype=dtype), torch.randn(11, 5, dtype=dtype)]
    leaves += [torch.randn(11, dtype=dtype)] if bias else []
    targets = torch.randint(11, (3, 7))
    targets[torch.rand(3, 7) < 0.3] = -100
    targets[0, 0] = 4
    return [x.requires_grad_() for x in leaves], targets


@pytest.mark.parametrize("chunk", [1, 4, 21, 100])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_is_torchs_own_and_so_are_its_gradients(chunk: int, bias: bool, reduction: Any):
    leaves, targets = drawn(bias=bias)
    given = leaves[2] if bias else None
    ours = chunked_cross_entropy(leaves[0], leaves[1], targets, bias=given, chunk=chunk, reduction=reduction)
    theirs = F.cross_entropy(
        F.linear(leaves[0], leaves[1], given).flatten(0, 1), targets.flatten(), reduction=reduction
    ).view_as(ours)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad((x * weights).sum(), leaves) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_only_what_is_asked_for_gets_a_gradient():
    leaves, targets = drawn()
    hidden = leaves[0].detach()
    chunked_cross_entropy(hidden, leaves[1], targets).backward()
    assert hidden.grad is None
    assert leaves[1].grad is not None


def test_half_precision_sums_in_single():
    hidden, weight = torch.randn(4000, 64).bfloat16(), (torch.randn(300, 64) / 8).bfloat16()
    targets = torch.randint(300, (4000,))
    truth = [x.double().requires_grad_() for x in (hidden, weight)]
    F.cross_entropy(truth[0] @ truth[1].T, targets).backward()
    leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
    loss = chunked_cross_entropy(leaves[0], leaves[1], targets, chunk=64)
    loss.backward()
    assert loss.dtype == torch.float32
    for ours, exact in zip(leaves, truth, strict=True):
        assert ours.grad is not None
        assert exact.grad is not None
        assert ours.grad.dtype == torch.bfloat16
        assert (ours.grad.double() - exact.grad).norm() < 0.02 * exact.grad.norm()


def test_autocast_casts_what_goes_in_and_nothing_else():
    leaves, targets = drawn(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = chunked_cross_entropy(leaves[0], leaves[1], targets)
    loss.backward()
    assert loss.dtype == leaves[1].grad.dtype == torch.float32  # pyright: ignore[reportOptionalMemberAccess]
    plain = chunked_cross_entropy(leaves[0].bfloat16(), leaves[1].bfloat16(), targets)
    torch.testing.assert_close(loss, plain)


def test_never_more_logits_than_a_chunk(monkeypatch: pytest.MonkeyPatch):
    from affinear.models.language import loss as module

    made: list[int] = []
    plain = module._logits

    def watched(*args: Any) -> Tensor:
        logits = plain(*args)
        made.append(logits.numel())
        return logits

    monkeypatch.setattr(module, "_logits", watched)
    leaves, targets = drawn()
    chunked_cross_entropy(leaves[0], leaves[1], targets, chunk=4).backward()
    assert len(made) == 12
    assert max(made) == 4 * 11


def test_shapes_alone_have_a_loss_and_gradients():
    hidden, weight = (torch.randn(7, 5, device="meta").requires_grad_() for _ in range(2))
    loss = chunked_cross_entropy(hidden, weight, torch.zeros(7, dtype=torch.long, device="meta"), chunk=3)
    loss.backward()
    assert loss.shape == ()
    assert hidden.grad is not None
    assert hidden.grad.is_meta


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"targets": torch.zeros(3, 6, dtype=torch.long)}, r"hidden: expected .* got \(3, 7, 5\), \(3, 6\)"),
        ({"targets": torch.full((3, 7), 11)}, "targets: expected tokens 0 to 10, or -100 where there is none, got 11"),
        ({"targets": torch.full((3, 7), -1)}, "targets: expected tokens 0 to 10, .* got -1"),
        ({"targets": torch.zeros(3, 7)}, "targets: expected tokens in int64, got torch.float32"),
        ({"chunk": 0}, "chunk: expected a positive number"),
        ({"reduction": "median"}, "reduction: expected 'mean', 'sum' or 'none', got 'median'"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], words: str):
    leaves, targets = drawn()
    given: dict[str, Any] = dict(changes)
    given.setdefault("targets", targets)
    with pytest.raises(ValueError, match=words):
        chunked_cross_entropy(leaves[0], leaves[1], **given)

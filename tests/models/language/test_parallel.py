"""A text over two processes, or three: logits, loss and gradients are those of one."""

from __future__ import annotations

import copy
import datetime
import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from affinear.models.parallel import cut, parallelize

from .conftest import VOCABULARY, made

PARTS: dict[str, Any] = {"mechanism": "nala", "num_key_value_heads": 1, "qk_norm": True, "gate": True, "conv_size": 4}
QUICK = [PARTS]
ALL = [PARTS, {"mechanism": "mala"}, {"mechanism": "inline", "rope_theta": None}, {"mechanism": "mala_released"}]
InRanks = Callable[[int, Callable[[], Any]], list[Any]]


def error(x: torch.Tensor, truth: torch.Tensor) -> float:
    return float((x - truth).norm() / truth.norm())


def compare(kind: dict[str, Any], mesh: Any, *, checkpoints: bool = False, way: str = "plain") -> dict[str, float]:
    """Errors of a rank's logits, of the loss, and of gradients averaged over ranks, beside one process."""
    whole = made(**kind).double()
    shared: Any = parallelize(copy.deepcopy(whole), mesh).train()
    if checkpoints:
        shared.gradient_checkpointing_enable()
    tokens = torch.randint(1, VOCABULARY, (1 if way == "packed" else 2, 29))
    told: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 3, 16, 16, 20, 29])} if way == "packed" else {}
    mask = torch.ones_like(tokens)
    mask[-1, :17] = 0  # more than the first rank has
    masks = (mask, cut(mask, shared, mesh)) if way == "padded" else (None, None)
    out = whole(tokens, attention_mask=masks[0], labels=tokens, logits_to_keep=0, use_cache=False, **told)
    out.loss.backward()
    piece = cut(tokens, shared, mesh)
    own = shared(piece, attention_mask=masks[1], labels=piece, logits_to_keep=0, **told)
    own.loss.backward()
    there = slice(None) if masks[1] is None else cut(mask, shared, mesh).bool()
    errors = {
        "logits": error(own.logits[there], cut(out.logits, shared, mesh)[there]),
        "loss": error(own.loss, out.loss),
    }
    for (name, x), y in zip(whole.named_parameters(), shared.parameters(), strict=True):
        assert x.grad is not None
        dist.all_reduce(y.grad)
        errors[name] = float((y.grad / dist.get_world_size() - x.grad).norm())
    return errors


def sharded(mesh: Any) -> dict[str, float]:
    """Errors of loss and gradients where the weights, too, lie over the ranks."""
    whole = made(tie_word_embeddings=False, conv_size=4).double()
    shared: Any = parallelize(copy.deepcopy(whole), mesh).train()
    for part in (*shared.model.layers, shared.lm_head, shared):
        fully_shard(part, mesh=mesh)
    tokens = torch.randint(1, VOCABULARY, (2, 23))
    out = whole(tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    piece = cut(tokens, whole, mesh)
    own = shared(piece, labels=piece)
    own.loss.backward()
    errors = {"loss": error(own.loss, out.loss)}
    for (name, x), y in zip(whole.named_parameters(), shared.parameters(), strict=True):
        assert x.grad is not None
        errors[name] = float((y.grad.full_tensor() - x.grad).norm())
    return errors


def refusals(mesh: Any) -> list[str]:
    shared: Any = parallelize(made(conv_size=4), mesh)
    calls: list[Callable[[], Any]] = [
        lambda: parallelize(shared, mesh),
        lambda: parallelize(made(softmax_every=2), mesh),
        lambda: shared(torch.ones(1, 2 + dist.get_rank(), dtype=torch.long)),
        lambda: shared(torch.ones(1, 5, dtype=torch.long), use_cache=True),
        lambda: shared.token_losses(torch.ones(1, 5, dtype=torch.long)),
    ]
    said: list[str] = []
    for call in calls:
        try:
            call()
        except ValueError as complaint:
            said.append(str(complaint))
    return said


def found(kinds: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    """What each rank finds."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("context",))
    torch.manual_seed(seed)
    results: dict[str, Any] = {"seed": seed, "refusals": refusals(mesh)}
    for i, kind in enumerate(kinds):
        for way in ("plain", "packed", "padded"):
            torch.manual_seed(seed + i)
            results[f"{kind} {way}"] = compare(kind, mesh, checkpoints=way == "packed", way=way)
    torch.manual_seed(seed)
    results["sharded"] = sharded(mesh)
    dist.destroy_process_group()
    return results


def judge(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        said = rank.pop("refusals")
        seed = rank.pop("seed")
        assert [sentence.split(":")[0] for sentence in said] == ["model", "model", "input_ids", "use_cache", "model"], (
            said
        )
        assert "layers.1.self_attn is softmax, which needs every key" in said[1]
        assert "expected at least 3 tokens on every rank of the mesh, got 2 on rank 0" in said[2]
        for name, errors in rank.items():
            wrong = {part: value for part, value in errors.items() if not value < 1e-9}
            assert wrong == {}, f"{name}, AFFINEAR_SEED={seed}"


def test_two_processes_share_a_text(in_ranks: InRanks):
    seed = secrets.randbits(32)
    judge(in_ranks(2, lambda: found(QUICK, seed)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [2, 3])
def test_processes_share_a_text_of_any_kind(in_ranks: InRanks, number: int):
    seed = secrets.randbits(32)
    judge(in_ranks(number, lambda: found(ALL, seed)))

"""Two processes over gloo: every rank summarizes its own tokens, one all-reduce makes the state of all of them.

Each answers with numbers, which the tests then judge.
"""

from __future__ import annotations

import datetime
import json
import os
import secrets
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import affinear as af
from affinear.ops import rotary_1d

BATCH, HEADS, WIDTH, VALUES = 2, 3, 4, 6
TOLERANCE = {"float64": 1e-12, "float32": 2e-6}

# Tokens of rank 0 and rank 1.
LENGTHS = {"even": (20, 20), "uneven": (7, 33), "one token": (1, 40), "nothing on rank 0": (0, 25), "nothing": (0, 0)}
MECHANISMS = ("mala", "inline", "nala", "mala_released")


def error(x: Tensor, truth: Tensor) -> float:
    """||x - truth|| / ||truth||; of a truth that vanishes, ||x||."""
    length = truth.norm().item()
    return (x - truth).norm().item() / (length or 1.0)


def compare(lengths: tuple[int, int], mechanism: str, dtype: torch.dtype, with_rotary: bool) -> dict[str, float]:
    """Errors of the merged state, of answers and of gradients against one process that holds everything."""
    rank, total = dist.get_rank(), sum(lengths)
    own = slice(0, lengths[0]) if rank == 0 else slice(lengths[0], total)
    # Every rank draws the same tokens and keeps its share.
    everything = [torch.randn(BATCH, total, HEADS, width, dtype=torch.float64) for width in (WIDTH, WIDTH, VALUES)]
    target = torch.randn(BATCH, total, HEADS, VALUES, dtype=torch.float64)
    rotary = rotary_1d(total, WIDTH) if with_rotary else None

    def answer(inputs: list[Tensor], piece: slice, reduced: bool) -> tuple[Tensor, af.State]:
        query, key, value = inputs
        tables = None if rotary is None else (rotary[0][piece], rotary[1][piece])
        state = af.summarize(key, value, mechanism, rotary=tables)
        state = state.all_reduce() if reduced else state
        return af.attend(query, state, rotary=tables), state

    mine = [x[:, own].to(dtype, copy=True).requires_grad_() for x in everything]
    out, state = answer(mine, own, reduced=True)
    (out * target[:, own]).sum().backward()

    alone = [x.to(dtype).double().requires_grad_() for x in everything]
    truth, whole = answer(alone, slice(0, total), reduced=False)
    (truth * target).sum().backward()

    errors = {"answer": error(out, truth[:, own])}
    for name in ("count", "key_mean", "value_mean", "covariance", *["rotated_key_mean"] * with_rotary):
        errors[name] = error(getattr(state, name).double(), getattr(whole, name).double())
    for name, x, x_alone in zip(("query", "key", "value"), mine, alone, strict=True):
        assert x.grad is not None
        assert x_alone.grad is not None
        # Measured by the gradient of all tokens: a rank may have none.
        length = x_alone.grad.norm().item() or 1.0
        errors[f"gradient of {name}"] = (x.grad - x_alone.grad[:, own]).norm().item() / length
    return errors


class Sent(TorchDispatchMode):
    """Counts the numbers of every message that leaves this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and "wait_tensor" not in func.name():
            self.numbers.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def numbers_sent(length: int, with_rotary: bool) -> int:
    """How many numbers one rank hands to `torch.distributed` for one all-reduce of a state."""
    key, value = torch.randn(BATCH, length, HEADS, WIDTH), torch.randn(BATCH, length, HEADS, VALUES)
    state = af.summarize(key, value, rotary=rotary_1d(length, WIDTH) if with_rotary else None)
    with Sent() as sent:
        state.all_reduce()
    return sum(sent.numbers)


def groups() -> dict[str, Any]:
    """What the members of a group of one, and of a group of all, get."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    together = dist.new_group([0, 1])
    assert isinstance(alone, dist.ProcessGroup)
    assert isinstance(together, dist.ProcessGroup)
    key, value = torch.randn(2, BATCH, 10, HEADS, WIDTH).unbind()
    state = af.summarize(key + dist.get_rank(), value)
    unchanged = state.all_reduce(alone)
    return {
        "error alone": max(
            error(getattr(unchanged, name), getattr(state, name)) for name in ("key_mean", "covariance")
        ),
        "count alone": unchanged.count[0, 0].item(),
        "count together": state.all_reduce(together).count[0, 0].item(),
        "error together": error(state.all_reduce(together).covariance, state.all_reduce().covariance),
        "state unchanged": state.count[0, 0].item() == 10,
    }


def same_everywhere() -> float:
    """The largest difference between what the two ranks hold after an all-reduce."""
    key, value = torch.randn(2, BATCH, 10 + dist.get_rank(), HEADS, WIDTH).unbind()
    covariance = af.summarize(key, value).all_reduce().covariance
    both = [torch.empty_like(covariance) for _ in range(2)]
    dist.all_gather(both, covariance)
    return (both[0] - both[1]).abs().max().item()


def scenarios() -> dict[str, Callable[[], Any]]:
    """Everything that both ranks do, in order, by name."""
    table: dict[str, Callable[[], Any]] = {}
    for mechanism in MECHANISMS:
        for name, lengths in LENGTHS.items():
            for dtype in (torch.float32, torch.float64):
                for with_rotary in (False, True):
                    key = json.dumps([mechanism, name, str(dtype).removeprefix("torch."), with_rotary])
                    arguments = (lengths, mechanism, dtype, with_rotary)
                    table[key] = lambda arguments=arguments: compare(*arguments)
    for with_rotary in (False, True):
        for length in (10, 1000):
            table[f"sent {length} {with_rotary}"] = lambda arguments=(length, with_rotary): numbers_sent(*arguments)
    return table | {"groups": groups, "difference": same_everywhere}


def work(seed: int) -> dict[str, Any]:
    """What each rank does."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    results: dict[str, Any] = {"seed": seed}
    for name, scenario in scenarios().items():
        torch.manual_seed(seed)
        results[name] = scenario()
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def ranks(in_ranks: Callable[..., list[Any]]) -> list[dict[str, Any]]:
    """What rank 0 and rank 1 found."""
    seed = int(os.environ.get("AFFINEAR_SEED", secrets.randbits(32)))
    return in_ranks(2, lambda: work(seed))


@pytest.mark.parametrize("with_rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_two_ranks_are_as_one(ranks: list[dict[str, Any]], mechanism: str, lengths: str, dtype: str, with_rotary: bool):
    for rank, results in enumerate(ranks):
        errors = results[json.dumps([mechanism, lengths, dtype, with_rotary])]
        assert errors["count"] == 0
        too_large = {name: number for name, number in errors.items() if not number <= TOLERANCE[dtype]}
        assert not too_large, f"rank {rank}, AFFINEAR_SEED={results['seed']}"


@pytest.mark.parametrize("with_rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("length", [10, 1000])
def test_what_travels_is_the_state_whatever_the_number_of_tokens(
    ranks: list[dict[str, Any]], length: int, with_rotary: bool
):
    per_head = WIDTH * VALUES + WIDTH + VALUES + 1 + WIDTH * with_rotary
    assert [results[f"sent {length} {with_rotary}"] for results in ranks] == [BATCH * HEADS * per_head] * 2


def test_a_group_merges_its_members_and_nobody_else(ranks: list[dict[str, Any]]):
    for results in ranks:
        assert results["groups"] == {
            "error alone": 0,
            "count alone": 10,
            "count together": 20,
            "error together": 0,
            "state unchanged": True,
        }


def test_every_rank_holds_the_same_state(ranks: list[dict[str, Any]]):
    assert [results["difference"] for results in ranks] == [0, 0]


def test_without_a_process_group_it_says_what_to_call():
    key, value = torch.randn(2, BATCH, 10, HEADS, WIDTH).unbind()
    with pytest.raises(ValueError, match=r"^group: expected .*initialised.*init_process_group"):
        af.summarize(key, value).all_reduce()

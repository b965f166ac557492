"""Four processes over gloo share the tokens of one call: answers, states and gradients are those of one process.

Each answers with numbers, which the tests then judge. `make test` has every mechanism, every layout of tokens over
ranks and every way to pack them; `make test-all` has them all with each other.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import affinear as af
from affinear.ops import rotary_1d
from affinear.ops.distributed import merging

InRanks = Callable[[int, Callable[[], Any]], list[Any]]
attention: Any = af.attention
summarize: Any = af.summarize
RANKS = 4
HEADS, KEY_HEADS, WIDTH, VALUES = 4, 2, 4, 6
TOLERANCE = {"float64": 1e-12, "float32": 5e-6}
LENGTHS = {
    "even": (8, 8, 8, 8),
    "uneven": (5, 17, 1, 9),
    "empty at the ends": (0, 11, 12, 0),
    "empty inside": (7, 0, 0, 9),
    "all on the last": (0, 0, 0, 13),
    "nothing": (0, 0, 0, 0),
    "two ranks": (9, 14),
}
# Offsets of sequences, as shares of all tokens: within ranks, over several, over all, and empty ones.
PACKED = {
    "across every boundary": (0, 0.1, 0.3, 0.3, 0.6, 0.9, 1),
    "one over all": (0, 1),
    "empty first and last": (0, 0, 1, 1),
    "many on one rank": (0, 0.01, 0.05, 0.1, 0.12, 0.9, 1),
}
MECHANISMS = tuple(name for name, rule in af.mechanisms().items() if rule.gain is not None)


def error(x: Tensor, truth: Tensor, length: float | None = None) -> float:
    """||x - truth|| / ||truth||, or beside another length; of a truth that vanishes, ||x||."""
    length = truth.norm().item() if length is None else length
    return (x - truth).norm().item() / (length or 1.0)


def own_part(lengths: tuple[int, ...]) -> slice:
    """Tokens of this rank."""
    start = sum(lengths[: dist.get_rank()])
    return slice(start, start + lengths[dist.get_rank()])


def compare(
    groups: dict[int, Any],
    lengths: tuple[int, ...],
    mechanism: str = "mala",
    *,
    causal: bool = False,
    dtype: torch.dtype = torch.float64,
    rotary: bool = False,
    masked: bool = False,
    stateful: bool = False,
    shares: tuple[float, ...] | None = None,
    shares_k: tuple[float, ...] | None = None,
) -> dict[str, float]:
    """Errors of answers, gradients and states against one process that holds everything, in float64."""
    if dist.get_rank() >= len(lengths):
        return {}
    total, own, batch = sum(lengths), own_part(lengths), 1 if shares else 2
    widths = ((HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, VALUES))
    # Every rank draws the same tokens and keeps its share; they lie far from zero, where sums would cancel.
    everything = [(torch.randn(batch, total, *w, dtype=torch.float64) + 1).to(dtype) for w in widths]
    target = torch.randn(batch, total, HEADS, VALUES, dtype=torch.float64)
    tables = rotary_1d(total, WIDTH) if rotary else None
    mask = torch.rand(batch, total) > 0.4 if masked else None
    cu_q, cu_k = (
        None if s is None else torch.tensor([round(x * total) for x in s], dtype=torch.int32)
        for s in (shares, shares_k or shares)
    )
    memory = torch.randn(2, len(shares) - 1 if shares else batch, 5, KEY_HEADS, VALUES, dtype=torch.float64).to(dtype)

    def answer(tokens: list[Tensor], past: Tensor, piece: slice, mesh: Any) -> tuple[Tensor, af.State]:
        rows = None if tables is None else (tables[0][piece], tables[1][piece])
        before = rotary_1d(5, WIDTH, offset=-5) if rotary else None
        initial = summarize(past[0, ..., :WIDTH], past[1], mechanism, rotary=before) if stateful else None
        return attention(
            *tokens,
            mechanism,
            causal=causal,
            key_mask=None if mask is None else mask[:, piece],
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            rotary=rows,
            initial_state=initial,
            return_state=True,
            mesh=mesh,
        )

    def differentiate(tokens: list[Tensor], past: Tensor, piece: slice, mesh: Any) -> tuple[Any, ...]:
        out, state = answer(tokens, past, piece, mesh)
        share = 1 if mesh is None else len(lengths)  # every rank holds the final state; its loss counts once
        loss = (out * target[:, piece]).sum() + (state.covariance.sum() + state.key_mean.sum()) / share
        return out, state, torch.autograd.grad(loss, (*tokens, *[past] * stateful))

    mesh = groups[len(lengths)]
    mine = [x[:, own].clone().requires_grad_() for x in everything]
    out, state, grads = differentiate(mine, memory.clone().requires_grad_(), own, mesh)
    alone = [x.double().requires_grad_() for x in everything]
    truth, whole, true_grads = differentiate(alone, memory.double().requires_grad_(), slice(0, total), None)

    errors = {"answer": error(out, truth[:, own], truth.norm().item())}
    for name in ("count", "key_mean", "value_mean", "covariance", *["rotated_key_mean"] * rotary):
        errors[name] = error(getattr(state, name).double(), getattr(whole, name).double())
    for name, grad, true in zip(("query", "key", "value"), grads, true_grads, strict=False):
        errors[f"gradient of {name}"] = error(grad, true[:, own], true.norm().item())
    if stateful:
        summed = grads[3].clone()
        dist.all_reduce(summed, group=mesh if isinstance(mesh, dist.ProcessGroup) else mesh.get_group())
        errors["gradient of the initial state"] = error(summed, true_grads[3])
    return errors


def far_from_zero(groups: dict[int, Any]) -> dict[str, float]:
    """Errors of float32 covariances whose tokens lie a thousand deviations from zero: over ranks, in one, and raw."""
    lengths = (300, 0, 500, 200)
    key, value = torch.randn(2, 1, 1000, 1, 8, dtype=torch.float64).add_(1000).unbind()
    key, value = key.float(), value.float()
    own = own_part(lengths)
    truth = summarize(key.double(), value.double(), "inline").covariance
    raw = key[0, :, 0].T @ value[0, :, 0] / 1000 - key.mean(1)[0].T * value.mean(1)[0]
    shared = summarize(key[:, own], value[:, own], "inline", mesh=groups[4]).covariance
    alone = summarize(key, value, "inline").covariance
    return {"shared": error(shared, truth), "alone": error(alone, truth), "raw": error(raw[None, None], truth)}


class Sent(TorchDispatchMode):
    """Bytes of every message that leaves this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and "wait_tensor" not in func.name():
            self.bytes.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def bytes_sent(groups: dict[int, Any], length: int, causal: bool, rotary: bool) -> dict[str, list[int]]:
    """Bytes of the messages of one call, forward and backward, without the note that compares calls."""
    query, key, value = torch.randn(3, 1, length // RANKS, 1, 8).requires_grad_().unbind()
    tables = rotary_1d(length // RANKS, 8) if rotary else None
    with Sent() as forward:
        out = attention(query, key, value, causal=causal, rotary=tables, mesh=groups[4])
    with Sent() as backward:
        out.sum().backward()
    return {"forward": forward.bytes[1:], "backward": backward.bytes}


def same_bits(groups: dict[int, Any], causal: bool) -> dict[str, bool]:
    """Whether a call gives the same bits twice, and a state the same bits on every rank."""
    tokens = [torch.randn(1, 50 + dist.get_rank(), 2, 8) for _ in range(3)]

    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in tokens]
        out, state = attention(*leaves, causal=causal, return_state=True, mesh=groups[4])
        return [out, state.covariance, *torch.autograd.grad(out.square().sum(), leaves)]

    first, second = run(), run()
    states = [torch.empty_like(first[1]) for _ in range(RANKS)]
    dist.all_gather(states, first[1].detach())
    return {
        "twice": all(torch.equal(a, b) for a, b in zip(first, second, strict=True)),
        "everywhere": all(torch.equal(states[0], x) for x in states),
    }


def in_steps(groups: dict[int, Any]) -> dict[str, float]:
    """The scan in logarithmic steps, which so few ranks would not take by themselves."""
    merging.GATHER_UP_TO = 1
    try:
        return compare(groups, (5, 0, 9, 3), causal=True, rotary=True, stateful=True)
    finally:
        merging.GATHER_UP_TO = 8


def twice_differentiated(groups: dict[int, Any], causal: bool) -> float:
    """The error of a gradient of a gradient."""
    lengths = (3, 4, 0, 5)
    own = own_part(lengths)
    everything = [torch.randn(1, 12, 1, 4, dtype=torch.float64) for _ in range(3)]

    def penalty(tokens: list[Tensor], mesh: Any) -> list[Tensor]:
        tokens = [x.clone().requires_grad_() for x in tokens]
        out = attention(*tokens, causal=causal, mesh=mesh)
        grads = torch.autograd.grad(out.square().sum(), tokens, create_graph=True)
        return list(torch.autograd.grad(torch.cat([g.flatten() for g in grads]).square().sum(), tokens))

    mine = penalty([x[:, own] for x in everything], groups[4])
    alone = penalty(everything, None)
    return max(error(x, y[:, own], y.norm().item()) for x, y in zip(mine, alone, strict=True))


def compiled(groups: dict[int, Any]) -> dict[str, float]:
    """What `torch.compile` makes of calls on two ranks, in one graph, beside the calls themselves."""
    if dist.get_rank() > 1:
        return {}

    def call(*tokens: Tensor) -> Tensor:
        return attention(*tokens, mesh=groups[2]) + attention(*tokens, causal=True, mesh=groups[2])

    tokens = [torch.randn(1, 40, 1, 8, requires_grad=True) for _ in range(3)]
    plain, quick = call(*tokens), torch.compile(call, fullgraph=True, backend="aot_eager")(*tokens)
    grads, quick_grads = (torch.autograd.grad(out.square().sum(), tokens) for out in (plain, quick))
    pairs = zip(grads, quick_grads, strict=True)
    return {"answer": error(quick, plain), "gradients": max(error(x, y) for x, y in pairs)}


def dtensors(groups: dict[int, Any]) -> dict[str, Any]:
    """Tokens sharded over the ranks, and over a mesh of batch by tokens, unevenly, without a word about a mesh."""
    tokens = [torch.randn(2, 21, 2, 4, dtype=torch.float64) for _ in range(3)]
    truth = attention(*tokens, causal=True)
    found: dict[str, Any] = {}
    for name, mesh, placements in (
        ("tokens", groups[4], [Shard(1)]),
        ("batch by tokens", groups[0], [Shard(0), Shard(1)]),
        ("tokens by heads", groups[0], [Shard(1), Shard(2)]),
        ("replicas by tokens", groups[0], [Replicate(), Shard(1)]),
        ("batch alone", groups[4], [Shard(0)]),
    ):
        leaves = [distribute_tensor(x.clone(), mesh, placements).requires_grad_() for x in tokens]
        out = attention(*leaves, causal=True)
        assert isinstance(out, DTensor)
        assert out.placements == tuple(placements)
        out.full_tensor().square().sum().backward()
        alone = [x.clone().requires_grad_() for x in tokens]
        attention(*alone, causal=True).square().sum().backward()
        pairs: Any = [(x.grad.full_tensor(), y.grad) for x, y in zip(leaves, alone, strict=True)]  # pyright: ignore
        found[name] = max(error(out.full_tensor(), truth), *(error(x, y) for x, y in pairs))
    state = summarize(*(distribute_tensor(x, groups[4], [Shard(1)]) for x in tokens[1:]))
    found["summarize"] = error(state.covariance, summarize(*tokens[1:]).covariance)
    return found


def refusals(groups: dict[int, Any]) -> dict[str, str]:
    """What every rank says to calls that do not fit together."""
    rank, group = dist.get_rank(), groups[4]
    tokens = [torch.randn(2, 5, 2, 4) for _ in range(3)]
    wide = [torch.randn(2, 5, 2, 8) if rank == 2 else x for x in tokens]
    cu = torch.tensor([0, 7, 20 - (rank == 3)])
    packed = [x[:1] for x in tokens]
    sharded = [distribute_tensor(torch.randn(2, 8, 2, 4), group, [Shard(1)]) for _ in range(3)]
    calls: dict[str, Callable[[], Any]] = {
        "mechanism": lambda: attention(*tokens, "mala" if rank else "inline", mesh=group),
        "width": lambda: attention(*wide, mesh=group),
        "softmax": lambda: attention(*tokens, "softmax", mesh=group),
        "offsets": lambda: attention(*packed, cu_seqlens_q=cu, cu_seqlens_k=cu, mesh=group),
        "total": lambda: summarize(*packed[1:], cu_seqlens_k=torch.tensor([0, 21]), mesh=group),
        "dimensions": lambda: attention(*tokens, mesh=groups[0]),
        "no mesh": lambda: attention(*tokens, mesh="context"),
        "half a DTensor": lambda: attention(sharded[0], tokens[1], tokens[2]),
        "other placements": lambda: attention(sharded[0], sharded[1], distribute_tensor(tokens[2], group, [Shard(0)])),
        "channels": lambda: attention(*(distribute_tensor(x, group, [Shard(3)]) for x in tokens)),
    }
    said: dict[str, str] = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as complaint:
            said[name] = str(complaint)
        dist.barrier()
    return said


def is_quick(packing: str, name: str) -> bool:
    """Whether a way to pack is tried with a way to lay tokens over ranks in the shorter table."""
    return (packing == "across every boundary") == (name != "uneven")


def comparisons(thorough: bool) -> dict[str, Callable[[dict[int, Any]], Any]]:
    """What is compared with one process, by name."""
    table: dict[str, Callable[..., Any]] = {}

    def add(name: str, *args: Any, **given: Any) -> None:
        table[name] = lambda groups: compare(groups, *args, **given)

    for causal in (False, True):
        kind = "causal" if causal else "full"
        for mechanism in MECHANISMS:
            add(f"{kind}, {mechanism}", (5, 0, 9, 3), mechanism, causal=causal, rotary=True, stateful=True)
            if thorough or mechanism == "mala":
                add(f"{kind}, {mechanism}, plain", (5, 0, 9, 3), mechanism, causal=causal)
        for name, lengths in LENGTHS.items():
            add(f"{kind}, {name}", lengths, causal=causal, masked=True)
            if thorough or name == "uneven":
                add(f"{kind}, {name}, float32", lengths, causal=causal, dtype=torch.float32, stateful=True)
            for packing, shares in PACKED.items():
                if thorough or is_quick(packing, name):
                    given = {"causal": causal, "rotary": True, "stateful": True, "shares": shares}
                    add(f"{kind}, {name}, packed {packing}", lengths, **given)
        add(f"{kind}, packed, float32", (5, 17, 1, 9), shares=(0, 0.5, 1), causal=causal, dtype=torch.float32)
    add("full, packed cross", (5, 17, 1, 9), shares=(0, 0.2, 0.2, 1), shares_k=(0, 0.7, 0.9, 1))
    table["in steps"] = in_steps
    return table


def scenarios() -> dict[str, Callable[[dict[int, Any]], Any]]:
    """Everything else that the ranks do, in order, by name."""
    table: dict[str, Callable[..., Any]] = {}
    for causal in (False, True):
        kind = "causal" if causal else "full"
        table[f"bits {kind}"] = lambda groups, causal=causal: same_bits(groups, causal)
        table[f"twice {kind}"] = lambda groups, causal=causal: twice_differentiated(groups, causal)
        for rotary in (False, True):
            for length in (4096, 65536):
                arguments = length, causal, rotary
                table[f"bytes {json.dumps(arguments)}"] = lambda groups, a=arguments: bytes_sent(groups, *a)
    table["far from zero"] = far_from_zero
    table["compiled"] = compiled
    table["DTensors"] = dtensors
    table["refusals"] = refusals
    return table


def work(table: dict[str, Callable[[dict[int, Any]], Any]], seed: int) -> dict[str, Any]:
    """What each rank does."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    groups: dict[int, Any] = {0: square, 4: init_device_mesh("cpu", (4,)), 2: dist.new_group([0, 1])}
    results: dict[str, Any] = {"seed": seed}
    for name, scenario in table.items():
        torch.manual_seed(seed)
        results[name] = scenario(groups)
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def fresh_seed() -> int:
    """One for all ranks."""
    return int(os.environ.get("AFFINEAR_SEED", secrets.randbits(32)))


@pytest.fixture(scope="module")
def ranks(in_ranks: InRanks, fresh_seed: int) -> list[dict[str, Any]]:
    """What each rank found, of the shorter table."""
    return in_ranks(RANKS, lambda: work(comparisons(False) | scenarios(), fresh_seed))


@pytest.fixture(scope="module")
def thorough_ranks(in_ranks: InRanks, fresh_seed: int) -> list[dict[str, Any]]:
    """What each rank found, of all the rest."""
    rest = {name: scenario for name, scenario in comparisons(True).items() if name not in QUICK}
    return in_ranks(RANKS, lambda: work(rest, fresh_seed))


QUICK = list(comparisons(False))
THOROUGH = [name for name in comparisons(True) if name not in QUICK]


def check_as_one(ranks: list[dict[str, Any]], name: str) -> None:
    """Errors of every rank are those of rounding."""
    bound = TOLERANCE["float32" if "float32" in name else "float64"]
    for rank, results in enumerate(ranks):
        too_large = {what: number for what, number in results[name].items() if not number <= bound}
        assert not too_large, f"rank {rank}, AFFINEAR_SEED={results['seed']}"


@pytest.mark.parametrize("name", QUICK)
def test_ranks_are_as_one(ranks: list[dict[str, Any]], name: str):
    check_as_one(ranks, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", THOROUGH)
def test_ranks_are_as_one_however_tokens_lie(thorough_ranks: list[dict[str, Any]], name: str):
    check_as_one(thorough_ranks, name)


def test_sums_over_ranks_do_not_cancel(ranks: list[dict[str, Any]]):
    for results in ranks:
        errors = results["far from zero"]
        assert errors["raw"] > 0.01
        assert errors["shared"] < max(3 * errors["alone"], 1e-4)


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_what_travels_does_not_grow_with_the_tokens(ranks: list[dict[str, Any]], causal: bool, rotary: bool):
    numbers = 8 * 8 + 8 + 8 + 1 + 8 * rotary
    # Sums in float64; or the states as they are, with the count in two halves, and back the gradients for all ranks.
    message = {"forward": [4 * (numbers + 1)], "backward": [4 * 4 * (numbers + 1)]}
    expected = message if causal else {"forward": [8 * numbers], "backward": [8 * numbers]}
    for results in ranks:
        for length in (4096, 65536):
            assert results[f"bytes {json.dumps((length, causal, rotary))}"] == expected


@pytest.mark.parametrize("kind", ["full", "causal"])
def test_every_run_gives_the_same_bits_and_every_rank_the_same_state(ranks: list[dict[str, Any]], kind: str):
    assert [results[f"bits {kind}"] for results in ranks] == [{"twice": True, "everywhere": True}] * RANKS


@pytest.mark.parametrize("kind", ["full", "causal"])
def test_gradients_of_gradients_are_those_of_one_process(ranks: list[dict[str, Any]], kind: str):
    assert max(results[f"twice {kind}"] for results in ranks) < 1e-11


def test_a_compiled_call_is_one_graph_with_the_same_answers(ranks: list[dict[str, Any]]):
    for results in ranks[:2]:
        assert max(results["compiled"].values()) < 1e-5


def test_dtensors_bring_their_mesh_along(ranks: list[dict[str, Any]]):
    for results in ranks:
        assert max(results["DTensors"].values()) < 1e-12


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mechanism", "same call on every rank.*rank 0: attention with 'inline'.*rank 1: attention with 'mala'"),
        ("width", "rank 1: .*2 key heads 4 wide.*rank 2: .*2 key heads 8 wide"),
        ("softmax", "mechanism: expected one with a state beside mesh, got 'softmax'"),
        ("offsets", "rank 2: .*2 sequences ending at 20.*rank 3: .*2 sequences ending at 19"),
        ("total", "cu_seqlens_q: expected values from 0 up to the 20 tokens of query on all ranks"),
        ("dimensions", r"mesh: expected one dimension.*got 2 \(data, context\); pass .*mesh\['context'\]"),
        ("no mesh", "mesh: expected a DeviceMesh of one dimension or a process group, got str"),
        ("half a DTensor", "key: expected a DTensor as query is, got a plain tensor"),
        ("other placements", "value: expected the mesh and placements of query"),
        ("channels", "query: expected shards of the batch, the tokens .* or the heads"),
    ],
)
def test_what_does_not_fit_is_named_on_every_rank(ranks: list[dict[str, Any]], name: str, words: str):
    for results in ranks:
        with pytest.raises(ValueError, match=words):
            raise ValueError(results["refusals"].get(name, "nothing was said"))


def test_a_rank_that_dies_is_an_error_on_the_others_and_no_hang(in_ranks: InRanks):
    told, gone = in_ranks(2, die)
    assert gone == "gone"
    assert "mesh: one of the 2 ranks did not answer rank 0" in told


def die() -> str:
    """Two ranks meet; then the second is gone, without a word to the first, which says what it sees."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    dist.barrier()
    if dist.get_rank() == 1:
        return "gone"
    try:
        attention(*torch.randn(3, 1, 8, 2, 4), mesh=dist.group.WORLD)
    except RuntimeError as error:
        return str(error)
    return "nothing"

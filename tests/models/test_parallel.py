"""Four processes over gloo share the rows of images: logits, maps and gradients are those of one process.

Each answers with numbers, which the tests then judge.
"""

from __future__ import annotations

import copy
import datetime
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import affinear.models
from affinear.models.parallel import ImageStrips, cut, parallelize, unit

assert affinear.models

RANKS = 4
SMALL: dict[str, Any] = {"num_classes": 5, "in_chans": 2}
PYRAMID: dict[str, Any] = {"embed_dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}
MAVIT: dict[str, Any] = SMALL | PYRAMID | {"mlp_ratios": (2, 2, 2, 2), "projection": 16}
INLINE: dict[str, Any] = SMALL | {"embed_dim": 8, "depths": (1, 1, 1, 1), "num_heads": (2, 2, 2, 2), "mlp_ratio": 2}
# Name, arguments, rows of the images.
NETWORKS: dict[str, tuple[str, dict[str, Any], int]] = {
    "mavit": ("mavit_tiny_linear", MAVIT | {"mechanism": "mala"}, 32 * 5 - 9),
    "mavit, released": ("mavit_tiny", MAVIT, 32 * 4 + 3),
    "nalaformer": ("nalaformer_xtiny_linear", SMALL | PYRAMID | {"mlp_ratio": 2, "projection": 16}, 32 * 4),
    "pvt": ("inline_pvt_tiny", SMALL | PYRAMID | {"mlp_ratios": (2, 2, 2, 2)}, 32 * 5 + 2),
    "cswin": ("inline_cswin_tiny_linear", INLINE, 32 * 6 - 5),
    "swin": ("inline_swin_tiny_linear", INLINE, 32 * 5 - 3),
    "deit": ("inline_deit_tiny", SMALL | {"embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2}, 16 * 6 - 5),
    "deit, softmax": (
        "inline_deit_tiny",
        SMALL | {"embed_dim": 16, "depth": 2, "num_heads": 2, "stage_types": "M1"},
        16 * 5,
    ),
}


# A block, windows that strips cut, a column of tokens; the others repeat them, for `make test-all`.
QUICK = ("mavit", "cswin", "deit, softmax")


def error(x: Tensor, truth: Tensor) -> float:
    """||x - truth|| / ||truth||."""
    return (x - truth).norm().item() / (truth.norm().item() or 1.0)


def network(name: str) -> tuple[nn.Module, int]:
    """A small one in float64, the same on every rank, and the rows of its images."""
    model, arguments, height = NETWORKS[name]
    made = timm.create_model(model, **arguments).double()
    for parameter in made.parameters():  # away from where everything is symmetric, or nothing
        nn.init.uniform_(parameter, -0.5, 0.5)
    return made, height


def averaged(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the weights, averaged over ranks as data parallelism does it."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad.clone()
        dist.all_reduce(found[name])
        found[name] /= dist.get_world_size()
    return found


def beside(grads: dict[str, Tensor], truth: dict[str, Tensor | None]) -> dict[str, float]:
    """Errors of gradients, by the length of the largest: before a batch norm that of a bias is nothing but rounding."""
    true = {name: grad for name, grad in truth.items() if grad is not None}
    assert true.keys() == grads.keys()
    length = max(grad.norm().item() for grad in true.values())
    return {f"gradient of {name}": (grads[name] - grad).norm().item() / length for name, grad in true.items()}


def maps(model: Any, images: Tensor) -> list[Tensor]:
    """What every stage or block makes of images."""
    return model.forward_intermediates(images, intermediates_only=True)


def compare(name: str, mesh: Any) -> dict[str, float]:
    """Errors of logits, maps, gradients and running statistics against the network in one process."""
    whole, height = network(name)
    shared = parallelize(copy.deepcopy(whole), mesh)
    images, target = torch.randn(2, 2, height, 40, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    strip = cut(images, shared, mesh)
    errors: dict[str, float] = {}
    for model, x in ((whole, images), (shared, strip)):
        model.train()
        (model(x) * target).sum().backward()
    errors |= beside(averaged(shared), {name: x.grad for name, x in whole.named_parameters()})
    for (buffer_name, one), other in zip(whole.named_buffers(), shared.buffers(), strict=True):
        errors[buffer_name] = error(other.double(), one.double())
    with torch.no_grad():
        errors["logits"] = error(shared.eval()(strip), whole.eval()(images))
        features, own = maps(whole, images), maps(shared, strip)
        for i, (one, other) in enumerate(zip(features, own, strict=True)):
            start = torch.tensor(other.shape[2])
            rows = [torch.empty_like(start) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, start)
            first = int(sum(rows[: dist.get_rank()]))
            errors[f"map {i}"] = error(other, one[:, :, first : first + other.shape[2]])
    return errors


def with_checkpoints(mesh: Any) -> float:
    """The error of gradients where blocks are computed anew in the backward pass."""
    whole, height = network("mavit")
    shared = parallelize(copy.deepcopy(whole), mesh)
    shared.set_grad_checkpointing()  # pyright: ignore
    images = torch.randn(1, 2, height, 40, dtype=torch.float64)
    whole(images).square().sum().backward()
    shared(cut(images, shared, mesh)).square().sum().backward()
    return max(beside(averaged(shared), {name: x.grad for name, x in whole.named_parameters()}).values())


def beside_data_parallelism() -> dict[str, float]:
    """Two images on two ranks each, weights sharded over all four: gradients beside those of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    whole, height = network("mavit")
    images = torch.randn(2, 1, 2, height, 40, dtype=torch.float64)
    alone = [copy.deepcopy(whole) for _ in images]  # batch norms look at one rank's images, as ever
    for model, x in zip(alone, images, strict=True):
        model(x).square().mean().backward()
    shared = parallelize_module(copy.deepcopy(whole), mesh["context"], ImageStrips())
    for stage in shared.stages:  # pyright: ignore
        fully_shard(stage, mesh=everyone)
    fully_shard(shared, mesh=everyone)
    own = images[mesh["data"].get_local_rank()]
    shared(cut(own, whole, mesh["context"])).square().mean().backward()
    grads = {name: x.grad.full_tensor() for name, x in shared.named_parameters()}  # pyright: ignore
    pairs = zip(*(model.named_parameters() for model in alone), strict=True)
    return beside(grads, {name: (x.grad + y.grad) / 2 for (name, x), (_, y) in pairs})  # pyright: ignore


def refusals(mesh: Any) -> dict[str, str]:
    """What is said to images and networks that do not fit."""
    model, _ = network("mavit")
    calls = {
        "windows": lambda: parallelize(timm.create_model("inline_swin_tiny", depths=(1, 1, 1, 1), embed_dim=12), mesh),
        "stripes": lambda: parallelize(timm.create_model("inline_cswin_tiny", depths=(1, 1, 1, 1)), mesh),
        "reduced": lambda: parallelize(timm.create_model("inline_pvt_tiny", stage_types="IISS"), mesh),
        "pool": lambda: parallelize(timm.create_model("mavit_tiny", global_pool="max", **MAVIT), mesh),
        "stranger": lambda: parallelize(nn.Linear(2, 2), mesh),
        "small": lambda: cut(torch.randn(1, 2, 96, 64), model, mesh),
        "uneven": lambda: parallelize(model, mesh)(torch.randn(1, 2, 33 + dist.get_rank(), 64)),
        "twice": lambda: parallelize(model, mesh),
    }
    said: dict[str, str] = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as complaint:
            said[name] = str(complaint)
    return said


def compare_each(names: Sequence[str], seed: int) -> dict[str, Any]:
    """What each rank finds of networks."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300))
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("context",))
    results: dict[str, Any] = {"seed": seed}
    for name in names:
        torch.manual_seed(seed)
        results[name] = compare(name, mesh)
    if "mavit" in names:
        torch.manual_seed(seed)
        results["checkpoints"] = with_checkpoints(mesh)
        torch.manual_seed(seed)
        results["data parallelism"] = beside_data_parallelism()
        results["refusals"] = refusals(mesh)
    dist.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def fresh_seed() -> int:
    """One for all ranks."""
    return int(os.environ.get("AFFINEAR_SEED", secrets.randbits(32)))


@pytest.fixture(scope="module")
def ranks(in_ranks: Callable[..., list[Any]], fresh_seed: int) -> list[dict[str, Any]]:
    """What each rank found."""
    return in_ranks(RANKS, lambda: compare_each(QUICK, fresh_seed))


@pytest.fixture(scope="module")
def other_ranks(in_ranks: Callable[..., list[Any]], fresh_seed: int) -> list[dict[str, Any]]:
    """What each rank found of the other networks."""
    return in_ranks(RANKS, lambda: compare_each([name for name in NETWORKS if name not in QUICK], fresh_seed))


def check_strips(ranks: list[dict[str, Any]], name: str) -> None:
    """Errors of every rank are those of rounding."""
    for rank, results in enumerate(ranks):
        too_large = {what: number for what, number in results[name].items() if not number < 1e-9}
        assert not too_large, f"rank {rank}, AFFINEAR_SEED={results['seed']}"


@pytest.mark.parametrize("name", QUICK)
def test_strips_are_as_the_whole_image(ranks: list[dict[str, Any]], name: str):
    check_strips(ranks, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in QUICK])
def test_strips_are_as_the_whole_image_in_every_network(other_ranks: list[dict[str, Any]], name: str):
    check_strips(other_ranks, name)


def test_blocks_can_be_computed_anew(ranks: list[dict[str, Any]]):
    assert max(results["checkpoints"] for results in ranks) < 1e-9


def test_strips_data_parallelism_and_sharded_weights_go_together(ranks: list[dict[str, Any]]):
    for results in ranks:
        assert max(results["data parallelism"].values()) < 1e-9


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("windows", r"stages\.3\.blocks\.0 looks at windows of 7 rows, which strips would cut"),
        ("stripes", r"stages\.2\.blocks\.0\.attn is softmax within windows"),
        ("reduced", r"stages\.2\.blocks\.0\.attn is softmax within windows"),
        ("pool", r"head\.global_pool pools by 'max'; choose global_pool='avg'"),
        ("stranger", "model: expected a network of affinear.models, got Linear"),
        ("small", "images: expected at least 4 x 32 rows, 32 for every rank, got 96"),
        ("uneven", "strips of a multiple of 32 rows on every rank but the last.*got 33, 34, 35, 36"),
        ("twice", "has been parallelized already"),
    ],
)
def test_what_strips_cannot_serve_is_named(ranks: list[dict[str, Any]], name: str, words: str):
    for results in ranks:
        with pytest.raises(ValueError, match=words):
            raise ValueError(results["refusals"].get(name, "nothing was said"))


def test_the_unit_is_what_a_place_of_the_last_map_is_high():
    assert unit(network("mavit")[0]) == 32
    assert unit(network("deit")[0]) == 16

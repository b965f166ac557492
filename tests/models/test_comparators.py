"""RMT's and SECViT's attention, judged by their rules written out; what images SECViT takes."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import timm
import torch
from torch import Tensor

from affinear.layers import AxialRotary
from affinear.models import RMT, SECViT, released
from affinear.models._weights import draw as draw_fresh
from affinear.models.parallel import parallelize
from affinear.models.rmt import ManhattanAttention, ManhattanPositions
from affinear.models.secvit import ClusterAttention

DIM, HEADS = 24, 3
WIDTH = DIM // HEADS


def draw(layer: Any) -> Any:
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer.double()


def parts(layer: Any, x: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, H, N, D), and what the convolution adds, (B, N, C)."""
    query, key, value = layer.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    local = layer.position(value.transpose(1, 2).flatten(2).unflatten(1, grid)).flatten(1, 2)
    return query, key, value, local


def error(out: Tensor, truth: Tensor) -> float:
    return ((out - truth).norm() / truth.norm()).item()


def turn(x: Tensor, angle: Tensor) -> Tensor:
    """Adjacent pairs of channels (..., N, D) by angles (N, D / 2)."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


@pytest.mark.parametrize("grid", [(4, 6), (5, 3), (1, 7), (1, 1)])
@pytest.mark.parametrize("decomposed", [True, False])
def test_rmt_decays_with_distance_and_turns_with_the_flattened_place(grid: tuple[int, int], decomposed: bool):
    start, span = 1.5, 3.0
    height, width = grid
    layer, x = draw(ManhattanAttention(DIM, HEADS)), torch.randn(2, height * width, DIM, dtype=torch.float64)
    query, key, value, local = parts(layer, x, grid)
    frequency = torch.tensor([10000 ** (-i / (WIDTH // 2 - 1)) for i in range(WIDTH // 2)], dtype=torch.float64)
    angle = torch.outer(torch.arange(height * width).double(), frequency)
    logits = turn(query, angle) @ turn(key * WIDTH**-0.5, angle).mT
    rate = torch.tensor([math.log(1 - 2 ** -(start + span * h / HEADS)) for h in range(HEADS)])[:, None, None].double()
    place = torch.arange(height * width)
    row, column = place // width, place % width
    down, across = (row[:, None] - row).abs(), (column[:, None] - column).abs()
    if decomposed:
        in_row = (logits + rate * across).masked_fill(down > 0, -torch.inf).softmax(-1)
        in_column = (logits + rate * down).masked_fill(across > 0, -torch.inf).softmax(-1)
        out = in_column @ (in_row @ value)
    else:
        out = (logits + rate * (down + across)).softmax(-1) @ value
    expected = layer.proj(out.transpose(1, 2).flatten(2) + local)
    places = ManhattanPositions(WIDTH, HEADS, start, span, decomposed)(x.unflatten(1, grid))
    assert error(layer(x, grid, rotary=places), expected) < 1e-6  # tables are float32


@pytest.mark.parametrize(("grid", "clusters"), [((4, 6), 4), ((4, 6), 3), ((5, 4), 1), ((5, 4), -1), ((5, 7), 4)])
def test_secvit_sorts_by_the_mean_key_and_looks_within_runs(grid: tuple[int, int], clusters: int):
    height, width = grid
    length = height * width
    layer = draw(ClusterAttention(DIM, HEADS, clusters, uneven=True))
    x = torch.randn(2, length, DIM, dtype=torch.float64)
    query, key, value, local = parts(layer, x, grid)
    frequency = torch.tensor([10000 ** (-i / (WIDTH // 4 - 1)) for i in range(WIDTH // 4)], dtype=torch.float64)
    place = torch.arange(length)
    angle = torch.cat([torch.outer(at.double(), frequency) for at in (place // width, place % width)], dim=1)
    query, key = turn(query, angle), turn(key, angle) * WIDTH**-0.5
    score = torch.cosine_similarity(key.mean(2, keepdim=True), key, dim=-1)
    rank = score.argsort(-1).argsort(-1)
    # The run of each rank: as many equal runs as there are clusters, the first ones longer by what is left.
    lengths = [length // max(clusters, 1) + (i < length % max(clusters, 1)) for i in range(max(clusters, 1))]
    run = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[rank]
    apart = run[..., :, None] != run[..., None, :]
    out = (query @ key.mT).masked_fill(apart, -torch.inf).softmax(-1) @ value
    expected = layer.proj(out.transpose(1, 2).flatten(2) + local)
    rotary = AxialRotary(WIDTH)(x.unflatten(1, grid))
    assert error(layer(x, grid, rotary=rotary), expected) < 1e-6


SMALL: dict[str, Any] = {
    "embed_dims": (8, 8, 8, 8),
    "depths": (2, 1, 1, 1),
    "num_heads": (1, 1, 2, 2),
    "projection": 8,
    "num_classes": 3,
}


@pytest.mark.parametrize(("size", "nearest"), [((80, 80), "64 x 64"), ((112, 240), "128 x 256"), ((37, 75), "32 x 64")])
def test_images_that_equal_clusters_cannot_share_are_told_the_nearest(size: tuple[int, int], nearest: str):
    images = torch.zeros(1, 3, *size)
    model = SECViT(**SMALL).eval()
    with pytest.raises(ValueError, match=rf"images: {size[0]} x {size[1]} .* resize to {nearest}, or build .* uneven"):
        model(images)
    height, width = map(int, nearest.split(" x "))
    assert model(torch.zeros(1, 3, height, width)).shape == (1, 3)
    assert SECViT(**SMALL, uneven=True).eval()(images).shape == (1, 3)


@pytest.mark.parametrize("size", [(64, 72), (32, 32), (96, 160)])
def test_uneven_clusters_are_equal_where_they_can_be(size: tuple[int, int]):
    plain, uneven = SECViT(**SMALL).eval(), SECViT(**SMALL, uneven=True).eval()
    uneven.load_state_dict(plain.state_dict())
    images = torch.randn(2, 3, *size)
    assert torch.equal(plain(images), uneven(images))


def test_clusters_may_differ_from_block_to_block():
    model = SECViT(**SMALL, num_clusters=((16, 4), 2, (1,), -1))
    layers = [layer for layer in model.modules() if isinstance(layer, ClusterAttention)]
    assert [layer.clusters for layer in layers] == [16, 4, 2, 1, -1]
    with pytest.raises(ValueError, match=r"num_clusters: expected .* of 4 stages of 2, 1, 1, 1 blocks, got"):
        SECViT(**SMALL, num_clusters=((16,), 2, 1, -1))
    with pytest.raises(ValueError, match="num_clusters: expected"):
        SECViT(**SMALL, num_clusters=(8, 2, 1))


def test_layers_say_what_is_wrong_with_their_sizes():
    for layer in (lambda: ManhattanAttention(24, 5), lambda: ClusterAttention(24, 5, 2)):
        with pytest.raises(ValueError, match="num_heads: expected a divisor of dim = 24, got 5"):
            layer()
    with pytest.raises(ValueError, match="tokens that 4 clusters divide, got 6; pass uneven=True"):
        ClusterAttention(8, 2, 4)(torch.zeros(1, 6, 8), (2, 3), rotary=AxialRotary(4)(torch.zeros(1, 2, 3, 8)))
    with pytest.raises(ValueError, match="decay_init: expected exponents above zero for all heads, got 0 to 4"):
        RMT(**SMALL, decay_init=(0, 2, 2, 2))
    with pytest.raises(ValueError, match=r"stage_types: expected 4 letters, d for decomposed .* got 'ddl'"):
        RMT(**SMALL, stage_types="ddl")


@pytest.mark.parametrize("family", ["rmt", "secvit"])
def test_layer_scales_are_where_they_are_asked_for(family: str):
    model = released.build(family, {**SMALL, "layer_scale": [True, False, False, True]})
    scaled = {name.partition(".blocks")[0] for name in model.state_dict() if "scale1" in name}
    assert scaled == {"stages.0", "stages.3"}
    released_scale = {"rmt": (1, 1, 1, 8), "secvit": (1, 8, 1, 1)}[family]
    state = {**model.state_dict(), "layers.0.blocks.0.gamma_1": torch.rand(released_scale)}
    gamma = state["layers.0.blocks.0.gamma_1"].flatten()
    del state["stages.0.blocks.0.scale1.gamma"]
    released.load(model, state)
    assert torch.equal(model.state_dict()["stages.0.blocks.0.scale1.gamma"], gamma)


@pytest.mark.parametrize(
    ("name", "kind", "drawn"),
    [
        ("ravlt_tiny", torch.nn.Conv2d, True),
        ("secvit_tiny", torch.nn.Conv2d, True),
        ("mila_tiny", torch.nn.Conv2d, False),
        ("rmt_tiny", torch.nn.Conv2d, False),
        ("mila_tiny", torch.nn.Linear, True),
        ("rmt_tiny", torch.nn.Linear, True),
    ],
)
def test_fresh_weights_are_drawn_as_released(name: str, kind: type[torch.nn.Module], drawn: bool):
    model = timm.create_model(name, num_classes=10, depths=(1, 1, 1, 1))
    layers: list[Any] = [module for module in model.modules() if isinstance(module, kind)]
    biases = [bool(layer.bias.any()) for layer in layers if layer.bias is not None]
    others = [
        std
        for layer in layers
        if layer.weight.numel() > 5000 and abs((std := layer.weight.std().item()) - 0.02) > 0.002
    ]
    assert not any(biases) if drawn else all(biases)
    assert (others == []) == drawn


@pytest.mark.parametrize("seed", [146, 250, 341])
def test_no_fresh_weight_lies_far_out(seed: int):
    """With these seeds a truncated normal by the inverse of erf gives a weight of -2, a hundred deviations out."""
    torch.manual_seed(seed)
    layer = torch.nn.Linear(256, 256, device="meta").to_empty(device="cpu")
    draw_fresh(layer, torch.nn.Linear)
    assert layer.weight.abs().max() < 0.2
    assert 0.019 < layer.weight.std() < 0.021


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ravlt_tiny", "weighs its keys by the mean query of the whole image"),
        ("mila_tiny", "needs to know the whole map"),
        ("rmt_tiny", "needs to know the whole map"),
        ("secvit_tiny", "needs to know the whole map"),
    ],
)
def test_images_in_strips_are_refused(name: str, reason: str):
    model = timm.create_model(name, device="meta", depths=(1, 1, 1, 1))
    with pytest.raises(ValueError, match=rf"model: expected layers that strips can serve, but stages.* {reason}"):
        parallelize(model, cast("Any", None))

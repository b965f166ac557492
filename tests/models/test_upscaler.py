"""The upscaler: the published counts and arithmetic, every mechanism, and what it refuses."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from affinear.models.upscaler import NETWORKS, Upscaler, WindowAttention, from_released, make_upscaler

ARMS = ("windows", "softmax", "linear", "inline", "nala", "mala", "none")


def small(**given: object) -> Upscaler:
    wanted = {"dim": 16, "depths": (2, 2), "num_heads": 2, "window": 4, "position_kernel": 3, **given}
    return Upscaler(**wanted).double().eval()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("scale", "count"), [(2, 910_152), (3, 918_267), (4, 929_628)])
def test_swinir_light_has_as_many_parameters_as_published(scale: int, count: int):
    with torch.device("meta"):
        network = Upscaler(scale)
    assert sum(parameter.numel() for parameter in network.parameters()) == count


@pytest.mark.parametrize("mechanism", ARMS)
def test_any_size_becomes_so_many_times_larger(mechanism: str):
    for size, scale in (((1, 1), 2), ((3, 10), 3), ((9, 4), 4)):
        out = small(mechanism=mechanism, scale=scale)(torch.rand(2, 3, *size, dtype=torch.float64))
        assert out.shape == (2, 3, scale * size[0], scale * size[1])
        assert out.isfinite().all()


def windows_by_definition(layer: WindowAttention, x: Tensor) -> Tensor:
    """Softmax over those pixels that lie in the same window, one pixel after the other; no window wraps around."""
    height, width, channels = x.shape
    query, key, value = layer.qkv(x).unflatten(-1, (3, layer.num_heads, -1)).unbind(2)
    out = torch.zeros_like(query)
    side, shift, span = layer.window, layer.shift, 2 * layer.window - 1

    def window(place: tuple[int, int]) -> tuple[int, int]:
        return (place[0] - shift) // side, (place[1] - shift) // side

    places = list(product(range(height), range(width)))
    for here in places:
        others = [there for there in places if window(there) == window(here)]
        for head in range(layer.num_heads):
            scores = [
                query[here][head] @ key[there][head] * (channels // layer.num_heads) ** -0.5
                + layer.relative_position_bias_table[
                    (here[0] - there[0] + side - 1) * span + here[1] - there[1] + side - 1, head
                ]
                for there in others
            ]
            weights = torch.stack(scores).softmax(0)
            out[here[0], here[1], head] = weights @ torch.stack([value[there][head] for there in others])
    return layer.proj(out.flatten(2))


@pytest.mark.parametrize("shift", [0, 2])
def test_windows_are_softmax_over_the_pixels_of_a_window(shift: int):
    layer = WindowAttention(6, 2, 4, shift).double()
    torch.nn.init.normal_(layer.relative_position_bias_table)
    x = torch.randn(8, 4, 6, dtype=torch.float64)
    assert torch.allclose(layer(x[None])[0], windows_by_definition(layer, x), atol=1e-12)


def test_the_published_shell_is_what_the_parts_make_when_they_are_put_together_by_hand():
    network = small(position_kernel=0)
    images = torch.rand(1, 3, 8, 12, dtype=torch.float64)
    first = F.conv2d(images - network.mean, network.conv_first.weight, network.conv_first.bias, padding=1)
    x = network.norm_first(first.movedim(1, -1))
    for group in network.layers:
        came = x
        for layer in group.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            x = x + layer.attn(layer.norm1(x))
            x = x + layer.mlp(F.layer_norm(x, (x.shape[-1],), layer.norm2.weight, layer.norm2.bias))
        x = came + group.conv(x.movedim(-1, 1)).movedim(1, -1)  # pyright: ignore
    deep = network.conv_after_body(network.norm(x).movedim(-1, 1)) + first
    out = network.upsample(deep)
    expected = out.unflatten(1, (3, 2, 2)).permute(0, 1, 4, 2, 5, 3).reshape(1, 3, 16, 24) + network.mean
    assert torch.allclose(network(images), expected, atol=1e-12)


def test_every_second_layer_may_keep_its_windows():
    network = small(mechanism="mala", alternate=True, depths=(4,))
    kinds = [type(layer.attn).__name__ for layer in network.layers[0].blocks]  # pyright: ignore
    assert kinds == ["WindowAttention", "Attention"] * 2
    assert [layer.attn.shift for layer in network.layers[0].blocks[::2]] == [0, 2]  # pyright: ignore


def test_one_number_is_one_group():
    assert [len(group.blocks) for group in small(depths=3).layers] == [3]  # pyright: ignore


def test_arms_differ_in_their_attention_alone():
    counts = {}
    for arm in ARMS:
        with torch.device("meta"):
            network = make_upscaler("upscaler_light", {"mechanism": arm, "depths": (2,)})
        counts[arm] = sum(parameter.numel() for parameter in network.parameters())
    assert len({counts[arm] for arm in ("softmax", "linear", "inline", "nala", "mala")}) == 1
    tables = 2 * 15 * 15 * 2  # the learned bias of windows
    asking = 2 * 2 * (64 * 64 + 64)  # queries and keys
    assert counts["windows"] == counts["mala"] + tables
    assert counts["none"] == counts["mala"] - asking


def test_the_last_map_is_not_rounded_under_autocast():
    network = small(mechanism="mala").float()
    with torch.autocast("cpu", torch.bfloat16):
        assert network(torch.rand(1, 3, 8, 8)).dtype == torch.float32


def test_recomputed_activations_give_the_same_gradients():
    images = torch.rand(2, 3, 8, 8, dtype=torch.float64)
    network = small(mechanism="linear", drop_path_rate=0.0).train()
    found = []
    for anew in (False, True):
        network.set_grad_checkpointing(anew)
        network.zero_grad()
        network(images).square().mean().backward()
        found.append(network.conv_first.weight.grad.clone())  # pyright: ignore[reportOptionalMemberAccess]
    assert torch.allclose(*found, atol=1e-12)


def test_released_weights_are_read_under_their_own_names():
    network = small(position_kernel=0)
    released = {}
    for name, tensor in network.state_dict().items():
        name = name.replace(".blocks.", ".residual_group.blocks.").replace("norm_first.", "patch_embed.norm.")
        released[name.replace("upsample.", "upsample.0.")] = tensor
    released["layers.0.residual_group.blocks.1.attn_mask"] = torch.zeros(4, 16, 16)
    released["layers.0.residual_group.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16)
    assert from_released(released).keys() == network.state_dict().keys()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scale": 5}, "scale: expected one of 2, 3, 4, got 5"),
        ({"depths": ()}, "depths: expected a layer or more in each group"),
        ({"depths": (300,)}, "at most 256"),
        ({"window": 5}, "window: expected an even number"),
        ({"mechanism": "windows", "alternate": True}, "alternate: expected False"),
        ({"mechanism": "none", "position_kernel": 0}, "position_kernel"),
        ({"position_kernel": 4}, "position_kernel: expected an odd number"),
        ({"num_heads": 7}, "num_heads: expected a divisor of dim"),
        ({"mechanism": "mla"}, "mechanism"),
        ({"gate": "sigmoid"}, "gate: expected none, linear or silu"),
        ({"dims": 3}, "takes no 'dims'; did you mean 'dim'"),
        ({"scale": "x"}, "scale: expected a number"),
    ],
)
def test_what_it_cannot_be_made_with_is_told(given: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message) as refused:
        make_upscaler("upscaler_light", given)
    assert "\n" not in str(refused.value)


def test_a_name_that_is_none_is_told_with_those_that_are():
    with pytest.raises(ValueError, match=f"expected one of {', '.join(NETWORKS)}.*did you mean 'swinir_light'"):
        make_upscaler("swinir_lite", {})


def test_more_numbers_than_there_is_room_for_are_refused_before_any_memory_is_taken():
    with pytest.raises(ValueError, match="room for 1,000"):
        make_upscaler("swinir_light", {"dim": 60_000, "num_heads": 1}, room=1000)


@pytest.mark.parametrize(
    "images",
    [torch.rand(3, 8, 8), torch.rand(1, 4, 8, 8), torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.rand(1, 3, 0, 8)],
)
def test_what_are_no_colour_images_is_told(images: Tensor):
    with pytest.raises(ValueError, match=r"images: expected \(B, 3, H, W\) in floating point"):
        small()(images)

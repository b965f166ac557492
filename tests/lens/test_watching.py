"""Numbers of layers at work, against weights made from what the layers hand to their operators."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import affinear as af
from affinear import ops
from affinear.layers import INLINE, MALA, PLAIN, Attention, AxialRotary
from affinear.lens import scene as scenes
from affinear.lens.watching import MEANS, LayerReport, Watched, watch
from affinear.models.inline_cswin import StripeAttention

WIDTHS: dict[str, Any] = {"embed_dims": (8, 16, 24, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4)}
SWIN: dict[str, Any] = {"img_size": 64, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4}
SMALL: dict[str, dict[str, Any]] = {
    "mavit_tiny": {**WIDTHS, "projection": 24},
    "nalaformer_tiny": WIDTHS,
    "inline_deit_tiny": {"img_size": 40, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "inline_pvt_tiny": {"img_size": 64, **WIDTHS, "mlp_ratios": (2, 2, 2, 2), "stage_types": "IISS"},
    "inline_swin_tiny": {
        "img_size": 56,  # maps of 14 x 14 and 7 x 7, without padding
        "embed_dim": 8,
        "depths": (4, 1),
        "num_heads": (2, 4),
        "window_size": 7,
        "stage_types": "MS2",
    },
    "inline_cswin_tiny": {"img_size": 64, "embed_dim": 8, "depths": (1, 1, 2, 1), "num_heads": (2, 2, 4, 8)},
    "vit_tiny_patch16_224": {
        "img_size": 40,
        "patch_size": 8,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 3,
        "qk_norm": True,
    },
    "swin_tiny_patch4_window7_224": SWIN,
    "pvt_v2_b0": {"embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 3, 4), "depths": (1, 1, 1, 1)},
    "vit_base_patch16_rope_224": {"img_size": 40, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "eva02_tiny_patch14_224": {"img_size": 40, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
    "vit_small_patch16_dinov3": {"img_size": 40, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3},
}


def small(name: str, **given: Any) -> Any:
    """The network of this name, made small, with numbers of its own, in float64."""
    settings: dict[str, Any] = {"num_classes": 5, **SMALL[name], **given}
    model: Any = timm.create_model(name, **settings)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = True
    return model.eval()


def size_of(name: str) -> int:
    return SMALL[name].get("img_size", 64)


def seen(model: Any, images: Tensor, **given: Any) -> Watched:
    with watch(model, **given) as watched, torch.no_grad():
        model(images)
    return watched


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Queries and weights of every call of an attention operator."""
    calls: list[tuple[Tensor, Tensor]] = []
    attention, sdpa = ops.attention, F.scaled_dot_product_attention

    def ours(query: Tensor, key: Tensor, value: Tensor, mechanism: Any, **given: Any) -> Tensor:
        calls.append((query, af.weights(query, key, mechanism, **given)))
        held = list(calls)
        out = attention(query, key, value, mechanism, **given)
        calls[:] = held  # softmax is torch's operator again
        return out

    def theirs(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **given: Any) -> Tensor:
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        calls.append((query.transpose(1, 2), (scores if attn_mask is None else scores + attn_mask).softmax(-1)))
        return sdpa(query, key, value, attn_mask, **given)

    monkeypatch.setattr(ops, "attention", ours)
    monkeypatch.setattr(F, "scaled_dot_product_attention", theirs)
    return calls


def mean(x: Tensor) -> Tensor:
    return x.mean((0, 2))


def by_hand(query: Tensor, weights: Tensor, grid: tuple[int, int] | None, prefix: int) -> dict[str, Tensor]:
    """Every number of a report, from weights (B, H, N, M) that hide a key by giving it all but nothing."""
    sizes, keys = weights.abs(), (weights.abs() > 1e-30).any(1).sum(-1)[:, None].double()
    share = sizes / sizes.sum(-1, keepdim=True)
    entropy = -(share * share.clamp(min=1e-300).log()).sum(-1)
    found = {
        "entropy": mean(entropy),
        "entropy_share": mean(entropy / keys.log()),
        "effective_keys": mean(entropy.exp()),
        "largest_weight": mean(weights.amax(-1)),
        "negative_share": mean((weights < 0).sum(-1) / keys),
        "negative_mass": mean(sizes.where(weights < 0, 0).sum(-1)),
        "absolute_mass": mean(sizes.sum(-1)),
        "row_sum_error": (weights.sum(-1) - 1).abs().amax((0, 2)),
        "norm_correlation": correlation(entropy, query.norm(dim=-1).transpose(1, 2)).mean(0),
    }
    if grid is not None:
        places = list(itertools.product(range(grid[0]), range(grid[1])))
        way = torch.tensor([[math.dist(a, b) for b in places] for a in places]).double()
        near = torch.tensor([[max(abs(a[0] - b[0]), abs(a[1] - b[1])) <= 1 for b in places] for a in places])
        rows = weights[:, :, prefix:, prefix:]
        inside = (rows[:, :1].abs() > 1e-30) & near
        found["neighbourhood"] = mean(rows.where(near, 0).sum(-1))
        found["neighbourhood_uniform"] = mean(inside.sum(-1) / keys[:, :, prefix:]).expand(weights.shape[1])
        found["distance"] = mean((rows.abs() * way).sum(-1) / rows.abs().sum(-1))
    return found


def correlation(first: Tensor, second: Tensor) -> Tensor:
    """Pearson's, of the order; no two numbers are the same."""
    ranks = torch.stack([x.argsort(-1).argsort(-1).double() for x in (first, second)])
    ranks = F.normalize(ranks - ranks.mean(-1, keepdim=True), dim=-1)
    return (ranks[0] * ranks[1]).sum(-1)


def agree(report: LayerReport, expected: dict[str, Tensor]) -> None:
    for name in (*MEANS, "row_sum_error"):
        got = getattr(report, name)
        if name in expected:
            torch.testing.assert_close(got, expected[name], rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert got is None, name


@pytest.mark.parametrize("name", SMALL)
def test_numbers_are_those_of_the_weights_that_the_layers_use(name: str, spied: list[tuple[Tensor, Tensor]]):
    model = small(name).double()
    watched = seen(model, torch.randn(2, 3, size_of(name), size_of(name), dtype=torch.float64))
    calls = iter(spied)
    for report in watched.layers:
        layer = model.get_submodule(report.name)
        prefix = getattr(model, "num_prefix_tokens", 0)
        grids = [report.grid]
        if isinstance(layer, StripeAttention) and report.grid is not None:
            grids.append((report.grid[1], report.grid[0]))
        parts = [by_hand(*next(calls), grid, prefix) for grid in grids]
        agree(report, {key: torch.cat([part[key] for part in parts]) for key in parts[0]})
        assert report.heads == layer.num_heads
        assert report.biased == ("swin" in name and "cswin" not in name and not report.linear)
    assert next(calls, None) is None
    assert watched.unread == ()


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_random_numbers_are_bit_for_bit_the_same(name: str, training: bool):
    model = small(name, drop_path_rate=0.3, drop_rate=0.2).train(training)
    images = torch.randn(3, 3, size_of(name), size_of(name))
    state = {key: value.clone() for key, value in model.state_dict().items()}

    def run() -> tuple[Tensor, Tensor, list[Tensor]]:
        model.load_state_dict(state)
        torch.manual_seed(0)
        out = model(images)
        return out, torch.rand(3), list(torch.autograd.grad(out.square().sum(), list(model.parameters())))

    plain = run()
    with watch(model, rows=7) as watched:
        looked = run()
    assert torch.equal(plain[0], looked[0])
    assert torch.equal(plain[1], looked[1])
    assert all(torch.equal(a, b) for a, b in zip(plain[2], looked[2], strict=True))
    assert watched.layers
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_padding_is_neither_counted_nor_seen_by_our_windows(spied: list[tuple[Tensor, Tensor]]):
    """A map of 18 x 21 in windows of 7 x 7: the same numbers as from the real rows alone."""
    model = small("inline_swin_tiny", stage_types="SS").double()
    reports = seen(model, torch.randn(1, 3, 72, 84, dtype=torch.float64)).layers
    weights, size = spied[0][1], (18, 21)
    real = torch.zeros(21, 21)
    real[: size[0], : size[1]] = 1
    real = real.reshape(3, 7, 3, 7).transpose(1, 2).reshape(9, 49) > 0
    assert reports[0].rows == size[0] * size[1] == real.sum()
    rows = weights.transpose(1, 2)[real]
    torch.testing.assert_close(reports[0].entropy, torch.special.entr(rows).sum(-1).mean(0))
    keys = (rows != 0).sum(-1).double()
    torch.testing.assert_close(reports[0].entropy_share, (torch.special.entr(rows).sum(-1) / keys.log()).mean(0))
    assert {report.rows for report in reports[:2]} == {size[0] * size[1]}


def test_padding_of_timm_is_seen_but_not_counted():
    model = small("swin_tiny_patch4_window7_224", strict_img_size=False)
    report = seen(model, torch.randn(2, 3, 56, 40)).layers[0]
    assert report.rows == 2 * 14 * 10
    assert report.keys == 16


def test_passes_are_averaged_by_their_rows():
    model = small("vit_tiny_patch16_224", dynamic_img_size=True).double()
    sizes = ((1, 40, 40), (3, 24, 56), (2, 40, 40))
    batches = [torch.randn(n, 3, h, w, dtype=torch.float64) for n, h, w in sizes]
    with watch(model) as watched, torch.no_grad():
        for images in batches:
            model(images)
    alone = [seen(model, images).layers for images in batches]
    assert alone[1][0].grid == (3, 7)
    for i, report in enumerate(watched.layers):
        rows = torch.tensor([float(part[i].rows) for part in alone]).double()
        assert report.rows == rows.sum()
        for name in ("entropy", "largest_weight", "absolute_mass", "entropy_share"):
            each = torch.stack([getattr(part[i], name) for part in alone])
            torch.testing.assert_close(getattr(report, name), (rows[:, None] * each).sum(0) / rows.sum())
        patches = torch.tensor([25.0, 3 * 21, 2 * 25]).double()[:, None]
        each = torch.stack([found for part in alone if (found := part[i].distance) is not None])
        torch.testing.assert_close(report.distance, (patches * each).sum(0) / patches.sum())
        assert torch.equal(report.row_sum_error, torch.stack([part[i].row_sum_error for part in alone]).amax(0))


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_swin_tiny", "swin_tiny_patch4_window7_224"])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_no_more_rows_than_asked_for(name: str, rows: int):
    for report in seen(small(name), torch.randn(2, 3, size_of(name), size_of(name)), rows=rows).layers:
        assert 0 < report.rows <= 2 * rows
        assert (report.norm_correlation is None) == (rows < 3)


def test_chosen_rows_come_near_all_of_them():
    model = small("inline_deit_tiny", img_size=128, patch_size=4).double()
    images = torch.randn(2, 3, 128, 128, dtype=torch.float64)
    for few, whole in zip(seen(model, images, rows=300).layers, seen(model, images).layers, strict=True):
        torch.testing.assert_close(few.entropy, whole.entropy, rtol=0.05, atol=0.05)
        torch.testing.assert_close(few.distance, whole.distance, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ["mavit_tiny", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"])
def test_checkpointing_counts_once_and_changes_no_gradient(name: str):
    model = small(name, drop_path_rate=0.0).train()
    images = torch.randn(2, 3, size_of(name), size_of(name))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()

    def run() -> tuple[list[LayerReport], list[Tensor]]:
        with watch(model) as watched:
            gradients = torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
        return watched.layers, list(gradients)

    plain = run()
    model.set_grad_checkpointing()
    again = run()
    for ours, theirs in zip(again[0], plain[0], strict=True):
        assert ours.rows == theirs.rows
        assert torch.equal(ours.entropy, theirs.entropy)
    for ours, theirs in zip(again[1], plain[1], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["mavit_tiny", "inline_swin_tiny", "vit_tiny_patch16_224"])
def test_autocast_keeps_outputs_and_gradients(name: str):
    model = small(name)
    images = torch.randn(2, 3, size_of(name), size_of(name))

    def run() -> tuple[Tensor, list[Tensor]]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(images)
        return out, list(torch.autograd.grad(out.float().square().sum(), list(model.parameters())))

    plain = run()
    with watch(model) as watched:
        looked = run()
    assert torch.equal(plain[0], looked[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1], looked[1], strict=True))
    exact = seen(model, images).layers
    for ours, theirs in zip(watched.layers, exact, strict=True):
        torch.testing.assert_close(ours.entropy, theirs.entropy, rtol=0.1, atol=0.1)
        if ours.mechanism in ("softmax", "inline"):
            assert ours.row_sum_error.max() < 1e-4  # widened: half precision would be off by 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(dtype: torch.dtype):
    model = small("vit_tiny_patch16_224").to(dtype)
    images = torch.randn(2, 3, 40, 40, dtype=dtype)
    with torch.no_grad():
        plain = model(images)
        with watch(model) as watched:
            assert torch.equal(model(images), plain)
    for report in watched.layers:
        assert report.entropy.dtype == torch.float64
        assert report.row_sum_error.max() < 1e-5


def test_the_mask_of_a_layer_is_respected(spied: list[tuple[Tensor, Tensor]]):
    tokens, mask = torch.randn(2, 20, 16, dtype=torch.float64), torch.rand(2, 20) < 0.7
    mask[:, 0] = True
    layer = Attention(16, 2, INLINE, dtype=torch.float64)
    with watch(layer) as watched, torch.no_grad():
        layer(tokens, (4, 5), key_mask=mask)
    (report,) = watched.layers
    rows = spied[0][1].transpose(1, 2)[mask]  # (real rows, H, M)
    assert report.name == ""
    assert report.rows == mask.sum()
    torch.testing.assert_close(report.negative_mass, -rows.clamp(max=0).sum(-1).mean(0))
    keys = mask.sum(-1).repeat_interleave(mask.sum(-1)).double()
    torch.testing.assert_close(report.negative_share, ((rows < 0).sum(-1) / keys[:, None]).mean(0))


@pytest.mark.parametrize("given", ["causal", "bool", "float"])
def test_the_mask_of_timm_is_respected(given: str):
    layer = timm.layers.Attention(16, 2).double()  # pyright: ignore[reportAttributeAccessIssue]
    tokens = torch.randn(3, 9, 16, dtype=torch.float64)
    bias = torch.randn(3, 1, 9, 9, dtype=torch.float64)
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    arguments: dict[str, dict[str, Any]] = {
        "causal": {"is_causal": True},
        "bool": {"attn_mask": visible},
        "float": {"attn_mask": bias},
    }
    with watch(layer) as watched, torch.no_grad():
        layer(tokens, **arguments[given])
        query, key, _ = layer.qkv(tokens).reshape(3, 9, 3, 2, 8).permute(2, 0, 3, 1, 4)
    scores = query @ key.mT / math.sqrt(8)
    scores = scores + bias if given == "float" else scores.masked_fill(~visible, -torch.inf)
    (report,) = watched.layers
    torch.testing.assert_close(report.entropy, mean(torch.special.entr(scores.softmax(-1)).sum(-1)))
    assert report.biased
    assert report.grid is None
    assert report.distance is None


class Biggest(TorchDispatchMode):
    """The largest storage that any operator made, in bytes."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                self.size = max(self.size, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("parts", [MALA, PLAIN, INLINE])
def test_thousands_of_tokens_need_little_memory(parts: Any, monkeypatch: pytest.MonkeyPatch):
    """4,096 tokens of two images and two heads are 268 MB of weights in float32; no tensor may have a tenth of that."""
    monkeypatch.setattr(scenes, "MOST_WEIGHTS", 2**20)
    layer, tokens = Attention(32, 2, parts), torch.randn(2, 4096, 32)
    rotary = AxialRotary(16)(tokens.unflatten(1, (64, 64))) if parts.rotary else None
    with Biggest() as made, watch(layer, rows=256) as watched, torch.no_grad():
        layer(tokens, (64, 64), rotary=rotary)
    assert made.size <= 2 * 8 * 2**20
    (report,) = watched.layers
    assert report.rows == 512
    kept = [tensor for tally in watched.tallies.values() for tensor in tally.totals.values()]
    assert sum(tensor.untyped_storage().nbytes() for tensor in kept) < 1000


def test_what_other_hooks_make_of_the_input_is_what_counts():
    layer, tokens = timm.layers.Attention(16, 2), torch.randn(2, 9, 16)  # pyright: ignore[reportAttributeAccessIssue]
    with watch(layer) as loud:
        hook = layer.register_forward_pre_hook(lambda _, args: (5 * args[0],))
        layer(tokens)
    hook.remove()
    with watch(layer) as plain:
        layer(5 * tokens)
    assert torch.equal(loud.layers[0].entropy, plain.layers[0].entropy)


def test_hooks_leave_with_an_exception():
    model = small("vit_tiny_patch16_224")
    with pytest.raises(RuntimeError, match="stop"), watch(model):
        raise RuntimeError("stop")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(module._forward_hooks_with_kwargs for module in model.modules())


def test_a_network_without_attention_is_refused():
    model = timm.create_model("resnet18")
    with pytest.raises(
        ValueError, match=r"model: expected attention layers, got none in ResNet; what is hooked is aff"
    ):
        watch(model).__enter__()


def test_a_compiled_network_is_refused():
    model = small("vit_tiny_patch16_224")
    with pytest.raises(
        ValueError, match="model: expected a network that is not compiled, got a compiled one; pass the"
    ):
        watch(torch.compile(model, backend="eager")).__enter__()  # pyright: ignore[reportArgumentType]
    model.blocks[0].compile(backend="eager")
    with pytest.raises(ValueError, match=r"got a compiled one, in blocks\.0; pass the original"):
        watch(model).__enter__()


def test_only_some_layers():
    model = small("mavit_tiny")
    assert [r.name for r in seen(model, torch.randn(1, 3, 64, 64), layers="stages.[01]*").layers] == [
        "stages.0.blocks.0.attn",
        "stages.1.blocks.0.attn",
    ]
    with pytest.raises(ValueError, match=r"layers: expected a pattern that fits a name such as stages\.0"):
        watch(model, layers="blocks").__enter__()
    with pytest.raises(ValueError, match="rows: expected at least one, or None for all, got 0"):
        watch(model, rows=0).__enter__()


def test_layers_nobody_can_read_are_named():
    class StrangeAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.Sequential(StrangeAttention(), small("vit_tiny_patch16_224"))
    watched = seen(model, torch.randn(2, 3, 40, 40), rows=3)
    assert watched.unread == ("0 (StrangeAttention)",)
    assert [report.grid for report in watched.layers] == [(5, 5), (5, 5)]
    assert [report.rows for report in watched.layers] == [6, 6]


def test_layers_that_were_not_called_have_no_report():
    with watch(small("vit_tiny_patch16_224")) as watched:
        pass
    assert watched.layers == []


def test_released_rows_are_far_from_one_and_the_papers_are_not():
    images = torch.randn(1, 3, 64, 64)
    released, fixed = (
        seen(small("mavit_tiny", mechanism=name), images).layers[0] for name in ("mala_released", "mala")
    )
    assert released.row_sum_error.max() > 0.01
    assert fixed.row_sum_error.max() < 1e-4
    assert fixed.linear
    assert not seen(small("mavit_tiny"), images).layers[-1].linear

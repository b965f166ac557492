"""An image's features do not depend on the sizes of the images beside it."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from affinear.layers import LearnedPosition, Windows, mask_of, masked_norm
from affinear.models.catalogue import names
from affinear.models.features import Features

SIZES = [(64, 96), (75, 41), (33, 130)]
SMALL: dict[str, dict[str, Any]] = {
    "mavit_tiny": {"embed_dims": (16, 16, 32, 32), "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2), "projection": 8},
    "nalaformer_tiny": {
        "embed_dims": (16, 16, 32, 32), "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2), "projection": 8,
    },
    "inline_pvt_tiny": {"embed_dims": (16, 16, 32, 32), "num_heads": (1, 1, 2, 2), "mlp_ratios": (2, 2, 2, 2)},
    "inline_swin_tiny": {"embed_dim": 16, "num_heads": (1, 1, 2, 2), "depths": (2, 2, 2, 2)},
    "inline_cswin_tiny": {"embed_dim": 16, "num_heads": (2, 2, 2, 4), "depths": (1, 1, 2, 1)},
    "ravlt_tiny": {"embed_dims": (16, 16, 32, 32), "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2), "projection": 8},
    "mila_tiny": {"embed_dim": 16, "num_heads": (1, 2, 2, 4), "depths": (1, 1, 2, 1)},
}  # fmt: skip
CASES = [
    ("mavit_tiny", {}),
    ("mavit_tiny", {"stage_types": "llll", "mechanism": "mala"}),
    ("mavit_tiny", {"stage_types": "llll"}),
    ("nalaformer_tiny", {}),
    ("nalaformer_tiny", {"stage_types": "llll"}),
    ("inline_pvt_tiny", {}),
    ("inline_pvt_tiny", {"stage_types": "ISSS", "sr_ratios": (8, 4, 2, 1)}),
    ("inline_cswin_tiny", {}),
    ("inline_cswin_tiny", {"stage_types": "IIII"}),
    ("inline_swin_tiny", {"stage_types": "IIII"}),
    ("ravlt_tiny", {}),
    ("ravlt_tiny", {"stage_types": "llll", "mechanism": "nala"}),
    ("mila_tiny", {}),
]
UNKNOWING = ("rmt", "secvit")  # these cannot tell padding from image


def test_every_hierarchical_family_is_here():
    families = {name.rpartition("_")[0] for name in names() if not name.endswith("_linear")}
    assert families == {name.rpartition("_")[0] for name in SMALL} | {"inline_deit", *UNKNOWING}


@pytest.mark.parametrize("family", UNKNOWING)
def test_a_network_that_cannot_know_padding_refuses_it(family: str):
    model = timm.create_model(f"{family}_tiny", depths=(1, 1, 1, 1)).eval()
    assert not Features(f"{family}_tiny", model_args={"depths": (1, 1, 1, 1)}).masks
    with pytest.raises(ValueError, match=r"mask: expected None, as .* cannot tell padding from image, got one"):
        model.forward_features(torch.zeros(1, 3, 64, 64), mask=mask_of([(32, 64)], (64, 64)))  # type: ignore[operator]


def network(name: str, **given: Any) -> Any:
    """A small one whose norms do something: a fresh batch norm hides a padding that leaks through it."""
    model = timm.create_model(name, num_classes=0, **(SMALL[name] | given)).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias, 0, 0.5)
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            module.running_mean.normal_()
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias, 0, 0.5)
    return model


def batch_of(images: list[Tensor]) -> Tensor:
    """Images in the corner of one batch, over padding that would be noticed."""
    height, width = (max(image.shape[side] for image in images) for side in (1, 2))
    batch = torch.full((len(images), 3, height, width), 7.0, dtype=images[0].dtype)
    for place, image in zip(batch, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image
    return batch


@pytest.mark.parametrize(("name", "given"), CASES)
@torch.no_grad()
def test_an_image_has_the_features_it_has_alone(name: str, given: dict[str, Any]):
    model = network(name, **given)
    images = [torch.randn(3, *size, dtype=torch.float64) for size in SIZES]
    batch = batch_of(images)
    mask = mask_of(SIZES, (batch.shape[2], batch.shape[3]))
    features, maps = model.forward_intermediates(batch, mask=mask)
    torch.testing.assert_close(model.forward_features(batch, mask=mask), features)
    unmasked = model.forward_intermediates(batch, intermediates_only=True)
    for i, image in enumerate(images):
        alone = model.forward_intermediates(image[None], intermediates_only=True)
        for own, together, as_published in zip(alone, maps, unmasked, strict=True):
            rows, columns = own.shape[2:]
            torch.testing.assert_close(together[i, :, :rows, :columns], own[0], rtol=1e-9, atol=1e-9)
            assert not together[i, :, rows:].any()
            assert not together[i, :, :, columns:].any()
            assert not torch.allclose(as_published[i, :, :rows, :columns], own[0], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_shifted_windows_agree_where_the_image_has_more_than_one():
    model = network("inline_swin_tiny", stage_types="SSSS", window_size=16, img_size=64)
    sizes = [(96, 160), (130, 75)]
    images = [torch.randn(3, *size, dtype=torch.float64) for size in sizes]
    batch = batch_of(images)
    together = model.forward_intermediates(batch, mask=mask_of(sizes, batch.shape[2:]), intermediates_only=True)  # type: ignore[arg-type]
    for i, image in enumerate(images):
        alone = model.forward_intermediates(image[None], intermediates_only=True)
        own = alone[0]
        torch.testing.assert_close(together[0][i, :, : own.shape[2], : own.shape[3]], own[0], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_tokens_of_a_column_do_not_see_padding():
    model = timm.create_model("inline_deit_tiny", depth=2, num_classes=0).double().eval()
    nn.init.normal_(model.get_submodule("position").table)  # type: ignore[arg-type]
    images = [torch.randn(3, *size, dtype=torch.float64) for size in SIZES]
    batch = batch_of(images)
    mask = mask_of(SIZES, (batch.shape[2], batch.shape[3]))
    _, maps = model.forward_intermediates(batch, mask=mask)  # type: ignore[operator]
    for i, image in enumerate(images):
        _, alone = model.forward_intermediates(image[None])  # type: ignore[operator]
        for own, together in zip(alone, maps, strict=True):
            inside = together[i, :, : own.shape[2], : own.shape[3]]
            torch.testing.assert_close(inside, own[0], rtol=1e-9, atol=1e-9)


def test_gradient_and_batch_statistics_come_from_images_alone():
    """One size, padded or not: the same gradient, and the same running statistics."""
    size = (64, 96)
    plain, padded = network("mavit_tiny"), network("mavit_tiny")
    padded.load_state_dict(plain.state_dict())
    plain.train()
    padded.train()
    padded.set_grad_checkpointing()
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    larger = torch.full((2, 3, 100, 130), 3.0, dtype=torch.float64)
    larger[:, :, :64, :96] = images
    plain.forward_features(images).square().sum().backward()
    padded.forward_features(larger, mask=mask_of([size, size], (100, 130))).square().sum().backward()
    for (name, own), other in zip(plain.named_parameters(), padded.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None), name
        if own.grad is not None:  # a bias before a batch norm has none but for rounding
            torch.testing.assert_close(other.grad, own.grad, rtol=1e-7, atol=1e-7)
    for (name, own), other in zip(plain.named_buffers(), padded.buffers(), strict=True):
        torch.testing.assert_close(other, own, msg=lambda text, name=name: f"{name}: {text}")


def test_a_batch_norm_counts_images_alone():
    norm, x = nn.BatchNorm2d(4), torch.randn(2, 4, 5, 6)
    out = masked_norm(norm, x, mask_of([(5, 2), (3, 6)], (5, 6)))
    inside = torch.cat((x[0, :, :, :2].flatten(1), x[1, :, :3].flatten(1)), dim=1)
    assert norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, 0.1 * inside.mean(dim=1))
    expected = (x[0, :, :, :2] - inside.mean(1)[:, None, None]) / inside.var(1, unbiased=False).sqrt()[:, None, None]
    torch.testing.assert_close(out[0, :, :, :2], expected, rtol=1e-4, atol=1e-4)
    assert not out[0, :, :, 2:].any()


def test_learned_positions_are_resized_to_each_image():
    table = LearnedPosition((7, 9), 4)
    out = table(torch.zeros(2, 8, 12, 4), mask_of([(7, 9), (8, 5)], (8, 12)))
    torch.testing.assert_close(out[0, :7, :9], table.table[0])
    torch.testing.assert_close(out[1, :8, :5], table(torch.zeros(1, 8, 5, 4))[0])


def test_windows_know_padding_of_the_batch():
    mask = mask_of([(3, 4), (6, 2)], (6, 4))
    real = Windows((6, 4), (2, 2)).real_of(torch.zeros(2, 6, 4, 1), mask)
    assert real is not None
    assert real.sum().item() == mask.sum().item()


@pytest.mark.parametrize("size", [(0, 3), (4, 3), (2, 9)])
def test_sizes_beyond_the_batch_are_refused(size: tuple[int, int]):
    with pytest.raises(ValueError, match=f"sizes: expected images of 1 x 1 to 3 x 3, .* got {size[0]} x {size[1]}"):
        mask_of([(1, 1), size], (3, 3))

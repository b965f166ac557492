"""The heads are the published ones: UperNet is transformers', SemanticFPN follows its definition."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from affinear.models.heads import FCN, HEADS, Segmenter, SemanticFPN, UperNet

CHANNELS = [8, 12, 16, 20]
SMALL: dict[str, Any] = {"embed_dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)}


def maps(height: int = 24, width: int = 40, batch: int = 2) -> list[Tensor]:
    """Maps at strides 4 to 32 whose sides are rounded up."""
    return [
        torch.randn(batch, dim, -(-height // 2**i), -(-width // 2**i), dtype=torch.float64)
        for i, dim in enumerate(CHANNELS)
    ]


def shaken(module: nn.Module) -> Any:
    """Numbers in norms and biases too."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    return module.double().eval()


UPERNET = (
    (r"^decode_head\.psp_modules\.(\d)\.1\.", r"head.pooling.pools.\1.1."),
    (r"^decode_head\.bottleneck\.", "head.pooling.join."),
    (r"^decode_head\.lateral_convs\.", "head.lateral."),
    (r"^decode_head\.fpn_convs\.", "head.output."),
    (r"^decode_head\.fpn_bottleneck\.", "head.join."),
    (r"^decode_head\.classifier\.", "head.classifier.conv."),
    (r"^auxiliary_head\.convs\.0\.", "helper.conv."),
    (r"^auxiliary_head\.classifier\.", "helper.classifier.conv."),
    (r"\.batch_norm\.", ".norm."),
)


@torch.no_grad()
def test_upernet_and_its_helper_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    backbone = transformers.ConvNextConfig(hidden_sizes=CHANNELS, depths=[1] * 4, out_features=["stage1"])
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=24, auxiliary_in_channels=CHANNELS[2], auxiliary_channels=12, num_labels=5
    )
    from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

    theirs = nn.ModuleDict(
        {"decode_head": UperNetHead(config, CHANNELS), "auxiliary_head": UperNetFCNHead(config, CHANNELS[2])}
    )
    shaken(theirs)
    ours: Any = nn.Module()
    ours.head, ours.helper = UperNet(CHANNELS, 5, width=24), FCN(CHANNELS[2], 5, width=12)
    state: dict[str, Tensor] = {}
    for name, tensor in theirs.state_dict().items():
        for pattern, ours_is in UPERNET:
            name = re.sub(pattern, ours_is, name)
        state[name] = tensor
    ours.load_state_dict(state)
    ours.double().eval()
    features = maps()
    torch.testing.assert_close(ours.head(features), theirs["decode_head"](features), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.helper(features[2]), theirs["auxiliary_head"](features), rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("size", [(24, 40), (23, 37)])
def test_semantic_fpn_follows_its_definition(size: tuple[int, int]):
    head = shaken(SemanticFPN(CHANNELS, 5, width=16, head_width=12))
    features = maps(*size)
    neck: list[Tensor] = []
    for i in (3, 2, 1, 0):
        x = head.neck.lateral[i](features[i])
        if neck:
            x = x + F.interpolate(neck[0], size=x.shape[2:], mode="nearest")
        neck.insert(0, x)
    neck = [conv(x) for conv, x in zip(head.neck.output, neck, strict=True)]

    def block(layer: Any, x: Tensor) -> Tensor:
        x = F.conv2d(x, layer.conv.weight, padding=1)
        norm = layer.norm
        return F.relu(F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias))

    def twice(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)

    expected = block(head.levels[0][0], neck[0])
    for i, convolutions in ((1, 1), (2, 2), (3, 3)):
        x = neck[i]
        for j in range(convolutions):
            x = twice(block(head.levels[i][2 * j], x))
        expected = expected + F.interpolate(x, size=expected.shape[2:], mode="bilinear", align_corners=False)
    expected = F.conv2d(expected, head.classifier.conv.weight, head.classifier.conv.bias)
    torch.testing.assert_close(head(features), expected, rtol=1e-9, atol=1e-9)
    assert [sum(isinstance(layer, nn.Sequential) for layer in level) for level in head.levels] == [1, 1, 2, 3]


def test_published_sizes():
    """Parameters of the heads over MAViT-T's channels and 150 classes, counted by hand from the definitions."""
    channels, classes = [64, 128, 256, 512], 150
    fpn = sum(256 * dim + 256 for dim in channels) + 4 * (9 * 256 * 256 + 256)
    scale = 4 * (9 * 256 * 128 + 256) + 3 * (9 * 128 * 128 + 256)
    assert count(SemanticFPN(channels, classes)) == fpn + scale + 128 * classes + classes
    pools = 4 * (512 * 512 + 1024) + 9 * (512 + 2048) * 512 + 1024
    pyramid = sum(512 * dim + 1024 for dim in channels[:3]) + 3 * (9 * 512 * 512 + 1024)
    assert count(UperNet(channels, classes)) == pools + pyramid + 9 * 2048 * 512 + 1024 + 512 * classes + classes


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("backbone", ["mavit_tiny", "mavit_tiny_linear"])
def test_every_weight_of_a_segmenter_learns(head: str, backbone: str):
    network = Segmenter(backbone, head, num_classes=3, model_args=SMALL)
    logits = network(torch.randn(2, 3, 75, 64), [(75, 64), (40, 64)])
    assert len(logits) == (2 if head == "upernet" else 1)
    assert all(out.shape[:2] == (2, 3) for out in logits)
    sum(out.square().sum() for out in logits).backward()  # type: ignore[union-attr]
    assert [name for name, parameter in network.named_parameters() if parameter.grad is None] == []


@torch.no_grad()
@pytest.mark.parametrize("backbone", ["swin_tiny_patch4_window7_224", "resnet18", "convnext_atto"])
def test_networks_of_others_carry_the_heads(backbone: str):
    network = Segmenter(backbone, num_classes=3).eval()
    [logits] = network(torch.randn(1, 3, 90, 70))
    assert logits.shape == (1, 3, 23, 18)


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("backbone", "given"), [("mavit_tiny", SMALL), ("resnet18", {})])
def test_logits_of_an_image_do_not_depend_on_the_sizes_of_its_neighbours(
    backbone: str, given: dict[str, Any], head: str
):
    network = shaken(Segmenter(backbone, head, num_classes=3, model_args=given)).double().eval()
    batch, sizes = torch.randn(3, 3, 80, 96, dtype=torch.float64), [(80, 50), (37, 96), (80, 96)]
    [told] = network(batch, torch.tensor(sizes))
    for i, (rows, columns) in enumerate(sizes):
        [alone] = network(batch[i : i + 1, :, :rows, :columns])
        height, width = alone.shape[2:]
        torch.testing.assert_close(told[i, :, :height, :width], alone[0], rtol=1e-9, atol=1e-9)
        assert not told[i, :, height:].any()
        assert not told[i, :, :, width:].any()
    as_published = Segmenter(backbone, head, num_classes=3, masked=False, model_args=given).eval()
    torch.testing.assert_close(as_published(batch.float(), sizes)[0], as_published(batch.float())[0], rtol=0, atol=0)


def test_an_unknown_head_is_refused():
    with pytest.raises(ValueError, match="head: expected one of semantic_fpn, upernet, got 'fcn'"):
        Segmenter("mavit_tiny", "fcn")

"""Networks as ONNX files: traced, translated, and compared with torch before anybody else sees them.

Needs onnx, onnxscript and onnxruntime: pip install 'affinear[export]'.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError
from torch.export import Dim, ExportedProgram

from .. import __version__
from .inline_cswin import StripeAttention
from .inline_swin import SwinBlock, WindowAttention
from .secvit import ClusterAttention

if TYPE_CHECKING:
    from onnx import ModelProto

NEEDS = ("onnx", "onnxscript", "onnxruntime")
MIN_SIDE = 32
MIN_OPSET = 18
TOLERANCE = 1e-4
PROTOBUF_LIMIT = 2**31 - 1
AXES = {0: "batch", 2: "height", 3: "width"}
# Of what is compared beside the size asked for: the smallest, one that is not square, one that is odd.
OTHER_SIZES = ((MIN_SIDE, MIN_SIDE), (64, 96), (45, 71))


@dataclass(frozen=True)
class Exported:
    """A network as ONNX, and what is known about it.

    Attributes:
        content: The file, weights included.
        dynamic: Names of the axes of the input that may have any length: "batch", or "batch", "height", "width".
        checked: Shapes of the images whose results were compared with torch's.
        error: The largest relative error among them.
    """

    content: bytes
    dynamic: tuple[str, ...]
    checked: tuple[tuple[int, ...], ...]
    error: float


def export_onnx(
    model: nn.Module,
    *,
    size: tuple[int, int],
    dynamic_size: bool | None = None,
    opset: int = 20,
    images: Tensor | None = None,
    progress: Callable[[str], None] | None = None,
) -> Exported:
    """A network as ONNX, in float32, from "image" (B, C, H, W) to "logits" (B, classes); the batch may be any.

    The model stays as it is: a copy on the CPU, in evaluation mode, is exported. onnxruntime then runs the file on
    random images, and what it says must be what torch says. Nothing is written.

    Args:
        model: A network of `affinear.models`; others are tried.
        size: Height and width, each at least 32; the only ones that the file takes if it is not dynamic.
        dynamic_size: Whether height and width may be any from 32. None makes it so where the network allows it:
            networks that cut their maps into windows or clusters do not.
        opset: Version of ONNX's operators, from 18.
        images: Real images (B, C, H, W), as the network wants them, to compare on as well.
        progress: Told what is being done, as it takes minutes.

    Returns:
        The file, and what is known about it.

    Raises:
        ImportError: If onnx, onnxscript or onnxruntime is missing.
        ValueError: If the arguments do not fit the network, or the network does not fit in a file.
        RuntimeError: If onnxruntime does not say what torch says.
    """
    require()
    _check_arguments(model, size, opset)
    tell = progress or _ignore
    network = _evaluated(model)
    shape = (2, _channels(network), *size)
    tell("tracing the network")
    with _quiet():
        program, dynamic = _trace(network, shape, dynamic_size)
    tell("translating it to ONNX")
    with _quiet():
        content = _translate(program, dynamic, opset, _facts(model, shape))
    tell("comparing it with torch")
    shapes = _shapes(shape, dynamic)
    run = _runner(content)
    error = _compare(run, network, shapes)
    if images is not None and ("height" in dynamic or images.shape[2:] == size):
        shapes, error = (*shapes, tuple(images.shape)), max(error, _error(run, network, images.float()))
    return Exported(content, dynamic, shapes, error)


def require() -> None:
    """Raise ImportError, with one sentence on how to get it, if a package is missing."""
    missing = [name for name in NEEDS if find_spec(name) is None]
    if missing:
        raise ImportError(f"Exporting needs {' and '.join(missing)}: pip install 'affinear[export]'")


def fixing_layer(model: nn.Module) -> str | None:
    """The kind of layer that ties a network's graph to one image size, as windows and clusters do; None if none does.

    Example:
        >>> from affinear.models import InLineCSwin
        >>> from affinear.models.export import fixing_layer
        >>> fixing_layer(InLineCSwin(embed_dim=16, depths=(1, 1, 1, 1)))
        'StripeAttention'
    """
    for module in model.modules():
        windowed = isinstance(module, SwinBlock) and module.window is not None
        clustered = isinstance(module, ClusterAttention) and module.clusters > 1
        if windowed or clustered or isinstance(module, WindowAttention | StripeAttention):
            return type(module).__name__
    return None


def _check_arguments(model: nn.Module, size: tuple[int, int], opset: int) -> None:
    least = min(MIN_SIDE, *_config(model).get("input_size", (MIN_SIDE,))[1:], MIN_SIDE)  # trunks are made for less
    if min(size) < least:
        raise ValueError(f"size: expected at least {least} x {least}, got {size[0]} x {size[1]}")
    if opset < MIN_OPSET:
        raise ValueError(f"opset: expected at least {MIN_OPSET}, got {opset}")
    _check_bytes(sum(4 * tensor.numel() for tensor in model.state_dict().values()))


def _check_bytes(count: int) -> None:
    if count > PROTOBUF_LIMIT:
        raise ValueError(f"model: expected at most 2 GB, all that one ONNX file can hold, got {count / 2**30:.2f} GB")


def _evaluated(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to("cpu", torch.float32).eval().requires_grad_(False)


def _channels(network: nn.Module) -> int:
    """Channels of the images, which the first convolution knows."""
    return next((module.in_channels for module in network.modules() if isinstance(module, nn.Conv2d)), 3)


def _name(model: nn.Module) -> str:
    return str(_config(model).get("architecture") or type(model).__name__)


def _config(model: nn.Module) -> Mapping[str, Any]:
    """What timm keeps beside a network; nothing if timm did not make it."""
    config = getattr(model, "pretrained_cfg", None)
    return config if isinstance(config, Mapping) else {}


def _facts(model: nn.Module, shape: Sequence[int]) -> dict[str, str]:
    """What whoever runs the file has to know about it."""
    config = _config(model)
    facts: dict[str, Any] = {
        "producer": f"affinear {__version__}",
        "model": _name(model),
        "input_size": list(shape[1:]),
        "num_classes": getattr(model, "num_classes", None),
        **{name: config.get(name) for name in ("mean", "std", "interpolation")},
        "class_names": config.get("label_names"),
    }
    return {
        name: fact if isinstance(fact, str) else json.dumps(fact) for name, fact in facts.items() if fact is not None
    }


def _trace(
    network: nn.Module, shape: tuple[int, ...], dynamic_size: bool | None
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """The network's graph, and the names of the axes that it leaves open."""
    layer = fixing_layer(network)
    if dynamic_size is not False and layer is None:
        try:
            return _trace_any_size(network, shape), ("batch", "height", "width")
        except (UserError, AssertionError) as error:  # timm's own networks assert the size that they were made for
            if dynamic_size:
                raise ValueError(_why_fixed(network, "asks how large the image is")) from error
    elif dynamic_size:
        raise ValueError(_why_fixed(network, f"cuts its maps into windows or clusters ({layer})"))
    images = torch.zeros(shape)
    return torch.export.export(network, (images,), dynamic_shapes=({0: Dim("batch")},), strict=False), ("batch",)


def _why_fixed(network: nn.Module, reason: str) -> str:
    return (
        f"dynamic_size: {_name(network)} {reason}, so its graph is made for one size; "
        "let dynamic_size be False and make one file for each size"
    )


def _trace_any_size(network: nn.Module, shape: tuple[int, ...]) -> ExportedProgram:
    # From 64 pixels the smallest map has two rows. Tracing treats lengths of one apart, though the graph is the same:
    # that it is, images of 32 pixels show when the file is compared.
    side = 2 * MIN_SIDE
    lengths = {0: Dim("batch"), 2: Dim("height", min=side), 3: Dim("width", min=side)}
    images = torch.zeros(*shape[:2], side + MIN_SIDE, side)
    return torch.export.export(network, (images,), dynamic_shapes=(lengths,), strict=False)


def _translate(program: ExportedProgram, dynamic: Sequence[str], opset: int, facts: dict[str, str]) -> bytes:
    """The file's content."""
    import onnx

    made = torch.onnx.export(
        program, dynamo=True, opset_version=opset, input_names=["image"], output_names=["logits"], verbose=False
    )
    assert made is not None
    proto = made.model_proto
    got = next(entry.version for entry in proto.opset_import if not entry.domain)
    if got != opset:
        raise ValueError(f"opset: expected one that torch {torch.__version__} can make, such as {got}, got {opset}")
    _name_axes(proto, dynamic)
    _forget_sources(proto)
    proto.producer_name, proto.producer_version = "affinear", __version__
    onnx.helper.set_model_props(proto, facts)
    _check_bytes(proto.ByteSize())
    return proto.SerializeToString()


def _name_axes(proto: ModelProto, dynamic: Sequence[str]) -> None:
    """Readable names for the open axes in place of the tracer's own."""
    image = proto.graph.input[0].type.tensor_type.shape.dim
    names = {image[axis].dim_param: name for axis, name in AXES.items() if name in dynamic}
    for value in (*proto.graph.input, *proto.graph.output):
        for length in value.type.tensor_type.shape.dim:
            if length.dim_param in names:
                length.dim_param = names[length.dim_param]


def _forget_sources(proto: ModelProto) -> None:
    """Take out what the tracer notes of the source, paths on this machine among it, and lengths in its own names."""
    proto.graph.ClearField("value_info")
    for part in (*proto.graph.node, *proto.graph.initializer, *proto.graph.input, *proto.graph.output, proto.graph):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")


def _shapes(shape: tuple[int, ...], dynamic: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the images to compare: more than one batch, and more than one size where any will do."""
    _, channels, *size = shape
    others = OTHER_SIZES if "height" in dynamic else ()
    return ((1, channels, *size), (3, channels, *size), *((2, channels, *other) for other in others))


def _runner(content: bytes) -> Callable[[Tensor], Tensor]:
    """What onnxruntime makes of images."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.as_tensor(session.run(["logits"], {"image": images.numpy()})[0])


def _compare(run: Callable[[Tensor], Tensor], network: nn.Module, shapes: Sequence[tuple[int, ...]]) -> float:
    """The largest relative error on fresh random images."""
    generator = torch.Generator()
    generator.seed()
    return max(_error(run, network, torch.randn(shape, generator=generator)) for shape in shapes)


def _error(run: Callable[[Tensor], Tensor], network: nn.Module, images: Tensor) -> float:
    with torch.no_grad():
        truth = network(images)
    found = run(images)
    shape = " x ".join(map(str, images.shape))
    if found.shape != truth.shape:
        raise RuntimeError(f"onnxruntime gives {tuple(found.shape)} for images {shape}, torch {tuple(truth.shape)}")
    error = float((found - truth).norm() / truth.norm().clamp_min(torch.finfo(truth.dtype).tiny))
    if not error < TOLERANCE:  # not a number is no agreement either
        raise RuntimeError(
            f"onnxruntime and torch differ by {error:.1e} for images {shape}, more than {TOLERANCE:.0e}; "
            "nothing was exported"
        )
    return error


def _ignore(_: str) -> None:
    """Nobody asked."""


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Without gradients, and without what torch's exporter prints, logs and warns of on its way."""
    with torch.no_grad(), warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        yield

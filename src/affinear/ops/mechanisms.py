"""What tells one linear attention from another: a feature map, a gain, and the registry that names the pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

FeatureMap = Callable[[Tensor], Tensor]
Gain = Callable[[Tensor], Tensor]
MeanWeight = Callable[[Tensor, Tensor], Tensor]

GUARD = 1e-12  # the smallest z that a reciprocal gain tells from zero
RELEASED_EPSILON = 1e-6  # what the released networks add to z instead
NALA_POWER = 3.0  # lambda, the power of the keys
NALA_OFFSET = 0.5  # tau, so that a query's power lies between 1.5 and 4.5
NALA_PHASE = 20.0  # how sharply the cosine map tells the signs apart


@dataclass(frozen=True)
class Mechanism:
    """One linear attention: `o = mean_weight * v_mean + gain(z) * scale * phi(q)^T cov`.

    Attributes:
        name: What `mechanism=` calls it.
        query_map: Feature map of queries, (..., D) -> (..., F), in float32 or float64.
        key_map: Feature map of keys, with the same F.
        gain: Function of z = scale * phi(q) . k_mean, elementwise. None for attention that has no state (softmax).
        nonnegative: Whether phi(q) . phi(k) >= 0 for every query and key, so that z is never negative.
        paper: Where it comes from.
        mean_weight: Weight of the mean value, from z and what rotation adds to it. None is one: rows sum to one.
        scale: Default scale. None is head_dim ** -0.5.

    Example:
        >>> import torch, affinear as af
        >>> from affinear.ops.mechanisms import reciprocal
        >>> squared = af.Mechanism("squared", torch.square, torch.square, reciprocal, nonnegative=True, paper="none")
        >>> q, k, v = torch.randn(3, 2, 10, 4, 8).unbind()
        >>> af.attention(q, k, v, squared).shape
        torch.Size([2, 10, 4, 8])
    """

    name: str
    query_map: FeatureMap
    key_map: FeatureMap
    gain: Gain | None
    nonnegative: bool
    paper: str
    mean_weight: MeanWeight | None = None
    scale: float | None = None

    def scale_for(self, head_dim: int) -> float:
        """The default scale of heads of this width."""
        return head_dim**-0.5 if self.scale is None else self.scale


def identity(x: Tensor) -> Tensor:
    """InLine's feature map: none."""
    return x


def elu_plus_one(x: Tensor) -> Tensor:
    """`elu(x) + 1` without the subtraction, so that it stays positive however negative x is."""
    positive = F.relu(x)
    return positive + (x - positive).exp_()


def focused(x: Tensor) -> Tensor:
    """FLatten's map: the cube of relu(x), brought back to the length of relu(x)."""
    positive = F.relu(x)
    cube = (positive / _largest(positive)) ** 3
    # The largest entry of a cube is one, so its norm is at least one unless everything vanished.
    return cube * (_norm(positive) / _norm(cube).clamp(min=1))


def nala_query(x: Tensor) -> Tensor:
    """NaLaFormer's query map: |direction| to a power that grows with the norm, split by sign. (..., D) -> (..., 2D)."""
    return split_by_sign(_norm_aware_power(x), x)


def nala_key(x: Tensor) -> Tensor:
    """NaLaFormer's key map: |x| cubed, split by sign. (..., D) -> (..., 2D)."""
    return split_by_sign(_cube(x), x)


def nala_cosine_query(x: Tensor) -> Tensor:
    """The paper's query map, cosine and sine of a phase in place of the sign split. (..., D) -> (..., 2D)."""
    return _with_phase(_norm_aware_power(x), x)


def nala_cosine_key(x: Tensor) -> Tensor:
    """The paper's key map, cosine and sine of a phase in place of the sign split. (..., D) -> (..., 2D)."""
    return _with_phase(_cube(x), x)


def split_by_sign(magnitude: Tensor, x: Tensor) -> Tensor:
    """Magnitudes of the positive channels, then of the negative ones; zeros elsewhere."""
    return torch.cat((magnitude.masked_fill(x <= 0, 0), magnitude.masked_fill(x >= 0, 0)), dim=-1)


def _cube(x: Tensor) -> Tensor:
    # NALA_POWER, spelled out: compilers take a number by name for one that may change, and cannot differentiate that.
    return x.abs() ** 3


def _with_phase(magnitude: Tensor, x: Tensor) -> Tensor:
    # The pair (cos, sin) of the phase pi/4 * tanh(slope * direction), turned by an eighth: products are the same, but
    # opposite signs meet in small features instead of in the difference of large ones.
    steep = 2 * NALA_PHASE * _direction(x)
    near, far = (torch.sin(math.pi / 2 * torch.sigmoid(side)) for side in (steep, -steep))
    return torch.cat((magnitude * near, magnitude * far), dim=-1)


def _norm_aware_power(x: Tensor) -> Tensor:
    power = NALA_POWER * (NALA_OFFSET + torch.tanh(_norm(x)))
    magnitude = _direction(x).abs()
    # A power of zero has a logarithm of zero in its second derivative.
    zero = magnitude.detach() == 0
    return (magnitude.masked_fill(zero, 1) ** power).masked_fill(zero, 0)


def _direction(x: Tensor) -> Tensor:
    scaled = x / _largest(x)
    return scaled / torch.linalg.vector_norm(scaled, dim=-1, keepdim=True).clamp(min=1)


def _norm(x: Tensor) -> Tensor:
    largest = _largest(x)
    return largest * torch.linalg.vector_norm(x / largest, dim=-1, keepdim=True)


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude, one for a zero vector: a norm taken after dividing by it neither over- nor underflows."""
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    return largest.masked_fill(largest == 0, 1)


def reciprocal(z: Tensor) -> Tensor:
    """Gain 1 / z of every normalised linear attention, guarded: 1 / max(z, 1e-12).

    The building block of gains of your own. A query whose features all vanish has z = 0, and its answer is the mean
    value plus the gain times nothing: any finite gain will do there, an infinite one makes NaN.

    Args:
        z: How strongly queries speak, any shape.

    Returns:
        The gain, in the shape of z: finite everywhere, with no slope below the guard.

    Example:
        >>> import torch
        >>> from affinear.ops import reciprocal
        >>> reciprocal(torch.tensor([0.0, 0.5]))
        tensor([1.0000e+12, 2.0000e+00])
    """
    return 1 / z.clamp(min=GUARD)


def one(z: Tensor) -> Tensor:
    """Gain 1 of InLine."""
    return torch.ones_like(z)


def one_plus_reciprocal(z: Tensor) -> Tensor:
    """Gain 1 + 1 / z of MALA."""
    return 1 + reciprocal(z)


def released_reciprocal(z: Tensor) -> Tensor:
    """Gain of the released NaLaFormer, MILA and RAVLT."""
    return 1 / (z + RELEASED_EPSILON)


def released_one_plus_reciprocal(z: Tensor) -> Tensor:
    """Gain of the released MAViT."""
    return 1 + released_reciprocal(z)


def released_mala_mean(z: Tensor, added: Tensor) -> Tensor:
    """Weight of the mean value in the released MAViT: beta times the rotated z, less the plain z."""
    return z * released_reciprocal(z) + added * released_one_plus_reciprocal(z)


def released_nala_mean(z: Tensor, added: Tensor) -> Tensor:
    """Weight of the mean value in the released NaLaFormer, MILA and RAVLT: the rotated z over the plain one."""
    return released_reciprocal(z) * (z + added)


# A threaded CPU build settles the accuracy of its vector functions at their first call; should two threads make it at
# once, one of them may get results good to four digits. One element, one thread, settles it in peace.
for _dtype in (torch.float32, torch.float64):
    for _function in (torch.exp, torch.tanh, torch.sin, torch.sigmoid):
        _function(torch.zeros(1, dtype=_dtype))

_MALA = "Rectifying Magnitude Neglect in Linear Attention (ICCV 2025, arXiv 2507.00698)"
_INLINE = "Bridging the Divide: Reconsidering Softmax and Linear Attention (NeurIPS 2024, arXiv 2412.06590)"
_NALA = "NaLaFormer (ICML 2026, arXiv 2506.21137)"
_LINEAR = "Transformers are RNNs (ICML 2020, arXiv 2006.16236)"
_MILA = "Demystify Mamba in Vision (NeurIPS 2024, arXiv 2405.16605)"
_RELU = "EfficientViT: Multi-Scale Linear Attention (ICCV 2023, arXiv 2205.14756)"
_FOCUSED = "FLatten Transformer (ICCV 2023, arXiv 2308.00442)"
_SOFTMAX = "Attention Is All You Need (NeurIPS 2017, arXiv 1706.03762)"

_BUILT_IN = (
    Mechanism("linear", elu_plus_one, elu_plus_one, reciprocal, True, _LINEAR),
    Mechanism("relu", F.relu, F.relu, reciprocal, True, _RELU),
    Mechanism("focused", focused, focused, reciprocal, True, _FOCUSED),
    Mechanism("inline", identity, identity, one, False, _INLINE),
    Mechanism("mala", elu_plus_one, elu_plus_one, one_plus_reciprocal, True, _MALA),
    Mechanism("nala", nala_query, nala_key, reciprocal, True, _NALA),
    Mechanism("nala_cosine", nala_cosine_query, nala_cosine_key, reciprocal, True, _NALA),
    Mechanism(
        "mala_released", elu_plus_one, elu_plus_one, released_one_plus_reciprocal, True, _MALA, released_mala_mean
    ),
    Mechanism("nala_released", nala_query, nala_key, released_reciprocal, True, _NALA, released_nala_mean, scale=1.0),
    Mechanism(
        "linear_released", elu_plus_one, elu_plus_one, released_reciprocal, True, _MILA, released_nala_mean, scale=1.0
    ),
    Mechanism("softmax", identity, identity, None, False, _SOFTMAX),
)
_registry: dict[str, Mechanism] = {mechanism.name: mechanism for mechanism in _BUILT_IN}


def is_built_in(mechanism: Mechanism) -> bool:
    """Whether it came with the library, so that its maps are known to hold no parameters."""
    return mechanism in _BUILT_IN


def register(mechanism: Mechanism) -> Mechanism:
    """Make a mechanism known by its name, and return it.

    Args:
        mechanism: A mechanism whose name is not taken.

    The gain is tried at a few z: it has to be finite there, at zero too, where a query whose features vanish stands.

    Raises:
        ValueError: If the name is taken by another mechanism, what came is no mechanism, or its gain is not finite.

    Example:
        >>> import dataclasses, torch, affinear as af
        >>> mala = af.mechanisms()["mala"]
        >>> _ = af.register(dataclasses.replace(mala, name="mala_relu", query_map=torch.relu, key_map=torch.relu))
        >>> "mala_relu" in af.mechanisms()
        True
    """
    if not isinstance(mechanism, Mechanism):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"mechanism: expected an affinear.Mechanism, got {type(mechanism).__name__}; make one first")
    if not mechanism.name or not isinstance(mechanism.name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"mechanism.name: expected a non-empty string, got {mechanism.name!r}; give it one")
    if _registry.get(mechanism.name, mechanism) != mechanism:
        raise ValueError(f"mechanism.name: {mechanism.name!r} is taken by another mechanism; choose a new name")
    _check_gain(mechanism)
    _registry[mechanism.name] = mechanism
    return mechanism


def _check_gain(mechanism: Mechanism) -> None:
    """A gain is finite, elementwise, wherever z may be."""
    if mechanism.gain is None:
        return
    tried = torch.tensor([0.0, 1e-30, 1e-6, 1.0, 1e6] + ([] if mechanism.nonnegative else [-1e-30, -1e-6, -1.0, -1e6]))
    gain = mechanism.gain(tried.clone())
    if not isinstance(gain, Tensor) or gain.shape != tried.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
        got = tuple(gain.shape) if isinstance(gain, Tensor) else type(gain).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"mechanism.gain: expected a function of z to a tensor of its shape {tuple(tried.shape)}, got {got}; "
            "compute it elementwise"
        )
    for z, value in zip(tried.tolist(), gain.tolist(), strict=True):
        if not math.isfinite(value):
            raise ValueError(
                f"mechanism.gain: expected a finite gain of {mechanism.name!r} for every z, got {value} at z = {z:g}; "
                "a query whose features vanish has z = 0: build on affinear.ops.reciprocal, which is guarded there"
            )


def mechanisms() -> Mapping[str, Mechanism]:
    """Every registered mechanism by its name, read-only, in order of registration.

    Example:
        >>> import affinear as af
        >>> af.mechanisms()["mala"].paper
        'Rectifying Magnitude Neglect in Linear Attention (ICCV 2025, arXiv 2507.00698)'
    """
    return MappingProxyType(dict(_registry))


def near_miss(name: object, known: Iterable[str]) -> str:
    """For a sentence about an unknown name: the one that was probably meant, or nothing.

    Example:
        >>> from affinear.ops.mechanisms import near_miss
        >>> near_miss("mela", ("mala", "linear")), near_miss("quadratic", ("mala", "linear"))
        ("did you mean 'mala'? ", '')
    """
    near = get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f"did you mean {near[0]!r}? " if near else ""


def find(mechanism: str | Mechanism) -> Mechanism:
    """The mechanism of this name, or the mechanism itself."""
    if isinstance(mechanism, Mechanism):
        return mechanism
    if not isinstance(mechanism, str) or mechanism not in _registry:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"mechanism: expected one of {', '.join(_registry)}, or a Mechanism, got {mechanism!r}; "
            f"{near_miss(mechanism, _registry)}affinear.register adds one of your own, and --plugin does on the "
            "command line"
        )
    return _registry[mechanism]

"""Feature maps of blocks and their gradients, against autograd through the definitions in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from affinear.ops.mechanisms import (
    elu_plus_one,
    focused,
    identity,
    nala_cosine_key,
    nala_cosine_query,
    nala_key,
    nala_query,
)
from affinear.ops.triton.features import feature, feature_gradient

Randn = Callable[..., Tensor]
Error = Callable[[Tensor, Tensor], float]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The definition of each map of queries, and of keys.
DEFINITIONS = {
    "identity": (identity, identity),
    "elu": (elu_plus_one, elu_plus_one),
    "relu": (F.relu, F.relu),
    "focused": (focused, focused),
    "nala": (nala_query, nala_key),
    "nala_cosine": (nala_cosine_query, nala_cosine_key),
}
PLAIN = ("identity", "elu", "relu", "focused")
SIDES = [(name, query) for name in DEFINITIONS for query in (True, False) if query or name not in PLAIN]
COUPLED = [("focused", True), ("nala", True), ("nala_cosine", True), ("nala_cosine", False)]  # maps that take a norm
CUBED = [("nala", False), ("nala_cosine", False)]
BOUND = 2e-6
sides = pytest.mark.parametrize(("name", "query"), SIDES, ids=[f"{n}-{'query' if q else 'key'}" for n, q in SIDES])


@triton.jit
def map_kernel(
    p_x,
    p_df,
    p_f,
    p_dx,
    N,
    D,
    MAP: tl.constexpr,
    QUERY: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BF: tl.constexpr,
    EVEN: tl.constexpr,
):
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_d = tl.arange(0, BD)
    o_f = tl.arange(0, BF)
    m_n = (o_n < N)[:, None]
    b_x = tl.load(p_x + o_n[:, None] * D + o_d[None, :], mask=m_n & (o_d < D)[None, :], other=0.0)
    b_df = tl.load(p_df + o_n[:, None] * BF + o_f[None, :], mask=m_n, other=0.0)
    b_f = feature(b_x, o_d < D, MAP, QUERY, EVEN)
    tl.store(p_f + o_n[:, None] * BF + o_f[None, :], b_f, mask=m_n)
    b_dx = feature_gradient(b_x, b_f, b_df, MAP, QUERY)
    tl.store(p_dx + o_n[:, None] * BD + o_d[None, :], b_dx, mask=m_n)


def launch(x: Tensor, df: Tensor, name: str, query: bool, even: bool = False) -> tuple[Tensor, Tensor]:
    """Features (N, halves, BD) and gradients (N, BD), padding included."""
    (rows, width), halves = x.shape, df.shape[1] // x.shape[1]
    padded = int(triton.next_power_of_2(width))
    df = F.pad(df.unflatten(1, (halves, width)), (0, padded - width), value=0.0).to(DEVICE)
    f = torch.full_like(df, float("nan"))
    dx = torch.full_like(df[:, 0], float("nan"))
    block = 16 if DEVICE == "cuda" else int(triton.next_power_of_2(rows))  # the interpreter is as slow with few rows
    sizes = {"BN": block, "BD": padded, "BF": halves * padded}
    tokens = x.contiguous().to(DEVICE)
    map_kernel[(triton.cdiv(rows, block),)](tokens, df, f, dx, rows, width, name, query, **sizes, EVEN=even)
    return f.cpu(), dx.cpu()


def mapped(x: Tensor, df: Tensor, name: str, query: bool) -> tuple[Tensor, Tensor]:
    """Features (N, F) and gradients (N, D) of the blocks."""
    f, dx = launch(x, df, name, query)
    return f[..., : x.shape[1]].flatten(1), dx[:, : x.shape[1]]


def defined(x: Tensor, df: Tensor, name: str, query: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same from the definition, in this dtype."""
    x = x.to(dtype).requires_grad_()
    f = DEFINITIONS[name][0 if query else 1](x)
    return f.detach(), torch.autograd.grad(f, x, df.to(dtype))[0]


def gradient_for(x: Tensor, name: str, randn: Randn) -> Tensor:
    return randn(x.shape[0], x.shape[1] * (1 if name in PLAIN else 2), dtype=torch.float32)


@pytest.mark.parametrize("width", [8, 24, 64, 96])
@sides
def test_features_and_gradients_are_the_definitions(
    name: str, query: bool, width: int, randn: Randn, relative_error: Error
):
    x = randn(500, width, dtype=torch.float32)
    df = gradient_for(x, name, randn)
    outs = mapped(x, df, name, query)
    truths, rivals = (defined(x, df, name, query, dtype) for dtype in (torch.float64, torch.float32))
    for out, truth, rival in zip(outs, truths, rivals, strict=True):
        bound = BOUND if name in PLAIN else 3 * relative_error(rival, truth)
        assert relative_error(out, truth) <= bound


# Rows at some edge, from normal ones. The reach is one third for maps that cube: there float32 itself ends.
CASES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "sparse": lambda x, reach: x * (x.roll(1, 0) > 0.5),
    "one-hot": lambda x, reach: torch.eye(x.shape[1]).repeat(len(x) // x.shape[1], 1) * x[:, :1],
    "equal": lambda x, reach: x[:, :1].expand_as(x),
    "negative": lambda x, reach: -x.abs(),
    "huge": lambda x, reach: x * 10.0 ** (18 * reach),
    "tiny": lambda x, reach: x * 10.0 ** (-18 * reach),
    "largest": lambda x, reach: x * 10.0 ** (30 * reach),
    "tiniest": lambda x, reach: x * 10.0 ** (-30 * reach),
    "mixed entries": lambda x, reach: x * 10.0 ** (5 * x.roll(1, 0)).clamp(-30 * reach, 30 * reach),
    "mixed rows": lambda x, reach: x * 10.0 ** (5 * x.roll(1, 0)[:, :1]).clamp(-30 * reach, 30 * reach),
    "short": lambda x, reach: x * (0.1 / x.norm(dim=1, keepdim=True)),
    "long": lambda x, reach: x * ((10 + 20 * x[:, :1].abs()) / x.norm(dim=1, keepdim=True)),
}


@pytest.mark.parametrize("case", CASES)
@sides
def test_every_row_at_the_edges_is_as_good_as_in_torch(name: str, query: bool, case: str, randn: Randn):
    x = CASES[case](randn(96, 24), 1 / 3 if (name, query) in CUBED else 1.0).float()
    df = gradient_for(x, name, randn)
    outs = mapped(x, df, name, query)
    truths, rivals = (defined(x, df, name, query, dtype) for dtype in (torch.float64, torch.float32))
    sizes = [truth.norm(dim=1) for truth in truths]
    if (name, query) in COUPLED:
        # Where a row's terms cancel, as in one-hot rows, what remains is small beside the rounding of the terms.
        terms = truths[0].norm(dim=1) * df.norm(dim=1) / x.double().norm(dim=1).clamp(min=1e-300)
        sizes[1] = torch.maximum(sizes[1], terms)
    for out, truth, rival, size in zip(outs, truths, rivals, sizes, strict=True):
        assert rival.isfinite().all()
        error, rival_error = ((o.double() - truth).norm(dim=1) for o in (out, rival))
        assert (error <= torch.maximum(3 * rival_error, BOUND * size)).all()


@sides
def test_zero_rows_have_the_features_and_gradients_of_torch(name: str, query: bool, randn: Randn):
    x = torch.zeros(70, 24)
    df = gradient_for(x, name, randn)
    for out, truth in zip(mapped(x, df, name, query), defined(x, df, name, query, torch.float32), strict=True):
        assert torch.equal(out, truth)


@sides
def test_zero_entries_have_the_gradients_of_torch(name: str, query: bool, randn: Randn):
    x = CASES["sparse"](randn(96, 24), 1).float()
    df = gradient_for(x, name, randn)
    dx, truth = mapped(x, df, name, query)[1], defined(x, df, name, query, torch.float32)[1]
    assert torch.equal(dx[x == 0], truth[x == 0])


@pytest.mark.parametrize("width", [8, 24, 96])
@sides
def test_padding_has_neither_features_nor_gradients(name: str, query: bool, width: int, randn: Randn):
    x = randn(70, width, dtype=torch.float32)
    f, dx = launch(x, gradient_for(x, name, randn), name, query)
    assert f.isfinite().all()
    assert dx.isfinite().all()
    assert (f[..., width:] == 0).all()
    assert (dx[:, width:] == 0).all()


@sides
def test_what_is_known_beforehand_changes_nothing(name: str, query: bool, randn: Randn, relative_error: Error):
    x = randn(70, 64, dtype=torch.float32)
    df = gradient_for(x, name, randn)
    for out, even in zip(launch(x, df, name, query), launch(x, df, name, query, even=True), strict=True):
        assert relative_error(even, out) <= BOUND


@sides
def test_nan_is_never_hidden(name: str, query: bool, randn: Randn):
    x = randn(70, 24, dtype=torch.float32)
    x[3, 5] = float("nan")
    f, _ = mapped(x, gradient_for(x, name, randn), name, query)
    assert f[3].isnan().any()
    assert f[:3].isfinite().all()
    assert f[4:].isfinite().all()


def test_elu_stays_positive(randn: Randn):
    x = -80 + randn(70, 24, dtype=torch.float32)
    f, _ = mapped(x, gradient_for(x, "elu", randn), "elu", True)
    torch.testing.assert_close(f.double(), x.double().exp(), rtol=2e-5, atol=0)

"""PyTorch's transforms: compile, export, vmap, derivatives of first and second order, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

import affinear as af
from affinear.ops import rotary_1d, tiles

LINEAR = [name for name, mechanism in af.mechanisms().items() if mechanism.gain is not None]
# Maps with zeros: unless queries and keys agree in the signs of their channels, z vanishes where rotated scores do not.
WITH_ZEROS = ("relu", "focused", "nala", "nala_cosine", "nala_released")
WIDTH, VALUES = 4, 3

Tokens = tuple[Tensor, Tensor, Tensor]
Options = dict[str, Any]


@pytest.fixture(params=["whole", "tiled"])
def tiling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Once as short sequences are served, once in the smallest tiles, as long ones are."""
    if request.param == "tiled":
        monkeypatch.setattr(tiles, "CPU_TILE", 1)
    return request.param


def tokens(length: int, *, batch: int = 2, mechanism: str = "mala", dtype: torch.dtype = torch.float64) -> Tokens:
    """Queries of two heads for each of two key heads, keys and values; no channel comes near the kink of a map."""
    query, key = torch.rand(batch, length, 4, WIDTH) + 0.3, torch.rand(batch, length, 2, WIDTH) + 0.3
    if mechanism in WITH_ZEROS:
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
        query, key = signs * query, signs * key
    else:
        query, key = (torch.where(torch.rand_like(x) < 0.5, -x, x) for x in (query, key))
    value = torch.randn(batch, length, 2, VALUES)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def options(case: str, length: int, *, batch: int = 2, mechanism: str = "mala") -> Options:
    """What a case hands to `attention`, by the words of its name."""
    found: Options = {"mechanism": mechanism}
    if "causal" in case:
        found["causal"] = True
    if "masked" in case:
        found["key_mask"] = torch.rand(batch, length) < 0.7
    if "rotary" in case:
        found["rotary"] = rotary_1d(length, WIDTH)
    if "packed" in case:
        found["cu_seqlens_q"] = found["cu_seqlens_k"] = torch.tensor([0, length // 3, length // 3, length])
    return found


def attention(given: Options) -> Callable[..., Tensor]:
    """A function of query, key and value alone."""
    return lambda query, key, value: af.attention(query, key, value, **given)


def learn(*tensors: Tensor) -> list[Tensor]:
    """Copies that take gradients."""
    return [x.detach().clone().requires_grad_() for x in tensors]


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], target: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the product of the answer with a target."""
    return torch.autograd.grad((function(*inputs) * target).sum(), inputs)


# Compiling


exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("mechanism", "case"),
    [
        ("mala", "full"),
        pytest.param("nala", "masked rotary", marks=exhaustive),
        pytest.param("mala", "packed", marks=exhaustive),
    ],
)
def test_one_compilation_serves_many_lengths(mechanism: str, case: str):
    batch = 1 if "packed" in case else 2

    def run(query: Tensor, key: Tensor, value: Tensor, given: Options) -> Tensor:
        return af.attention(query, key, value, **given)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=True)
    for length in (200, 70, 129, 300, 1000):
        inputs = tokens(length, batch=batch, mechanism=mechanism)
        given = options(case, length, batch=batch, mechanism=mechanism)
        torch.testing.assert_close(compiled(*inputs, given), run(*inputs, given), rtol=1e-11, atol=1e-11)
    assert counter.frame_count == 1


@exhaustive  # compiled causal gradients are below
def test_short_and_long_causal_sequences_take_two_compilations_at_most():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return af.attention(query, key, value, causal=True)

    for length in (300, 70, 500, 5, 17):
        inputs = tokens(length)
        torch.testing.assert_close(run(*inputs), af.attention(*inputs, causal=True), rtol=1e-11, atol=1e-11)
    assert counter.frame_count <= 2


@exhaustive
def test_a_mechanism_with_a_scale_of_its_own_compiles_behind_a_state():
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def run(query: Tensor, key: Tensor, value: Tensor, state: af.State) -> Tensor:
        return af.attention(query, key, value, "nala_released", causal=True, initial_state=state)

    for length in (20, 33):
        query, key, value = tokens(length, mechanism="nala_released")
        state = af.summarize(key, value, "nala_released")
        expected = af.attention(query, key, value, "nala_released", causal=True, initial_state=state)
        torch.testing.assert_close(run(query, key, value, state), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", ["full", "causal", pytest.param("causal rotary", marks=exhaustive)])
def test_softmax_compiles_for_any_length(case: str):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: attention(given)(*inputs), backend="aot_eager", dynamic=True)
    for length in (20, 33):
        given = options(case, length, mechanism="softmax")
        inputs = learn(*tokens(length))
        target = torch.randn(2, length, 4, VALUES, dtype=torch.float64)
        expected = gradients(attention(given), inputs, target)
        torch.testing.assert_close(gradients(compiled, inputs, target), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", ["causal packed", pytest.param("causal masked rotary", marks=exhaustive)])
def test_every_kind_of_causal_attention_compiles(case: str):
    torch._dynamo.reset()
    inputs, given = tokens(150, batch=1), options(case, 150, batch=1)
    compiled = torch.compile(attention(given), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), attention(given)(*inputs), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("mechanism", "case"), [("mala", "masked"), ("mala", "causal"), ("nala", "rotary"), ("inline", "packed")]
)
def test_compiled_gradients_are_the_eager_ones(mechanism: str, case: str):
    batch = 1 if "packed" in case else 2
    given = options(case, 100, batch=batch, mechanism=mechanism)

    run = attention(given)
    torch._dynamo.reset()
    inputs = learn(*tokens(100, batch=batch, mechanism=mechanism))
    target = torch.randn(batch, 100, 4, VALUES, dtype=torch.float64)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    expected = gradients(run, inputs, target)
    torch.testing.assert_close(gradients(compiled, inputs, target), expected, rtol=1e-10, atol=1e-10)


@exhaustive  # minutes of a C++ compiler; `aot_eager` above traces the same
@pytest.mark.parametrize(
    ("mechanism", "causal", "with_state"),
    [("mala", False, False), ("nala", False, True), ("nala", True, True), ("nala_cosine", True, False)],
)
def test_inductor_serves_any_length_with_states_and_gradients(mechanism: str, causal: bool, with_state: bool):
    def run(query: Tensor, key: Tensor, value: Tensor, *before: Tensor) -> Tensor:
        past = af.summarize(before[0], before[1], mechanism) if with_state else None
        out, state = af.attention(query, key, value, mechanism, causal=causal, initial_state=past, return_state=True)
        return out.sum() + state.covariance.square().sum() + state.key_mean.sum() + out.square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for length in (20, 33):
        inputs = learn(*tokens(length, mechanism=mechanism, dtype=torch.float32))
        inputs += learn(*tokens(length + 5, mechanism=mechanism, dtype=torch.float32)[1:]) if with_state else []
        found, expected = (torch.autograd.grad(f(*inputs), inputs) for f in (compiled, run))
        for x, truth in zip(found, expected, strict=True):
            assert (x - truth).norm() <= 1e-3 * truth.norm()


# Exporting


class Attention(torch.nn.Module):
    """A network that is attention and nothing else."""

    def __init__(self, **given: Any):
        super().__init__()
        self.given = given

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention with the options of the network."""
        return af.attention(query, key, value, **self.given)


class CrossAttention(torch.nn.Module):
    """Summarize a memory, then ask it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Queries and keys differ in length."""
        return af.attend(query, af.summarize(key, value, "nala"))


@pytest.mark.parametrize("case", ["full", "causal"])
def test_an_exported_program_serves_any_batch_and_length(case: str):
    module = Attention(**options(case, 0))
    any_size = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    program = torch.export.export(module, tokens(150, batch=3), dynamic_shapes=(any_size,) * 3).module()
    for batch, length in ((3, 150), (2, 1000), (5, 64), (2, 10)):
        inputs = tokens(length, batch=batch)
        torch.testing.assert_close(program(*inputs), module(*inputs), rtol=1e-11, atol=1e-11)


def test_a_named_dimension_has_no_length_that_it_cannot_serve():
    shape = {0: Dim("batch", min=1, max=64), 1: Dim("length", min=2, max=10_000)}
    module = Attention(causal=True)
    program = torch.export.export(module, tokens(150, batch=3), dynamic_shapes=(shape,) * 3).module()
    inputs = tokens(20)
    torch.testing.assert_close(program(*inputs), module(*inputs), rtol=1e-11, atol=1e-11)


def test_exported_cross_attention_has_two_lengths():
    batch, queries, keys = Dim("batch"), Dim("queries"), Dim("keys")
    example = (tokens(9)[0], *tokens(14)[1:])
    shapes = ({0: batch, 1: queries}, {0: batch, 1: keys}, {0: batch, 1: keys})
    program = torch.export.export(CrossAttention(), example, dynamic_shapes=shapes).module()
    inputs = (tokens(300, batch=5)[0], *tokens(70, batch=5)[1:])
    torch.testing.assert_close(program(*inputs), CrossAttention()(*inputs), rtol=1e-11, atol=1e-11)


# Mapping and differentiating functions


@pytest.mark.parametrize("case", ["full", "causal", "rotary", "causal rotary"])
@pytest.mark.parametrize("mechanism", LINEAR)
def test_vmap_is_a_batch(mechanism: str, case: str):
    inputs, given = tokens(70, mechanism=mechanism), options(case, 70, mechanism=mechanism)

    def one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return af.attention(query[None], key[None], value[None], **given)[0]

    expected = af.attention(*inputs, **given)
    torch.testing.assert_close(torch.func.vmap(one)(*inputs), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_vmap_maps_masks_too(causal: bool):
    inputs, mask = tokens(70), torch.rand(2, 70) < 0.5

    def one(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return af.attention(query[None], key[None], value[None], causal=causal, key_mask=mask[None])[0]

    expected = af.attention(*inputs, causal=causal, key_mask=mask)
    torch.testing.assert_close(torch.func.vmap(one)(*inputs, mask), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_vmap_maps_states_in_and_out(causal: bool):
    inputs, past = tokens(70), af.summarize(*tokens(9)[1:])

    def one(query: Tensor, key: Tensor, value: Tensor, past: af.State) -> tuple[Tensor, af.State]:
        out, state = af.attention(
            query[None],
            key[None],
            value[None],
            causal=causal,
            initial_state=past.map(lambda x: x[None]),
            return_state=True,
        )
        return out[0], state.map(lambda x: x[0])

    out, state = torch.func.vmap(one)(*inputs, past)
    expected, whole = af.attention(*inputs, causal=causal, initial_state=past, return_state=True)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.covariance, whole.covariance, rtol=1e-12, atol=1e-12)
    assert torch.equal(state.count, whole.count)


@pytest.mark.parametrize("case", ["full", "causal"])
def test_vmap_takes_a_dimension_before_the_batch(case: str):
    several = [torch.stack(parts) for parts in zip(tokens(20), tokens(20), tokens(20), strict=True)]
    given = options(case, 20)
    out = torch.func.vmap(attention(given))(*several)
    expected = attention(given)(*(x.flatten(0, 1) for x in several))
    torch.testing.assert_close(out.flatten(0, 1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ["full", "causal", "causal masked rotary"])
def test_functional_gradients_are_those_of_autograd(case: str, tiling: str):
    inputs, given = tokens(150), options(case, 150)
    target = torch.randn(2, 150, 4, VALUES, dtype=torch.float64)

    def loss(*inputs: Tensor) -> Tensor:
        return (attention(given)(*inputs) * target).sum()

    functional = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    leaves = learn(*inputs)
    torch.testing.assert_close(functional, torch.autograd.grad(loss(*leaves), leaves), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", ["full", "causal"])
def test_jacobians_agree_whichever_way_they_are_made(case: str):
    inputs, given = tokens(5, batch=1), options(case, 5)

    def run(key: Tensor) -> Tensor:
        return attention(given)(inputs[0], key, inputs[2])

    backward = torch.func.jacrev(run)(inputs[1])
    torch.testing.assert_close(torch.func.jacfwd(run)(inputs[1]), backward, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.autograd.functional.jacobian(run, inputs[1]), backward, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", ["full", "causal"])
def test_many_gradients_go_back_at_once(case: str, tiling: str):
    inputs, given = learn(*tokens(150)), options(case, 150)
    out = attention(given)(*inputs)
    several = torch.randn(3, *out.shape, dtype=torch.float64)
    together = torch.autograd.grad(out, inputs, several, is_grads_batched=True, retain_graph=True)
    one_by_one = [torch.autograd.grad(out, inputs, single, retain_graph=True) for single in several]
    expected = tuple(torch.stack(parts) for parts in zip(*one_by_one, strict=True))
    torch.testing.assert_close(together, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", ["full", "causal"])
def test_tangents_go_forward(case: str, tiling: str):
    inputs, given = tokens(150), options(case, 150)
    directions = tokens(150)
    run = attention(given)
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(*pair) for pair in zip(inputs, directions, strict=True)]
        tangent = torch.autograd.forward_ad.unpack_dual(run(*duals)).tangent
    assert tangent is not None
    expected = torch.func.jvp(run, inputs, directions)[1]
    torch.testing.assert_close(tangent, expected, rtol=1e-11, atol=1e-11)


# First and second derivatives against finite differences


@pytest.mark.parametrize(
    "case", ["full", "causal", "masked", "causal masked", "rotary", "causal rotary", "packed", "causal packed"]
)
@pytest.mark.parametrize("mechanism", LINEAR)
def test_derivatives_of_first_and_second_order(mechanism: str, case: str):
    inputs, given = learn(*tokens(4, batch=1, mechanism=mechanism)), options(case, 4, batch=1, mechanism=mechanism)
    run = attention(given)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("case", ["full", "causal", "causal masked rotary"])
def test_derivatives_through_a_state(case: str):
    inputs, given = learn(*tokens(4, batch=1), *tokens(3, batch=1)[1:]), options(case, 4, batch=1)
    rotary = rotary_1d(3, WIDTH) if "rotary" in case else None

    def run(query: Tensor, key: Tensor, value: Tensor, old_key: Tensor, old_value: Tensor) -> tuple[Tensor, ...]:
        past = af.summarize(old_key, old_value, rotary=rotary)
        out, state = af.attention(query, key, value, **given, initial_state=past, return_state=True)
        return out, state.key_mean, state.value_mean, state.covariance

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("case", ["full", "causal"])
@pytest.mark.parametrize("mechanism", ["mala", "nala"])
def test_every_single_derivative(mechanism: str, case: str):
    inputs, given = learn(*tokens(3, batch=1, mechanism=mechanism)), options(case, 3, mechanism=mechanism)
    assert torch.autograd.gradcheck(attention(given), inputs)
    assert torch.autograd.gradgradcheck(attention(given), inputs)


@pytest.mark.parametrize("case", ["full", "causal", "masked rotary", "causal masked rotary"])
@pytest.mark.parametrize("mechanism", ["mala", "nala", "inline"])
def test_derivatives_across_chunks_and_tiles(mechanism: str, case: str, tiling: str):
    inputs = learn(*tokens(140, batch=1, mechanism=mechanism))
    given = options(case, 140, batch=1, mechanism=mechanism)
    run = attention(given)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("learns", [(0,), (1,), (2,), (0, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("case", ["full", "causal"])
def test_any_of_the_inputs_may_learn_alone(case: str, learns: tuple[int, ...], create_graph: bool, tiling: str):
    given, target = options(case, 150), torch.randn(2, 150, 4, VALUES, dtype=torch.float64)
    inputs = [x.requires_grad_(i in learns) for i, x in enumerate(tokens(150))]
    together = learn(*inputs)
    loss = (attention(given)(*inputs) * target).sum()
    found = torch.autograd.grad(loss, [inputs[i] for i in learns], create_graph=create_graph)
    expected = gradients(attention(given), together, target)
    torch.testing.assert_close(found, tuple(expected[i] for i in learns), rtol=1e-11, atol=1e-11)


# Autocast


@pytest.mark.parametrize("case", ["full", "causal", "causal rotary", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(dtype: torch.dtype, case: str, tiling: str):
    batch = 1 if "packed" in case else 2
    inputs, given = learn(*tokens(150, batch=batch, dtype=dtype)), options(case, 150, batch=batch)
    target = torch.randn(batch, 150, 4, VALUES)
    plain = attention(given)(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = attention(given)(*inputs)
    assert cast.dtype == dtype
    assert torch.equal(cast, plain)
    expected = torch.autograd.grad((plain * target).sum(), inputs)
    found = torch.autograd.grad((cast * target).sum(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", ["full", "causal", "causal rotary", "packed"])
@pytest.mark.parametrize("mechanism", ["mala", "nala", "softmax"])
def test_a_backward_pass_inside_the_region_is_exact_too(mechanism: str, case: str, tiling: str):
    batch = 1 if "packed" in case else 2
    given = options(case, 150, batch=batch, mechanism=mechanism)
    inputs = learn(*tokens(150, batch=batch, mechanism=mechanism, dtype=torch.float32))
    target = torch.randn(batch, 150, 4, VALUES)
    expected = gradients(attention(given), inputs, target)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(attention(given), inputs, target)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_a_backward_pass_through_a_state_inside_the_region_is_exact_and_can_be_differentiated():
    inputs = learn(*tokens(20, dtype=torch.float32))

    def first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        out = af.attend(query, af.summarize(key, value))
        return torch.autograd.grad(out.square().sum(), (query, key, value), create_graph=True)

    expected = first(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = first(*inputs)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    # The gradients of gradients are taken outside: inside they are a plain graph, as of any other network.
    second = [torch.autograd.grad(torch.stack([x.norm() for x in grads]).sum(), inputs) for grads in (found, expected)]
    torch.testing.assert_close(*second, rtol=1e-5, atol=1e-5)


def test_autocast_leaves_states_in_float32():
    query, key, value = tokens(20, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = af.summarize(key, value)
        out = af.attend(query, state + state)
    assert state.dtype == torch.float32
    assert torch.equal(state.covariance, af.summarize(key, value).covariance)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, af.attend(query, state + state))

"""Kernels of causal attention: as good as the torch backend in the same dtype, judged by the definitions in float64.

Without a GPU they run in Triton's interpreter. With one they are compiled, many seconds for each variant; what only
varies their constants is then left to the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton import knobs

import affinear as af
from affinear.ops.rotary import Rotary, rotary_1d
from affinear.ops.state import State
from affinear.ops.triton import causal
from affinear.ops.triton.causal import calls, launches
from affinear.ops.triton.rules import rule_of
from affinear.ops.triton.statistics import Statistics

Randn = Callable[..., Tensor]
Error = Callable[[Tensor, Tensor], float]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = not knobs.runtime.interpret
MECHANISMS = [name for name in af.mechanisms() if name != "softmax"]
WHOLE, HALF, SHORT = torch.float32, torch.float16, torch.bfloat16
MARGIN, GARBAGE = 1024, 987_654_321

interpreted = pytest.mark.skipif(COMPILED, reason="only constants differ, and compiling them takes long")
# The same statements about another dtype, which takes other blocks and more tokens.
again = (interpreted, pytest.mark.exhaustive)
pytestmark = [
    pytest.mark.skipif(COMPILED and DEVICE == "cpu", reason="needs a GPU, or TRITON_INTERPRET=1"),
    pytest.mark.usefixtures("rounding"),
]


class Answers(NamedTuple):
    """What causal attention gives, and the gradients of its arguments."""

    out: Tensor
    key_mean: Tensor
    value_mean: Tensor
    covariance: Tensor
    rotated_key_mean: Tensor | None
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    grad_key_mean: Tensor | None
    grad_value_mean: Tensor | None
    grad_covariance: Tensor | None
    grad_rotated_key_mean: Tensor | None


@dataclass(frozen=True)
class Problem:
    """Arguments of one call, and the gradients of its results."""

    mechanism: str
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    mask: Tensor | None = None
    bounds: Tensor | None = None
    rotary: Rotary | None = None
    initial: Statistics | None = None
    grad_final: Statistics | None = None
    segment: int | None = None

    def only(self, sample: int) -> Problem:
        """One sample of the batch, by itself."""

        def pick(x: Any) -> Any:
            if isinstance(x, Statistics):
                return Statistics(*(None if part is None else part[sample : sample + 1] for part in x))
            return None if x is None else x[sample : sample + 1]

        names = ("query", "key", "value", "grad", "mask", "initial", "grad_final")
        return replace(self, **{name: pick(getattr(self, name)) for name in names})


Make = Callable[..., Problem]
Judge = Callable[[Problem], Answers]


def surrounded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A new tensor, and the memory in which it lies: all of it full of what is not to be read, or to be changed."""
    number = math.prod(shape)
    nothing = math.nan if dtype.is_floating_point else GARBAGE
    memory = torch.full((number + 2 * MARGIN,), nothing, dtype=dtype, device=DEVICE)
    return memory[MARGIN : MARGIN + number].view(shape), memory


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors come full of what must not be read before it is written, and nothing is written beside them."""
    memories: list[Tensor] = []

    def empty(*shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        new, memory = surrounded(tuple(shape[0]) if isinstance(shape[0], tuple) else shape, dtype)
        memories.append(memory)
        return new

    def empty_like(x: Tensor) -> Tensor:
        return empty(tuple(x.shape), dtype=x.dtype, device=x.device)

    fake = SimpleNamespace(**{**vars(torch), "empty": empty, "empty_like": empty_like})
    for module in (calls, launches):
        monkeypatch.setattr(module, "torch", fake)
    yield
    for memory in memories:
        for margin in (memory[:MARGIN], memory[-MARGIN:]):
            assert (margin.isnan() if margin.is_floating_point() else margin == GARBAGE).all(), "written out of bounds"


@pytest.fixture
def make(randn: Randn) -> Make:
    """Draw a problem; the values have a mean, as they do in practice."""

    def draw(
        mechanism: str = "mala",
        *,
        batch: int = 1,
        length: int = 20,
        heads: int = 1,
        groups: int = 1,
        width: int = 24,
        values: int = 16,
        dtype: torch.dtype = WHOLE,
        rotary: bool = False,
        state: bool = False,
        bounds: list[int] | None = None,
        segment: int | None = None,
    ) -> Problem:
        def new(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return surrounded(shape, dtype)[0].copy_(randn(*shape))

        sequences = batch if bounds is None else len(bounds) - 1
        features = width * (2 if mechanism.startswith("nala") else 1)
        shapes = (features,), (values,), (features, values), (features,) if rotary else None
        grads = [None if x is None else new(sequences, groups, *x, dtype=WHOLE) for x in shapes]
        before = af.summarize(
            new(sequences, 5, groups, width, dtype=WHOLE),
            new(sequences, 5, groups, values, dtype=WHOLE),
            mechanism=mechanism,
            rotary=rotary_1d(5, width, offset=-5, device=DEVICE) if rotary else None,
            backend="torch",
        )
        return Problem(
            mechanism,
            new(batch, length, heads, width),
            new(batch, length, groups, width),
            new(batch, length, groups, values).add_(0.5),
            new(batch, length, heads, values),
            bounds=None if bounds is None else torch.tensor(bounds, device=DEVICE),
            rotary=rotary_1d(length, width, device=DEVICE) if rotary else None,
            initial=Statistics(*(getattr(before, name) for name in Statistics._fields)) if state else None,
            grad_final=Statistics(before.count, *grads) if state else None,
            segment=segment,
        )

    return draw


def solve(problem: Problem) -> Answers:
    """Answers of the kernels."""
    p, mechanism, turns = problem, af.mechanisms()[problem.mechanism], None
    rule = rule_of(mechanism)
    assert rule is not None
    if p.rotary is not None:
        turns = torch.stack((p.rotary[0][:, ::2], p.rotary[1][:, ::2]), dim=2).flatten(1)
    precision = "split" if p.query.dtype.itemsize == 2 else "ieee"
    call = p.query, p.key, p.value, rule, mechanism.scale_for(p.query.shape[3]), p.mask, p.bounds, turns, p.initial
    out, final, saved = causal.forward(*call, precision, p.segment)
    query, key, value, initial = causal.backward(p.grad, p.grad_final, *call, final, saved, precision, p.segment)
    return Answers(out, *final[1:], query, key, value, *((None,) * 4 if initial is None else initial[1:]))


def define(problem: Problem, dtype: torch.dtype, backend: str) -> Answers:
    """Answers of another backend in this dtype."""
    p, wide = problem, torch.float64 if dtype == torch.float64 else WHOLE
    query, key, value = (x.detach().to(dtype).requires_grad_() for x in (p.query, p.key, p.value))
    state, parts = None, [None] * 4
    if p.initial is not None:
        parts = [None if x is None else x.to(wide).requires_grad_() for x in p.initial[1:]]
        state = State(p.initial.count, *parts[:3], af.mechanisms()[p.mechanism], parts[3])
    rotary = None if p.rotary is None else (p.rotary[0].to(wide), p.rotary[1].to(wide))
    out, final = af.attention(
        query, key, value, p.mechanism, causal=True, key_mask=p.mask, cu_seqlens_q=p.bounds, cu_seqlens_k=p.bounds,
        rotary=rotary, initial_state=state, return_state=True, backend=backend,
    )  # fmt: skip
    results = [out, final.key_mean, final.value_mean, final.covariance, final.rotated_key_mean]
    asked, grads = [out], [p.grad.to(dtype)]
    for result, grad in zip(results[1:], p.grad_final[1:] if p.grad_final else [], strict=False):
        if result is not None:
            asked.append(result)
            grads.append(grad.to(wide))
    wanted = [x for x in (query, key, value, *parts) if x is not None]
    found = iter(torch.autograd.grad(asked, wanted, grads))
    gradients = [None if x is None else next(found) for x in (query, key, value, *parts)]
    return Answers(*(None if x is None else x.detach() for x in results), *gradients)


@pytest.fixture
def judge(relative_error: Error) -> Judge:
    """Hold the kernels to twice the error of the torch backend, and return what they give."""

    def check(problem: Problem) -> Answers:
        dtype = problem.query.dtype
        truth, rival = define(problem, torch.float64, "reference"), define(problem, dtype, "torch")
        answers = solve(problem)
        for name, ours, theirs, exact in zip(Answers._fields, answers, rival, truth, strict=True):
            assert (ours is None) == (exact is None), name
            if ours is None:
                continue
            tokens = name in ("out", "grad_query", "grad_key", "grad_value")
            assert ours.dtype == (dtype if tokens else WHOLE), name
            # One rounding of a float32 is no mistake where torch happens to round nothing; nor, in a state, one of the
            # tokens that made it.
            slack = torch.finfo(WHOLE).eps if tokens or dtype == WHOLE else torch.finfo(dtype).eps / 8
            # The gradient of a state adds up what every token after it rounded, and cancels most of it: once more each.
            budget, slack = (2, slack) if tokens else (4, 2 * slack)
            assert relative_error(ours, exact) <= budget * (relative_error(theirs, exact) + slack), name
        return answers

    return check


@interpreted
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_is_its_definition(mechanism: str, make: Make, judge: Judge):
    judge(make(mechanism, heads=2, state=True))


@interpreted
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_turns(mechanism: str, make: Make, judge: Judge):
    judge(make(mechanism, state=True, rotary=True))


@pytest.mark.parametrize(("length", "dtype"), [(7, WHOLE), (17, WHOLE), (130, HALF)])
def test_any_number_of_tokens(length: int, dtype: torch.dtype, make: Make, judge: Judge):
    judge(make(length=length, width=8, dtype=dtype, segment=64))


@pytest.mark.parametrize("dtype", [WHOLE, HALF], ids=str)
def test_one_token_is_its_own_answer(dtype: torch.dtype, make: Make):
    problem = make(length=1, dtype=dtype)
    answers, eps = solve(problem), 16 * torch.finfo(dtype).eps
    assert torch.equal(answers.out, problem.value)
    # A weight of one is the sum of two that are larger.
    torch.testing.assert_close(answers.grad_value, problem.grad, rtol=eps, atol=0)
    for grad in (answers.grad_query, answers.grad_key):
        assert grad.double().norm() <= eps * problem.grad.double().norm() * problem.value.double().norm()


def test_two_tokens_are_right_to_a_few_roundings(make: Make):
    # Of so few numbers it is luck what torch's errors come to: twice them is no measure.
    problem = make(length=2, width=8)
    truth = define(problem, torch.float64, "reference")
    for name, ours, exact in zip(Answers._fields, solve(problem), truth, strict=True):
        if ours is not None and exact is not None:
            # A gradient may cancel: it is as exact as what it is summed from.
            summed = problem.grad.double().norm() / 4 if name.startswith("grad") else exact.new_zeros(())
            size = torch.maximum(exact.norm(), summed)
            assert (ours.double() - exact).norm() <= 8 * torch.finfo(WHOLE).eps * size, name


@interpreted  # multiples of sixteen are constants
@pytest.mark.parametrize("length", [16, 128])
def test_numbers_of_tokens_that_kernels_are_specialized_for(length: int, make: Make, judge: Judge):
    judge(make(length=length, width=8, dtype=HALF, segment=64))


@pytest.mark.parametrize("dtype", [WHOLE, HALF, pytest.param(SHORT, marks=pytest.mark.exhaustive)], ids=str)
def test_any_dtype(dtype: torch.dtype, make: Make, judge: Judge):
    length, segment = (50, 32) if dtype == WHOLE else (150, 64)
    judge(make(length=length, heads=2, groups=2, width=40, dtype=dtype, segment=segment, state=True))


@interpreted
@pytest.mark.parametrize("mechanism", ["inline", "linear", "nala", "nala_released"])
def test_bfloat16(mechanism: str, make: Make, judge: Judge):
    judge(make(mechanism, length=150, dtype=SHORT, rotary=mechanism == "nala_released"))


@interpreted
@pytest.mark.parametrize(
    ("mechanism", "width", "values"),
    [("mala", 8, 8), ("mala", 8, 40), ("inline", 40, 24), ("mala", 96, 40), ("nala", 40, 72)],
)
def test_any_width(mechanism: str, width: int, values: int, make: Make, judge: Judge):
    judge(make(mechanism, length=18, width=width, values=values))


@interpreted
@pytest.mark.parametrize(
    ("mechanism", "dtype"), [pytest.param("mala_released", WHOLE, marks=pytest.mark.exhaustive), ("nala_cosine", HALF)]
)
def test_states_too_wide_for_one_program(mechanism: str, dtype: torch.dtype, make: Make, judge: Judge):
    problem = make(mechanism, length=35, width=72, values=136, rotary=True, state=True, dtype=dtype, segment=32)
    assert calls.shape_for(72, 136, 2 if mechanism == "nala_cosine" else 1, dtype.itemsize).blocks > 1
    judge(problem)


@pytest.mark.parametrize("rotary", [False, pytest.param(True, marks=interpreted)])
def test_segments_and_states(rotary: bool, make: Make, judge: Judge):
    judge(make("mala_released", length=45, heads=4, groups=2, rotary=rotary, state=True, segment=16))


@pytest.mark.parametrize("dtype", [WHOLE, pytest.param(SHORT, marks=again)], ids=str)
def test_masked_keys_are_as_if_never_there(dtype: torch.dtype, make: Make, judge: Judge):
    length = 70 if dtype == WHOLE else 150
    problem = make(batch=3, length=length, width=8, dtype=dtype, segment=32 if dtype == WHOLE else 64)
    row = torch.arange(length, device=DEVICE)
    mask = torch.stack((row % 3 != 0, row > length // 2, row < 0))  # scattered, padded on the left, nothing at all
    problem.key[~mask] = math.nan
    problem.value[~mask] = math.inf
    answers = judge(replace(problem, mask=mask))
    for grad in (answers.grad_key, answers.grad_value):
        assert not grad[~mask].any()
    for x in (answers.out, answers.grad_query):
        assert not x[1, : length // 2 + 1].any()
        assert not x[2].any()


@interpreted
def test_a_mask_beside_a_state(make: Make, judge: Judge):
    problem = make(batch=2, length=40, state=True, segment=16)
    # Columns of a wider mask: any strides will do.
    mask = (torch.arange(80, device=DEVICE).view(40, 2) % 7 > 2).t()
    judge(replace(problem, mask=mask))


@pytest.mark.parametrize("dtype", [torch.int32, pytest.param(torch.int64, marks=again)], ids=str)
def test_packed_sequences(dtype: torch.dtype, make: Make, judge: Judge):
    problem = make(length=75, heads=2, bounds=[0, 0, 5, 5, 42, 58, 75, 75], state=True, rotary=True, segment=16)
    judge(replace(problem, bounds=problem.bounds.to(dtype)))


@pytest.mark.parametrize("dtype", [WHOLE, pytest.param(SHORT, marks=again)], ids=str)
def test_packed_or_not_the_bits_are_the_same(dtype: torch.dtype, make: Make):
    problem = make(length=111, bounds=[0, 37, 37, 111], dtype=dtype, segment=32 if dtype == WHOLE else 64)
    packed = solve(problem)
    for first, last in ((0, 37), (37, 111)):
        tokens = {x: getattr(problem, x)[:, first:last] for x in ("query", "key", "value", "grad")}
        alone = solve(replace(problem, **tokens, bounds=None))
        for name in ("out", "grad_query", "grad_key", "grad_value"):
            assert torch.equal(getattr(packed, name)[:, first:last], getattr(alone, name)), name


@pytest.mark.parametrize("dtype", [HALF, pytest.param(SHORT, marks=again)], ids=str)
def test_bits_do_not_depend_on_the_batch(dtype: torch.dtype, make: Make):
    problem = make(batch=2, length=100, dtype=dtype, state=True, segment=64)
    together, alone = solve(problem), solve(problem.only(1))
    for name, ours, others in zip(Answers._fields, together, alone, strict=True):
        assert ours is None or torch.equal(ours[1:2], others), name


@pytest.mark.parametrize("dtype", [WHOLE, pytest.param(SHORT, marks=again)], ids=str)
def test_the_future_leaves_no_trace(dtype: torch.dtype, make: Make):
    problem = make(length=90, dtype=dtype, segment=32 if dtype == WHOLE else 64)
    before = solve(problem).out
    for x in (problem.query, problem.key, problem.value):
        x[:, 77:] *= 1e6
    assert torch.equal(solve(problem).out[:, :77], before[:, :77])


@interpreted
def test_any_strides(make: Make, judge: Judge):
    problem = make(batch=2, length=20, heads=4, groups=2)
    query, key = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (problem.query, problem.key))
    value = problem.value.transpose(1, 3).contiguous().transpose(1, 3)
    grad = problem.grad[:, :1, :, :1].expand_as(problem.grad)
    judge(replace(problem, query=query, key=key, value=value, grad=grad))


@interpreted
def test_values_with_a_large_mean(make: Make, judge: Judge):
    problem = make(length=40, state=True, segment=16)
    judge(replace(problem, value=problem.value + 10))


@interpreted
@pytest.mark.parametrize("mechanism", ["mala", "inline"])
def test_what_all_tokens_have_in_common_costs_bfloat16_nothing(mechanism: str, make: Make, judge: Judge):
    problem = make(mechanism, length=200, width=32, values=32, dtype=SHORT, segment=128)
    judge(replace(problem, key=problem.key + 3, value=problem.value + 5))


@interpreted
@pytest.mark.parametrize(("batch", "bounds"), [(2, None), (1, [0, 0, 0])])
def test_no_token_leaves_the_state_as_it_was(batch: int, bounds: list[int] | None, make: Make):
    problem = make(batch=batch, length=0, state=True, bounds=bounds)
    answers = solve(problem)
    assert answers.out.shape == problem.grad.shape
    for ours, initial in zip(answers[1:4], problem.initial[1:4], strict=True):
        torch.testing.assert_close(ours, initial)
    for ours, grad in zip(answers[8:11], problem.grad_final[1:4], strict=True):
        torch.testing.assert_close(ours, grad)


def test_nothing_in_nothing_out(make: Make):
    assert solve(make(batch=0)).out.shape == (0, 20, 1, 16)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("length", "dtype"), [(40, WHOLE), pytest.param(90, SHORT, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    ("place", "wild"), [("query", math.nan), ("key", math.inf), ("value", math.nan), ("value", 3e38)]
)
def test_a_later_token_does_not_reach_earlier_rows(
    place: str, wild: float, length: int, dtype: torch.dtype, randn: Randn
):
    token = length - 9
    tokens = {
        name: randn(1, length, heads, 16, dtype=dtype).to(DEVICE)
        for name, heads in (("query", 2), ("key", 1), ("value", 1))
    }
    changed = {**tokens, place: tokens[place].clone()}
    changed[place][:, token, 0, 1] = wild

    def answers(tokens: dict[str, Tensor]) -> list[Tensor]:
        """Rows before the token, and gradients of a loss over them."""
        leaves = [x.clone().requires_grad_() for x in tokens.values()]
        out = af.attention(*leaves, causal=True, backend="triton")[:, :token]
        return [out, *(x[:, :token] for x in torch.autograd.grad(out.float().square().sum(), leaves))]

    for got, expected in zip(answers(changed), answers(tokens), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("mechanism", "rotary"), [("nala", False), pytest.param("mala_released", True, marks=pytest.mark.exhaustive)]
)
def test_nor_does_one_of_a_later_segment(mechanism: str, rotary: bool, make: Make):
    problem = make(mechanism, length=70, width=8, segment=32, rotary=rotary)
    value, grad = problem.value.clone(), problem.grad.clone()
    value[:, 50] = math.nan
    grad[:, 45:] = 0
    got, expected = (solve(replace(problem, value=x, grad=grad)) for x in (value, problem.value))
    for name in ("out", "grad_query", "grad_key", "grad_value"):
        assert torch.equal(getattr(got, name)[:, :45], getattr(expected, name)[:, :45])
    assert got.out[:, 50:].isnan().all()

"""Kernels of full attention: as good as the torch backend in the same dtype, judged by the definitions in float64.

Without a GPU they run in Triton's interpreter. With one they are compiled, a second or two for each variant; what only
varies their constants is then left to the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton import knobs

import affinear as af
from affinear.ops.rotary import Rotary, rotary_1d
from affinear.ops.triton import launch, moments
from affinear.ops.triton.rules import rule_of

Randn = Callable[..., Tensor]
Error = Callable[[Tensor, Tensor], float]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = not knobs.runtime.interpret
MECHANISMS = [name for name in af.mechanisms() if name != "softmax"]
DOUBLED = ("nala", "nala_cosine", "nala_released")  # twice as many features as channels
POISON, GARBAGE, MARGIN = float("nan"), 987_654_321, 1024
WHOLE, HALF = torch.float32, torch.float16  # the interpreter truncates where it should round to bfloat16

interpreted = pytest.mark.skipif(COMPILED, reason="only constants differ, and compiling them takes long")
pytestmark = pytest.mark.skipif(COMPILED and DEVICE == "cpu", reason="needs a GPU, or TRITON_INTERPRET=1")


class Answers(NamedTuple):
    """What attention gives, and the gradients of its arguments."""

    out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Problem:
    """Arguments of one call, and the gradient of its answers."""

    mechanism: str
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    mask: Tensor | None = None
    bounds_q: Tensor | None = None
    bounds_k: Tensor | None = None
    rotary: Rotary | None = None

    def call(self) -> launch.Call:
        """What the kernels are told besides the tokens."""
        mechanism, turns = af.mechanisms()[self.mechanism], None
        rule = rule_of(mechanism)
        assert rule is not None
        if self.rotary is not None:
            turns = torch.stack((self.rotary[0][:, ::2], self.rotary[1][:, ::2]), dim=2).flatten(1)
        return launch.Call(
            rule, mechanism.scale_for(self.query.shape[3]), self.mask, self.bounds_q, self.bounds_k, turns
        )

    def only(self, sample: int) -> Problem:
        """One sample of the batch, by itself."""
        tokens = {name: getattr(self, name)[sample : sample + 1] for name in ("query", "key", "value", "grad")}
        return replace(self, **tokens, mask=None if self.mask is None else self.mask[sample : sample + 1])


Make = Callable[..., Problem]
Solve = Callable[..., Answers]
Judge = Callable[[Problem], Answers]


def surrounded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A new tensor, and the memory in which it lies: all of it full of what is not to be read, or to be changed."""
    number = math.prod(shape)
    memory = torch.full(
        (number + 2 * MARGIN,), POISON if dtype.is_floating_point else GARBAGE, dtype=dtype, device=DEVICE
    )
    return memory[MARGIN : MARGIN + number].view(shape), memory


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors come full of what must not be read before it is written, and nothing is written beside them."""
    memories: list[Tensor] = []

    class Poisoned:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def empty(self, *shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
            new, memory = surrounded(torch.Size(*shape) if isinstance(shape[0], tuple) else shape, dtype)
            memories.append(memory)
            return new

        def empty_like(self, like: Tensor) -> Tensor:
            return self.empty(like.shape, dtype=like.dtype, device=like.device)

    monkeypatch.setattr(launch, "torch", Poisoned())
    yield
    for memory in memories:
        for margin in (memory[:MARGIN], memory[-MARGIN:]):
            assert (margin.isnan() if margin.is_floating_point() else margin == GARBAGE).all(), "written out of bounds"


@pytest.fixture
def segment(monkeypatch: pytest.MonkeyPatch) -> int:
    """How long a segment is: in the interpreter, as short as a block of tokens; and no sequence is short."""
    if not COMPILED:
        monkeypatch.setattr(moments.SEGMENT, "value", 64)
        monkeypatch.setattr(launch, "SHORT", 1)
    return moments.SEGMENT.value


@pytest.fixture
def make(randn: Randn) -> Make:
    """Draw a problem; the values have a mean, as they do in practice."""

    def draw(
        mechanism: str = "mala",
        *,
        batch: int = 1,
        queries: int = 17,
        keys: int | None = None,
        heads: int = 1,
        groups: int | None = None,
        width: int = 24,
        values: int = 16,
        dtype: torch.dtype = WHOLE,
        rotary: bool = False,
    ) -> Problem:
        def tokens(number: int, heads: int, width: int) -> Tensor:
            return surrounded((batch, number, heads, width), dtype)[0].copy_(randn(batch, number, heads, width))

        keys, groups = keys if keys is not None else queries, groups or heads
        return Problem(
            mechanism,
            tokens(queries, heads, width),
            tokens(keys, groups, width),
            tokens(keys, groups, values).add_(0.5),
            tokens(queries, heads, values),
            rotary=rotary_1d(queries, width, device=DEVICE) if rotary else None,
        )

    return draw


@pytest.fixture
def solve(monkeypatch: pytest.MonkeyPatch) -> Solve:
    """Answers of the kernels: of short sequences in one launch, or, as of others, with states in memory in between."""

    def run(problem: Problem, one_launch: bool = False) -> Answers:
        with monkeypatch.context() as patch:
            if not one_launch:
                patch.setattr(launch, "_one_launch", lambda *_: False)
            return attend(problem)

    def attend(problem: Problem) -> Answers:
        p, call = problem, problem.call()
        out, state = launch.attention(p.query, p.key, p.value, call, True)
        assert state is not None
        return Answers(out, *launch.attention_backward(p.grad, p.query, p.key, p.value, state, call))

    return run


def defined(problem: Problem, dtype: torch.dtype, backend: str) -> Answers:
    """Answers of another backend in this dtype."""
    p = problem
    query, key, value = (x.detach().to(dtype).requires_grad_() for x in (p.query, p.key, p.value))
    out = af.attention(
        query, key, value, p.mechanism, key_mask=p.mask, cu_seqlens_q=p.bounds_q, cu_seqlens_k=p.bounds_k,
        rotary=p.rotary, backend=backend,
    )  # fmt: skip
    return Answers(out.detach(), *torch.autograd.grad(out, (query, key, value), p.grad.to(dtype)))


@pytest.fixture
def judge(solve: Solve, relative_error: Error) -> Judge:
    """Hold both forms to twice the error of the torch backend, and, uncompiled, to each other's bits."""

    def check(problem: Problem) -> Answers:
        truth = defined(problem, torch.float64, "reference")
        rival = defined(problem, problem.query.dtype, "torch")
        forms = {"split": solve(problem)}
        narrow = launch.blocks_for(*widths(problem), problem.query.element_size()).e_blocks == 1
        if narrow and max(problem.query.shape[1], problem.key.shape[1]) <= launch.SHORT:
            forms["one launch"] = solve(problem, one_launch=True)
        for form, answers in forms.items():
            for name in Answers._fields:
                ours, theirs, exact = (getattr(x, name) for x in (answers, rival, truth))
                assert ours.dtype == problem.query.dtype, (form, name)
                # Where torch happens to round nothing, one rounding of a float32 is still no mistake.
                bound = 2 * relative_error(theirs, exact) + torch.finfo(torch.float32).eps
                assert relative_error(ours, exact) <= bound, (form, name)
        if not COMPILED:  # compilers choose for every kernel which products and sums are rounded as one
            for form, answers in forms.items():
                for name, ours, others in zip(Answers._fields, answers, forms["split"], strict=True):
                    assert torch.equal(ours, others), (form, name)
        return forms["split"]

    return check


def widths(problem: Problem) -> tuple[int, int, int]:
    """Width of keys and of values, and features per channel."""
    return problem.key.shape[3], problem.value.shape[3], 2 if problem.mechanism in DOUBLED else 1


@interpreted
def test_one_launch_serves_short_sequences(make: Make, monkeypatch: pytest.MonkeyPatch):
    serves, answers = launch._one_launch, list[bool]()
    monkeypatch.setattr(launch, "_one_launch", lambda *args: answers.append(serves(*args)) or answers[-1])
    monkeypatch.setattr(launch, "SHORT", 20)
    for queries, keys in ((20, 20), (21, 5), (5, 21)):
        problem = make(queries=queries, keys=keys)
        launch.attention(problem.query, problem.key, problem.value, problem.call(), False)
    assert answers == [True, False, False]
    # Packed ones are not, however few they are: bits would depend on the neighbours.
    assert not serves(launch.blocks_for(24, 16, 1, 4), 5, 5, True)


@interpreted
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_is_its_definition(mechanism: str, make: Make, judge: Judge):
    judge(make(mechanism, queries=7, keys=39))


@interpreted
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_mechanism_turns(mechanism: str, make: Make, judge: Judge):
    judge(make(mechanism, queries=39, rotary=True, dtype=HALF))


@pytest.mark.parametrize(("queries", "keys"), [(2, 65), (65, 2), (7, 15), (15, 17), (17, 7)])
def test_any_number_of_tokens(queries: int, keys: int, make: Make, judge: Judge):
    judge(make(queries=queries, keys=keys))


@interpreted  # lengths of one, and multiples of sixteen, are constants
@pytest.mark.parametrize(("queries", "keys"), [(1, 16), (16, 32), (64, 64)])
def test_numbers_of_tokens_that_kernels_are_specialized_for(queries: int, keys: int, make: Make, judge: Judge):
    judge(make(queries=queries, keys=keys, dtype=HALF))


@pytest.mark.parametrize("dtype", [WHOLE, HALF], ids=str)
def test_one_key_is_the_answer_and_has_no_gradient(dtype: torch.dtype, make: Make, solve: Solve):
    problem = make("linear", queries=5, keys=1, dtype=dtype)
    answers = solve(problem)
    assert torch.equal(answers.out, problem.value.expand_as(answers.out))
    # What cancels has the size of the gradient times the value, and is rounded as they are.
    terms = problem.grad.double().norm() * problem.value.double().norm() * torch.finfo(dtype).eps
    assert answers.query.double().norm() <= terms
    assert answers.key.double().norm() <= terms
    sums = problem.grad.double().sum(1, keepdim=True)
    torch.testing.assert_close(answers.value.double(), sums, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    ("mechanism", "width", "values"),
    [
        ("mala", 8, 8),
        pytest.param("mala", 24, 96, marks=interpreted),
        pytest.param("mala", 96, 8, marks=interpreted),
        pytest.param("inline", 40, 24, marks=interpreted),
        pytest.param("focused", 16, 40, marks=interpreted),
        pytest.param("nala", 40, 8, marks=interpreted),
        pytest.param("nala_cosine", 8, 32, marks=interpreted),
    ],
)
def test_any_width(mechanism: str, width: int, values: int, make: Make, judge: Judge):
    judge(make(mechanism, width=width, values=values, queries=33, keys=40))


@pytest.mark.parametrize(
    ("mechanism", "width", "values", "dtype"),
    [
        ("mala", 160, 160, HALF),
        pytest.param("mala_released", 72, 200, WHOLE, marks=interpreted),
        pytest.param("nala", 96, 96, HALF, marks=interpreted),
    ],
)
def test_states_too_wide_for_one_program(
    mechanism: str, width: int, values: int, dtype: torch.dtype, make: Make, judge: Judge
):
    problem = make(mechanism, width=width, values=values, queries=33, rotary=True, dtype=dtype)
    assert launch.blocks_for(*widths(problem), dtype.itemsize).e_blocks > 1
    judge(problem)


@interpreted
@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("rotary", [False, True])
def test_two_features_of_each_channel_of_a_wide_head_fit_one_program(
    rotary: bool, make: Make, solve: Solve, relative_error: Error
):
    problem = make("nala", width=96, values=96, queries=33, rotary=rotary, dtype=torch.bfloat16)
    assert launch.blocks_for(*widths(problem), 2, whole=True).e_blocks == 1
    ours, rival = solve(problem), defined(problem, torch.bfloat16, "torch")
    for name, mine, theirs, exact in zip(
        Answers._fields, ours, rival, defined(problem, torch.float64, "reference"), strict=True
    ):
        # Gradients of directions lose what points along them, at every width, and so more of what rounding left.
        times = 2 if name == "out" else 3
        assert relative_error(mine, exact) <= times * relative_error(theirs, exact), name


@interpreted
@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize(
    ("mechanism", "rotary"),
    [("nala", False), ("nala_released", False), ("nala_released", True), ("nala_cosine", True), ("nala_cosine", False)],
)
def test_two_features_of_a_channel_go_backwards_side_by_side(
    mechanism: str, rotary: bool, segment: int, make: Make, solve: Solve, relative_error: Error
):
    # Two heads of queries for one of keys, several segments and a rest; no query is nothing, and none has every sign.
    problem = make(
        mechanism, batch=2, queries=2 * segment + 9, heads=2, groups=1, width=64, values=40, rotary=rotary,
        dtype=torch.bfloat16,
    )  # fmt: skip
    problem.query[0, 3] = 0
    problem.query[1, 5] = problem.query[1, 5].abs()
    ours, rival = solve(problem), defined(problem, torch.bfloat16, "torch")
    for name, mine, theirs, exact in zip(
        Answers._fields, ours, rival, defined(problem, torch.float64, "reference"), strict=True
    ):
        times = 2 if name == "out" else 3
        assert relative_error(mine, exact) <= times * relative_error(theirs, exact), name
    for mine, alone in zip(ours, solve(problem.only(1)), strict=True):
        assert torch.equal(mine[1:], alone)


@pytest.mark.parametrize(
    ("mechanism", "rotary", "dtype"),
    [("mala", False, HALF), pytest.param("nala_released", True, WHOLE, marks=interpreted)],
)
def test_sequences_of_several_segments(
    mechanism: str, rotary: bool, dtype: torch.dtype, segment: int, make: Make, judge: Judge
):
    long = 2 * segment + 17
    judge(make(mechanism, queries=long, keys=long if rotary else segment + 1, rotary=rotary, dtype=dtype))


@interpreted
def test_wide_states_of_several_segments(segment: int, make: Make, judge: Judge):
    judge(make(queries=5, keys=segment + 9, width=136, values=72, dtype=HALF))
    judge(make(queries=segment + 9, keys=5, width=136, values=72, dtype=HALF))


@interpreted
def test_no_more_than_so_many_segments(segment: int, make: Make, judge: Judge, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(moments.MOST_SEGMENTS, "value", 2)
    assert launch.segments_of(7 * segment, 32) == 2
    judge(make(queries=3, keys=3 * segment + 5))
    judge(make(queries=3 * segment + 5, keys=3))


@interpreted
def test_cross_attention_of_packed_segments(segment: int, make: Make, judge: Judge):
    problem = make(queries=segment + 20, keys=2 * segment + 30)
    judge(
        replace(
            problem,
            bounds_q=torch.tensor([0, 3, segment + 20], device=DEVICE),
            bounds_k=torch.tensor([0, segment + 21, 2 * segment + 30], device=DEVICE),
        )
    )


@pytest.mark.parametrize(
    ("mechanism", "nothing"),
    [("mala", float("nan")), pytest.param("nala_cosine", float("inf"), marks=interpreted)],
)
def test_masked_keys_are_as_if_never_there(mechanism: str, nothing: float, make: Make, judge: Judge):
    problem = make(mechanism, batch=2, queries=5, keys=40)
    mask = torch.arange(40, device=DEVICE).expand(2, -1) % 3 != torch.tensor([[0], [1]], device=DEVICE)
    problem.key[~mask] = nothing
    problem.value[~mask] = -nothing
    answers = judge(replace(problem, mask=mask))
    assert (answers.key[~mask] == 0).all()
    assert (answers.value[~mask] == 0).all()


@pytest.mark.parametrize("mechanism", ["linear", pytest.param("mala_released", marks=interpreted)])
@pytest.mark.parametrize("one_launch", [True, False])
def test_queries_without_a_key_get_zeros_and_pass_no_gradient(
    mechanism: str, one_launch: bool, make: Make, solve: Solve
):
    problem = make(mechanism, batch=2, queries=19, keys=19, rotary=True)
    mask = torch.ones(2, 19, dtype=torch.bool, device=DEVICE)
    mask[1] = False
    answers = solve(replace(problem, mask=mask), one_launch)
    alone = solve(replace(problem, mask=mask).only(0), one_launch)
    for x, other in zip(answers, alone, strict=True):
        assert (x[1] == 0).all()
        assert torch.equal(x[:1], other)


@interpreted
@pytest.mark.parametrize("one_launch", [True, False])
@pytest.mark.parametrize(("queries", "keys"), [(5, 0), (0, 5), (0, 0)])
def test_no_tokens_at_all(queries: int, keys: int, one_launch: bool, make: Make, solve: Solve):
    answers = solve(make(queries=queries, keys=keys), one_launch)
    assert answers.out.shape == (1, queries, 1, 16)
    for x in answers:
        assert (x == 0).all()


@interpreted
@pytest.mark.parametrize("one_launch", [True, False])
def test_an_empty_batch(one_launch: bool, make: Make, solve: Solve):
    answers = solve(make(batch=0), one_launch)
    assert [len(x) for x in answers] == [0, 0, 0, 0]


@pytest.mark.parametrize("mechanism", ["mala", pytest.param("nala", marks=interpreted)])
def test_packed_sequences_some_of_them_empty(mechanism: str, make: Make, judge: Judge):
    problem = make(mechanism, queries=60, rotary=True)
    bounds_q = torch.tensor([0, 0, 33, 40, 60, 60], device=DEVICE)
    bounds_k = torch.tensor([0, 7, 41, 41, 60, 60], device=DEVICE, dtype=torch.int32)
    problem = replace(problem, bounds_q=bounds_q, bounds_k=bounds_k)
    answers = judge(problem)
    assert (answers.out[:, 33:40] == 0).all()  # queries without keys
    assert (answers.query[:, 33:40] == 0).all()
    assert (answers.key[:, :7] == 0).all()  # keys without queries
    assert (answers.value[:, :7] == 0).all()


@pytest.mark.parametrize("rotary", [False, pytest.param(True, marks=interpreted)])
def test_query_heads_share_key_heads(rotary: bool, make: Make, judge: Judge):
    judge(make("relu", queries=10, heads=4, groups=2, rotary=rotary, dtype=HALF))


@interpreted
def test_query_heads_share_key_heads_over_segments(segment: int, make: Make, judge: Judge):
    judge(make("linear", queries=segment + 10, keys=9, heads=2, groups=1))


def transposed(x: Tensor) -> Tensor:
    """The same numbers, heads before tokens in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def spread(x: Tensor) -> Tensor:
    """The same numbers, with NaN between them in memory."""
    return torch.stack((x, torch.full_like(x, float("nan"))), dim=-1).flatten(-2)[..., ::2]


def last(x: Tensor) -> Tensor:
    """The same numbers, as the last third of a wider projection."""
    return torch.cat((torch.full_like(x, float("nan")), torch.full_like(x, float("nan")), x), dim=2)[
        :, :, -x.shape[2] :
    ]


@pytest.mark.parametrize("layout", [transposed, spread, last])
@pytest.mark.parametrize("one_launch", [True, False])
def test_strides_are_read_as_they_are(
    layout: Callable[[Tensor], Tensor], one_launch: bool, make: Make, solve: Solve, relative_error: Error
):
    problem = make(batch=2, queries=9, keys=35, heads=2)
    mask = torch.arange(35, device=DEVICE) % 5 != 0
    problem = replace(problem, mask=mask.expand(2, -1))
    laid = {name: layout(getattr(problem, name)) for name in ("query", "key", "value", "grad")}
    assert not laid["query"].is_contiguous()
    other_mask = torch.stack((mask, ~mask), dim=1)[:, 0].expand(2, -1)
    for x, other in zip(
        solve(problem, one_launch), solve(replace(problem, **laid, mask=other_mask), one_launch), strict=True
    ):
        # Compiled, channels that do not lie side by side go to other threads, and are summed in another order.
        assert torch.equal(x, other) or (COMPILED and layout is spread and relative_error(x, other) < 1e-6)


@pytest.mark.parametrize("one_launch", [True, False])
def test_a_gradient_may_be_one_number_for_all(one_launch: bool, make: Make, solve: Solve):
    problem = make(batch=2, queries=9)
    ones = torch.ones_like(problem.grad)
    expanded = torch.ones((), device=DEVICE).expand_as(problem.grad)
    answers, others = (solve(replace(problem, grad=grad), one_launch) for grad in (ones, expanded))
    for x, other in zip(answers, others, strict=True):
        assert torch.equal(x, other)


@pytest.mark.parametrize("one_launch", [True, False])
@pytest.mark.parametrize("mechanism", ["mala", pytest.param("nala", marks=interpreted)])
def test_a_sample_does_not_depend_on_its_batch(mechanism: str, one_launch: bool, make: Make, solve: Solve):
    problem = make(mechanism, batch=3, queries=35, keys=70, heads=1, dtype=HALF)
    problem = replace(problem, mask=torch.arange(70, device=DEVICE).expand(3, -1) % 7 != 0)
    answers = solve(problem, one_launch)
    # Alone, it is split even where the batch would not be.
    alone = solve(problem.only(1))
    for name, x, other in zip(Answers._fields, answers, alone, strict=True):
        assert torch.equal(x[1:2], other), name


@interpreted
@pytest.mark.parametrize("processors", [1, 7, 132])
def test_the_chip_does_not_matter(processors: int, make: Make, solve: Solve, monkeypatch: pytest.MonkeyPatch):
    problem = make(queries=100, keys=100)
    answers = solve(problem)
    monkeypatch.setattr(launch, "processors", lambda device: processors)
    for name, x, other in zip(Answers._fields, answers, solve(problem), strict=True):
        assert torch.equal(x, other), name


@interpreted
@pytest.mark.parametrize("dtype", [WHOLE, HALF], ids=str)
@pytest.mark.parametrize("mechanism", ["mala", "inline"])
def test_what_all_tokens_have_in_common_costs_no_accuracy(mechanism: str, dtype: torch.dtype, make: Make, judge: Judge):
    problem = make(mechanism, queries=20, keys=40, dtype=dtype)
    judge(replace(problem, key=problem.key + 3, value=problem.value + 4))


@pytest.mark.parametrize("dtype", [WHOLE, HALF], ids=str)
@pytest.mark.parametrize("rotary", [False, pytest.param(True, marks=interpreted)])
def test_the_state_is_that_of_summarize(
    rotary: bool, dtype: torch.dtype, segment: int, make: Make, relative_error: Error
):
    problem = make(batch=2, queries=segment + 9, rotary=rotary, dtype=dtype)
    mask = torch.arange(segment + 9, device=DEVICE).expand(2, -1) % 4 != 0
    problem = replace(problem, mask=mask)
    state = launch.summarize_tokens(problem.key, problem.value, problem.call())
    truth, rival = (
        af.summarize(problem.key.to(to), problem.value.to(to), key_mask=mask, rotary=problem.rotary, backend="torch")
        for to in (torch.float64, dtype)
    )
    assert torch.equal(state.count, mask.sum(1, keepdim=True))
    assert (state.rotated_key_mean is None) == (not rotary)
    for name in ("key_mean", "value_mean", "covariance", *(("rotated_key_mean",) if rotary else ())):
        ours, theirs, exact = (getattr(x, name) for x in (state, rival, truth))
        assert ours.dtype == torch.float32
        # Products of half precision take sixteen bits of either factor, and the interpreter cuts where it should round.
        slack = torch.finfo(torch.float32).eps if dtype == WHOLE else 2**-14
        assert relative_error(ours, exact) <= 2 * relative_error(theirs, exact) + slack, name

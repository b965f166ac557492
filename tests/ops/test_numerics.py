"""Edges and extremes: what is empty, zero, constant, huge, offset or very long comes out finite and right."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import affinear as af
from affinear.ops import rotary_1d
from affinear.ops.mechanisms import elu_plus_one

MECHANISMS = list(af.mechanisms())
LINEAR = [name for name, mechanism in af.mechanisms().items() if mechanism.gain is not None]
ROWS_SUM_TO_ONE = [name for name in MECHANISMS if not name.endswith("_released")]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# A few roundings of the output, whatever the statistics are kept in.
ROUNDING = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}
HEADS, WIDTH, VALUES = 2, 4, 3

every_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
causal_or_not = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def tokens(queries: int, keys: int | None = None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and values, (2, tokens, 2, width)."""
    keys = queries if keys is None else keys
    shapes = ((2, queries, HEADS, WIDTH), (2, keys, HEADS, WIDTH), (2, keys, HEADS, VALUES))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def finite_answer(inputs: list[Tensor], mechanism: str, **given: object) -> tuple[Tensor, list[Tensor]]:
    """The answer and the gradients, which are finite, as is the answer."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = af.attention(inputs[0], inputs[1], inputs[2], mechanism, **given)  # pyright: ignore
    assert out.dtype == inputs[0].dtype
    gradients = list(torch.autograd.grad((out * torch.randn_like(out)).sum(), inputs))
    assert out.isfinite().all()
    assert all(x.isfinite().all() for x in gradients)
    return out.detach(), gradients


def assert_near(out: Tensor, expected: Tensor) -> None:
    """Equal to a few roundings of the output."""
    tolerance = ROUNDING[out.dtype]
    torch.testing.assert_close(out.double(), expected.double().expand_as(out), rtol=tolerance, atol=tolerance)


def running_mean(value: Tensor) -> Tensor:
    """Mean of all values up to each."""
    return value.double().cumsum(1) / torch.arange(1, value.shape[1] + 1)[:, None, None]


def row_errors(out: Tensor, truth: Tensor) -> Tensor:
    """||out - truth|| / ||truth|| of each row, (B, N, H)."""
    return (out.double() - truth).norm(dim=-1) / truth.norm(dim=-1)


# Nothing at all


@every_dtype
@causal_or_not
@every_mechanism
def test_a_row_without_keys_is_zero_and_learns_nothing(mechanism: str, causal: bool, dtype: torch.dtype):
    inputs = tokens(70, dtype=dtype)
    mask = torch.ones(2, 70, dtype=torch.bool)
    mask[1] = False
    # What is masked may hold anything.
    inputs[1][1, 3], inputs[1][1, 4], inputs[2][1, 5] = torch.nan, torch.inf, -torch.inf
    out, gradients = finite_answer(inputs, mechanism, causal=causal, key_mask=mask)
    assert not out[1].any()
    assert out[0].any()
    assert all(not x[1].any() for x in gradients)


@every_mechanism
def test_rows_before_the_first_key_are_zero_and_learn_nothing(mechanism: str):
    mask = torch.ones(2, 200, dtype=torch.bool)
    mask[:, :131] = False
    out, gradients = finite_answer(tokens(200), mechanism, causal=True, key_mask=mask)
    assert not out[:, :131].any()
    assert out[:, 131:].any()
    assert all(not x[:, :131].any() for x in gradients)


@every_mechanism
@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 5), (5, 0)])
def test_sequences_may_be_empty(mechanism: str, queries: int, keys: int):
    out, _ = finite_answer(tokens(queries, keys), mechanism)
    assert out.shape == (2, queries, HEADS, VALUES)
    assert not out.any()
    if queries == keys:
        assert finite_answer(tokens(0), mechanism, causal=True)[0].shape == (2, 0, HEADS, VALUES)


@pytest.mark.parametrize("mechanism", LINEAR)
def test_the_state_of_nothing_answers_zeros(mechanism: str):
    query, key, value = tokens(5, 0)
    state = af.summarize(key, value, mechanism)
    assert not af.attend(query, state).any()
    _, after = af.attention(query[:, :0], key, value, mechanism, causal=True, initial_state=state, return_state=True)
    assert not after.count.any()


def test_a_batch_may_be_empty():
    inputs = [x[:0] for x in tokens(5)]
    for causal in (False, True):
        assert finite_answer(inputs, "mala", causal=causal)[0].shape == (0, 5, HEADS, VALUES)


# One key, constant values, features that vanish


@every_dtype
@pytest.mark.parametrize("mechanism", ROWS_SUM_TO_ONE)
def test_one_key_answers_with_its_value(mechanism: str, dtype: torch.dtype):
    inputs = tokens(5, 1, dtype=dtype)
    assert_near(finite_answer(inputs, mechanism)[0], inputs[2])
    inputs = tokens(70, dtype=dtype)
    assert_near(finite_answer(inputs, mechanism, causal=True)[0][:, :1], inputs[2][:, :1])


@every_dtype
@causal_or_not
@pytest.mark.parametrize("mechanism", ROWS_SUM_TO_ONE)
def test_constant_values_come_back(mechanism: str, causal: bool, dtype: torch.dtype):
    query, key, value = tokens(150, dtype=dtype)
    constant = value[:, :1].expand_as(value)
    assert_near(finite_answer([query, key, constant], mechanism, causal=causal)[0], constant)


@every_dtype
@causal_or_not
@every_mechanism
def test_a_zero_query_is_answered(mechanism: str, causal: bool, dtype: torch.dtype):
    inputs = tokens(150, dtype=dtype)
    inputs[0].zero_()
    out, _ = finite_answer(inputs, mechanism, causal=causal)
    if mechanism in ("inline", "relu", "focused", "nala", "nala_cosine", "softmax"):
        assert_near(out, running_mean(inputs[2]) if causal else inputs[2].double().mean(1, keepdim=True))


@every_dtype
@causal_or_not
@pytest.mark.parametrize("which", ["queries", "keys", "queries and keys"])
@pytest.mark.parametrize(("mechanism", "kills"), [("relu", -1), ("focused", -1), ("nala", 0), ("nala_cosine", 0)])
def test_features_that_vanish_leave_the_mean(
    mechanism: str, kills: float, which: str, causal: bool, dtype: torch.dtype
):
    inputs = tokens(150, dtype=dtype)
    if "queries" in which:
        inputs[0] = kills * inputs[0].abs()
    if "keys" in which:
        inputs[1] = kills * inputs[1].abs()
    out, _ = finite_answer(inputs, mechanism, causal=causal)
    assert_near(out, running_mean(inputs[2]) if causal else inputs[2].double().mean(1, keepdim=True))


@causal_or_not
@pytest.mark.parametrize("mechanism", ["mala_released", "nala_released"])
def test_the_released_networks_stay_finite_where_features_vanish(mechanism: str, causal: bool):
    inputs = tokens(150)
    inputs[0].zero_()
    inputs[1].zero_()
    finite_answer(inputs, mechanism, causal=causal)


@causal_or_not
@pytest.mark.parametrize("mechanism", ROWS_SUM_TO_ONE)
def test_equal_keys_answer_with_the_mean(mechanism: str, causal: bool):
    query, key, value = tokens(150)
    query, key = query.abs(), key[:, :1].abs().expand_as(key)  # of one sign, so that z does not cancel
    out, _ = finite_answer([query, key, value], mechanism, causal=causal)
    assert_near(out, running_mean(value) if causal else value.double().mean(1, keepdim=True))


def test_elu_plus_one_never_vanishes():
    x = torch.tensor([-17.0, -20.0, -50.0, -80.0])
    assert (elu_plus_one(x) > 0).all()
    assert not (torch.nn.functional.elu(x) + 1)[2:].any()
    torch.testing.assert_close(elu_plus_one(x).double(), x.double().exp(), rtol=1e-6, atol=0)
    torch.testing.assert_close(elu_plus_one(-x), 1 - x)


@causal_or_not
@pytest.mark.parametrize("mechanism", ["mala", "linear"])
def test_very_negative_keys_are_told_apart(mechanism: str, causal: bool):
    query, key, value = tokens(100)
    key = key - 20
    truth = af.attention(query.double(), key.double(), value.double(), mechanism, causal=causal, backend="reference")
    out, _ = finite_answer([query, key, value], mechanism, causal=causal)
    assert row_errors(out, truth).max() < 1e-4
    assert (out.double() - truth).norm() / truth.norm() < 2e-6


# Half precision, a hundred thousand keys


def half_ulp_errors(out: Tensor, truth: Tensor) -> Tensor:
    """Errors in units in the last place of float16. A hundredth of the largest answer is what counts as small."""
    size = truth.abs().clamp(min=truth.abs().max() / 100)
    unit = torch.exp2(size.frexp().exponent.double() - 11)
    return (out.double() - truth).abs() / unit


def large_half_tokens(queries: int, keys: int) -> list[Tensor]:
    """Keys up to 50, values up to 60,000: their float16 sums overflow after two tokens."""
    query = torch.randn(1, queries, 1, 16)
    key = 100 * torch.rand(1, keys, 1, 16) - 50
    value = 120_000 * torch.rand(1, keys, 1, 16) - 60_000
    return [x.half() for x in (query, key, value)]


@pytest.mark.parametrize("mechanism", LINEAR)
def test_float16_survives_a_hundred_thousand_keys(mechanism: str):
    query, key, value = large_half_tokens(8, 100_000)
    truth = af.attention(query.double(), key.double(), value.double(), mechanism, backend="reference")
    assert truth.abs().max() < torch.finfo(torch.float16).max
    assert half_ulp_errors(af.attention(query, key, value, mechanism), truth).max() <= 1


@pytest.mark.parametrize("mechanism", ["mala", "inline", "nala"])
def test_float16_survives_a_hundred_thousand_causal_keys(mechanism: str):
    query, key, value = large_half_tokens(100_000, 100_000)
    out = af.attention(query, key, value, mechanism, causal=True)
    query, key, value = (x.double() for x in (query, key, value))
    for row in (20_000, 40_959, 40_960, 70_001, 99_999):  # the first rows average little, and may not fit
        seen = slice(0, row + 1)
        alone = query[:, row : row + 1]
        truth = af.attention(alone, key[:, seen], value[:, seen], mechanism, backend="reference")
        assert truth.abs().max() < torch.finfo(torch.float16).max
        assert half_ulp_errors(out[:, row : row + 1], truth).max() <= 1


@pytest.mark.parametrize("mechanism", LINEAR)
def test_float16_gradients_survive_long_sums(mechanism: str):
    inputs = [x.requires_grad_() for x in tokens(5000, dtype=torch.float16)]
    widened = [x.detach().double().requires_grad_() for x in inputs]
    found = torch.autograd.grad(af.attention(*inputs, mechanism).double().sum(), inputs)  # pyright: ignore
    truth = torch.autograd.grad(af.attention(*widened, mechanism).sum(), widened)  # pyright: ignore
    assert found[2].dtype == torch.float16
    assert (found[2].double() - truth[2]).norm() / truth[2].norm() < 2e-3


# A million keys


@pytest.mark.parametrize("mechanism", ["mala", "inline", "nala"])
def test_a_million_keys_in_float32(mechanism: str):
    query, key, value = (torch.randn(1, n, 1, 16) for n in (4, 1_000_000, 1_000_000))
    value = value + key  # an answer that does not vanish
    truth = af.attention(query.double(), key.double(), value.double(), mechanism, backend="reference")
    out = af.attention(query, key, value, mechanism)
    assert (out - truth).norm() / truth.norm() < 1e-5


def test_a_million_causal_keys_in_float32():
    query, key, value = (torch.randn(1, 1_000_000, 1, 8) for _ in range(3))
    value = value + key
    with torch.no_grad():
        out = af.attention(query, key, value, causal=True)
    last = slice(999_999, None)
    truth = af.attention(query[:, last].double(), key.double(), value.double(), backend="reference")
    assert (out[:, last] - truth).norm() / truth.norm() < 1e-5


# Offsets and jumps


@causal_or_not
@pytest.mark.parametrize("mechanism", [name for name in LINEAR if name in ROWS_SUM_TO_ONE])
def test_an_offset_of_the_values_costs_only_its_own_rounding(mechanism: str, causal: bool):
    query, key, value = tokens(300)
    value = 1e4 + value
    truth = af.attention(query.double(), key.double(), value.double(), mechanism, causal=causal, backend="reference")
    out, _ = finite_answer([query, key, value], mechanism, causal=causal)
    unit = 2.0**-10  # float32 between 8,192 and 16,384
    assert (out - truth).abs().max() < 8 * unit


@causal_or_not
@pytest.mark.parametrize("mechanism", ["inline", "mala", "linear"])
def test_an_offset_of_the_keys_costs_only_its_own_rounding(mechanism: str, causal: bool):
    query, key, value = tokens(300)
    query, key = query.abs(), key + 100
    truth = af.attention(query.double(), key.double(), value.double(), mechanism, causal=causal, backend="reference")
    out, _ = finite_answer([query, key, value], mechanism, causal=causal)
    assert (out - truth).norm() / truth.norm() < 2e-5


@pytest.mark.parametrize("what", ["keys", "values", "keys and values"])
@pytest.mark.parametrize("start", [128, 100], ids=["at the edge of a chunk", "within a chunk"])
@pytest.mark.parametrize("mechanism", ["mala", "inline", "nala", "linear"])
def test_later_tokens_a_million_times_larger_do_not_spoil_earlier_rows(mechanism: str, start: int, what: str):
    query, key, value = tokens(200)
    if "keys" in what:
        key[:, start:] *= 1e6
    if "values" in what:
        value[:, start:] *= 1e6
    truth = af.attention(query.double(), key.double(), value.double(), mechanism, causal=True, backend="reference")
    out, _ = finite_answer([query, key, value], mechanism, causal=True)
    early = (out.double() - truth)[:, :start].norm() / truth[:, :start].norm()
    assert early < 2e-6
    assert (out.double() - truth).norm() / truth.norm() < 1e-5


@pytest.mark.parametrize("mechanism", ["mala", "inline", "nala", "linear"])
def test_earlier_tokens_a_million_times_larger_are_remembered(mechanism: str):
    query, key, value = tokens(200)
    value[:, :100] *= 1e6
    truth = af.attention(query.double(), key.double(), value.double(), mechanism, causal=True, backend="reference")
    assert row_errors(af.attention(query, key, value, mechanism, causal=True), truth).median() < 1e-5


@pytest.mark.parametrize("mechanism", LINEAR)
def test_the_future_changes_nothing(mechanism: str):
    query, key, value = tokens(200, dtype=torch.float64)
    before = af.attention(query, key, value, mechanism, causal=True)[:, :150]
    key[:, 150:], value[:, 150:] = torch.randn_like(key[:, 150:]), torch.randn_like(value[:, 150:])
    after = af.attention(query, key, value, mechanism, causal=True)[:, :150]
    torch.testing.assert_close(after, before, rtol=1e-11, atol=1e-11)


# Decoding


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("mechanism", ["mala", "inline", "nala"])
def test_decoding_gives_the_causal_numbers_at_constant_size(mechanism: str, dtype: torch.dtype, tolerance: float):
    length = 500
    query, key, value = tokens(length, dtype=dtype)
    cos, sin = rotary_1d(length, WIDTH)
    truth = af.attention(
        query.double(), key.double(), value.double(), mechanism, causal=True, rotary=(cos, sin), backend="reference"
    )
    state, answers, sizes = None, [], set()
    for i in range(length):
        now = slice(i, i + 1)
        out, state = af.attention(
            query[:, now],
            key[:, now],
            value[:, now],
            mechanism,
            causal=True,
            rotary=(cos[now], sin[now]),
            initial_state=state,
            return_state=True,
        )
        answers.append(out)
        sizes.add(tuple(leaf.untyped_storage().nbytes() for leaf in tree_leaves(state)))
        assert state.count.unique().tolist() == [i + 1]
    # A query may share hardly a channel with the first few keys: what nala says then is large and ill-conditioned.
    spoken = slice(32, None)
    assert (torch.cat(answers, dim=1) - truth)[:, spoken].norm() / truth[:, spoken].norm() < tolerance
    assert len(sizes) == 1


# Memory


def peak_bytes(function: Callable[[], object]) -> int:
    """The most that was allocated at any time, above what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = function()
    assert record.profiler is not None
    assert record.profiler.kineto_results is not None
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    changes = torch.tensor([event.nbytes() for event in events])  # pyright: ignore[reportAttributeAccessIssue]
    del result
    return int(changes.cumsum(0).max())


# Peaks of a forward pass and of both, above the output and in sizes of the inputs. Packed tokens are gathered.
PEAKS = {"plain": (3, 5), "masked": (3, 5), "rotary": (3, 5), "packed": (6, 12)}


@pytest.mark.parametrize("case", PEAKS)
@causal_or_not
@pytest.mark.parametrize("mechanism", ["mala", "nala"])
def test_memory_is_a_small_multiple_of_the_inputs(mechanism: str, causal: bool, case: str):
    length = 8192
    inputs = [torch.randn(1, length, 4, 64).requires_grad_() for _ in range(3)]
    size = sum(x.nbytes for x in inputs)
    output = inputs[2].nbytes
    given: dict[str, object] = {"causal": causal}
    if case == "masked":
        given["key_mask"] = torch.rand(1, length) < 0.7
    if case == "rotary":
        given["rotary"] = rotary_1d(length, 64)
    if case == "packed":
        given["cu_seqlens_q"] = given["cu_seqlens_k"] = torch.tensor([0, 100, 5000, length])

    def forward() -> Tensor:
        return af.attention(inputs[0], inputs[1], inputs[2], mechanism, **given)  # pyright: ignore

    def forward_and_backward() -> tuple[Tensor, ...]:
        out = forward()
        return torch.autograd.grad(out, inputs, out.detach())

    with torch.no_grad():
        forward_peak = (peak_bytes(forward) - output) / size
    peak = (peak_bytes(forward_and_backward) - output) / size
    assert forward_peak < PEAKS[case][0]
    assert peak < PEAKS[case][1]


@pytest.mark.parametrize("mechanism", ["mala", "nala"])
def test_causal_memory_grows_with_the_length_and_not_its_square(mechanism: str):
    peaks = []
    for length in (16_384, 65_536):
        query, key, value = torch.randn(3, 1, length, 1, 16).unbind()
        peaks.append(peak_bytes(lambda q=query, k=key, v=value: af.attention(q, k, v, mechanism, causal=True)))
    assert peaks[1] < 4.5 * peaks[0]


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("mechanism", list(af.mechanisms()))
def test_no_key_gives_zeros_whatever_the_query_holds(mechanism: str, backend: str):
    key, value = torch.randn(2, 1, 3, 1, 4).unbind()
    hidden = torch.zeros(1, 3, dtype=torch.bool)
    for number in (0.0, 1e30, math.inf, math.nan):
        query = torch.full((1, 3, 1, 4), number)
        for causal in (False, True):
            out = af.attention(query, key, value, mechanism, causal=causal, key_mask=hidden, backend=backend)
            assert torch.equal(out, torch.zeros_like(out))
        if af.mechanisms()[mechanism].gain is not None:
            out = af.attend(query, af.summarize(key[:, :0], value[:, :0], mechanism), backend=backend)
            assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("mechanism", ["nala", "nala_cosine", "nala_released"])
def test_second_derivatives_are_finite_at_a_channel_that_vanishes(mechanism: str):
    tokens = torch.randn(3, 1, 5, 1, 4, dtype=torch.float64)
    tokens[:2, 0, 2, 0, 1] = 0
    query, key, value = (x.requires_grad_() for x in tokens.unbind())
    out = af.attention(query, key, value, mechanism)
    first = torch.autograd.grad(out.square().sum(), (query, key, value), create_graph=True)
    second = torch.autograd.grad(torch.stack([x.square().sum() for x in first]).sum(), (query, key, value))
    assert all(x.isfinite().all() for x in second)


# Softmax of what is large


@causal_or_not
@every_dtype
def test_softmax_learns_from_scores_of_a_million(dtype: torch.dtype, causal: bool):
    # Multiples of powers of two, so that float32 has the scores exactly; every key twice, so that the best is tied.
    query, key = (128.0 * torch.randint(-8, 9, (1, 40, HEADS, WIDTH)) for _ in range(2))
    key[:, 1::2] = key[:, ::2]
    inputs = [x.to(dtype) for x in (query, key, torch.randn(1, 40, HEADS, WIDTH))]
    target = torch.randn(1, 40, HEADS, WIDTH).to(dtype)

    def run(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        out = af.attention(*leaves, "softmax", causal=causal, scale=1.0)  # pyright: ignore
        return out, torch.autograd.grad(out, leaves[2], target.to(dtype))[0]

    for found, expected in zip(run(dtype), run(torch.float64), strict=True):
        assert_near(found, expected)


@causal_or_not
def test_float16_keys_near_the_limit_may_turn(causal: bool):
    query, key, value = tokens(40, dtype=torch.float16)
    inputs, rotary = [query, 5e4 * key.sign(), value], rotary_1d(40, WIDTH)
    out, _ = finite_answer(inputs, "softmax", causal=causal, rotary=rotary, scale=1e-5)
    expected = af.attention(*(x.double() for x in inputs), "softmax", causal=causal, rotary=rotary, scale=1e-5)  # pyright: ignore
    assert_near(out, expected)


def test_float16_gradients_are_infinite_only_where_they_are_beyond_its_range():
    query, key, value, target = torch.randn(4, 2, 100, HEADS, WIDTH).half().unbind()
    inputs, rotary = [1e-3 * query, 300 * key, 3e3 * value], rotary_1d(100, WIDTH)

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        out = af.attention(*leaves, "softmax", rotary=rotary, scale=1.0)  # pyright: ignore
        return torch.autograd.grad(out, leaves, target.to(out.dtype))

    found, expected = (
        run(*leaves)
        for leaves in ([x.to(dtype).requires_grad_() for x in inputs] for dtype in (torch.float16, torch.float64))
    )
    for gradient, truth in zip(found, expected, strict=True):
        assert gradient[truth.abs() < 6e4].isfinite().all()
    assert not all(bool((truth.abs() < 6e4).all()) for truth in expected)

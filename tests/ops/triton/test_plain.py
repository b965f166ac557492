"""Plain calls that were prepared: the same bits as the call that prepared them, and the same refusals.

Without a GPU nothing is built, so nothing would be prepared: an interpreter stands in for what Triton builds, and takes
addresses as the launcher does.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from triton import knobs

import affinear as af
from affinear.ops.triton import backend, launch, library, plain, plans, starting
from affinear.ops.validation import LayoutWarning

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COMPILED = not knobs.runtime.interpret
pytestmark = pytest.mark.skipif(COMPILED and DEVICE == "cpu", reason="needs a GPU, or TRITON_INTERPRET=1")
Tokens = list[Tensor]


class Interpreted:
    """A kernel that is interpreted, called as one that was built."""

    function, packed_metadata = 0, ()

    def __init__(self, kernel: Any, dtypes: list[torch.dtype], constants: dict[str, Any]):
        self.kernel, self.dtypes, self.constants = kernel, dtypes, constants

    def run(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        """Launch, with what is at the addresses as tensors of one number, beyond which the kernel reads by itself."""
        args = rest[5:]
        tensors = [view(place, dtype) for place, dtype in zip(args, self.dtypes, strict=False)]
        numbers = args[len(tensors) : len(args) - len(self.constants)]
        self.kernel[x, y, z](*tensors, *numbers, **self.constants)


def view(place: int, dtype: torch.dtype) -> Tensor:
    """One number at an address."""
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(place), dtype=dtype)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> plain.Memory:
    """A memory of this test's own."""
    mine = plain.Memory(plain.MOST)
    monkeypatch.setattr(plain, "MEMORY", mine)
    if not COMPILED:
        monkeypatch.setattr(plans, "remembered", lambda kernel, tensors, numbers, constants: starting.Remembered(
            Interpreted(kernel, [x.dtype for x in tensors], constants), tuple(constants.values())
        ))  # fmt: skip
        monkeypatch.setattr(plans, "current_stream", lambda device: 0)
    return mine


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[plans.Plan]:
    """The plans that ran."""
    found: list[plans.Plan] = []
    run = plans.run

    def noted(plan: plans.Plan, *rest: Any) -> Any:
        made = run(plan, *rest)
        if made is not None:
            found.append(plan)
        return made

    monkeypatch.setattr(plans, "run", noted)
    return found


def draw(length: int = 9, *, heads: int = 2, dtype: torch.dtype = torch.float32, learning: bool = False) -> Tokens:
    """Queries of so many heads for one key head, keys and values, which share memory."""
    x = torch.randn(2, length, heads + 2, 16, device=DEVICE).to(dtype)
    return [part.detach().requires_grad_(learning) for part in x.split([heads, 1, 1], dim=2)]


def call(tokens: Tokens, **options: Any) -> Tensor:
    return af.attention(*tokens, backend="triton", **options)


def with_gradients(tokens: Tokens, grad: Tensor, **options: Any) -> Tokens:
    leaves = [x.detach().requires_grad_() for x in tokens]
    out = call(leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def same(these: Tokens, those: Tokens) -> bool:
    return all(
        torch.equal(this, that) and this.stride() == that.stride() for this, that in zip(these, those, strict=True)
    )


# In one launch; in two, or four with the way back; and over several segments, which are merged.
CASES = pytest.mark.parametrize(
    ("mechanism", "short", "length"),
    [
        ("mala", 256, 9),
        ("mala", 4, 9),
        *(pytest.param("nala", *sizes, marks=pytest.mark.exhaustive) for sizes in ((256, 9), (4, 9), (4, 520))),
    ],
)


@CASES
def test_a_call_like_one_before_gives_the_same_bits(
    mechanism: str, short: int, length: int, planned: list[plans.Plan], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "SHORT", short)
    tokens, others = draw(length), draw(length)
    first, second = (call(x, mechanism=mechanism) for x in (tokens, others))
    assert len(planned) == 1
    assert torch.equal(first, call(tokens, mechanism=mechanism))
    monkeypatch.setattr(plain, "MEMORY", plain.Memory(plain.MOST))
    assert torch.equal(second, call(others, mechanism=mechanism))
    assert len(planned) == 2


@CASES
def test_gradients_like_those_before_have_the_same_bits(
    mechanism: str, short: int, length: int, planned: list[plans.Plan], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "SHORT", short)
    tokens, grad = draw(length), torch.randn(2, length, 2, 16, device=DEVICE)
    first = with_gradients(tokens, grad, mechanism=mechanism)
    with_gradients(draw(length), grad, mechanism=mechanism)  # prepares the way back
    assert len(planned) == 1
    assert same(with_gradients(tokens, grad, mechanism=mechanism), first)
    assert len(planned) == 3


def test_a_gradient_with_other_strides_is_another_way_back(planned: list[plans.Plan]):
    tokens, grad = draw(), torch.randn(2, 9, 2, 16, device=DEVICE)
    wide = torch.empty(2, 9, 2, 32, device=DEVICE)[..., :16].copy_(grad)
    first = with_gradients(tokens, grad)
    with_gradients(tokens, grad)
    assert len(planned) == 1
    for number in (2, 4):  # forward; forward and back
        assert same(with_gradients(tokens, wide), first)
        assert len(planned) == number


def test_whatever_is_different_is_another_call(memory: plain.Memory, planned: list[plans.Plan]):
    tokens = draw()
    call(tokens)
    different: list[tuple[Tokens, dict[str, Any]]] = [
        (draw(10), {}),
        (draw(dtype=torch.float16), {}),
        ([x.contiguous() for x in tokens], {}),
        (tokens, {"scale": 0.5}),
        (tokens, {"mechanism": "inline"}),
        (draw(learning=True), {}),
    ]
    for others, options in different:
        expected = af.attention(*(x.double() for x in others), backend="torch", **options)
        out = call(others, **options)
        assert (out.double() - expected).norm() < (2e-3 if out.dtype == torch.float16 else 3e-6) * expected.norm()
    assert not planned
    assert len(memory.calls) == 6  # with gradients is the same kind of call
    call(tokens)
    assert len(planned) == 1


def test_one_tensor_three_times_is_told_from_three_tensors(planned: list[plans.Plan]):
    x, y, z = (torch.randn(1, 5, 2, 16, device=DEVICE) for _ in range(3))
    call([x, x, x])
    prepared = call([x, y, z])
    assert len(planned) == 1
    expected = af.attention(x.double(), y.double(), z.double(), backend="torch")
    assert (prepared - expected).norm() < 3e-6 * expected.norm()


def test_a_mechanism_itself_is_known_again_and_none_is_taken_for_it(planned: list[plans.Plan]):
    tokens, mala = draw(), af.mechanisms()["mala"]
    first = call(tokens, mechanism=mala)
    assert torch.equal(call(tokens, mechanism=mala), first)
    assert len(planned) == 1
    other = dataclasses.replace(mala, name="other", query_map=F.relu, key_map=F.relu)
    assert not torch.equal(call(tokens, mechanism=other), first)
    assert len(planned) == 1


def test_heads_before_tokens_are_prepared_too(planned: list[plans.Plan]):
    tokens, grad = draw(), torch.randn(2, 2, 9, 16, device=DEVICE)
    turned = [x.transpose(1, 2) for x in tokens]
    first = with_gradients(turned, grad, layout="bhnd")
    assert same(with_gradients(turned, grad, layout="bhnd"), first)
    assert len(planned) == 1
    assert same(with_gradients(turned, grad, layout="bhnd"), first)
    assert len(planned) == 3
    assert torch.equal(call([x.requires_grad_() for x in tokens], layout="bnhd").transpose(1, 2), first[0])
    assert len(planned) == 4
    with pytest.raises(ValueError, match="key: expected the head width"):
        call([turned[0], turned[1][..., :8], turned[2]], layout="bhnd")
    with pytest.raises(ValueError, match="query: expected 4 dimensions"):
        call([turned[0][0], *turned[1:]], layout="bhnd")


def test_what_is_refused_is_refused_after_a_call_like_it():
    tokens = draw()
    call(tokens)
    for options, message in (
        ({"scale": True}, r"scale: expected a number or None, got bool"),
        ({"scale": torch.tensor(1.0)}, r"scale: expected a number or None, got Tensor"),
        ({"causal": 0}, r"causal: expected True or False, got int"),
        ({"layout": ["bnhd"]}, r"layout: expected 'bnhd'"),
        ({"mechanism": ["mala"]}, r"mechanism: expected one of"),
        ({"mechanism": "softmax"}, r"backend: expected a linear mechanism"),
    ):
        with pytest.raises(ValueError, match=message):
            call(tokens, **options)
    with pytest.raises(ValueError, match="key: expected the dtype of query"):
        call([tokens[0], *(x.half() for x in tokens[1:])])
    with pytest.raises(ValueError, match="key: expected a dense tensor, got a sparse one"):
        call([tokens[0], tokens[1].to_sparse(), tokens[2]])


def test_a_layout_that_looks_wrong_is_warned_of_every_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backend, "attention", lambda query, *_, **__: (query, None))  # pyright: ignore
    x = torch.randn(1, 2, 64, 16, device=DEVICE)
    for _ in range(2):
        with pytest.warns(LayoutWarning, match="2 tokens of 64 heads"):
            call([x, x, x])


def test_a_second_derivative_and_many_gradients_are_refused_as_before(planned: list[plans.Plan]):
    for _ in range(2):
        leaves = draw(learning=True)
        out = call(leaves)
        many = torch.ones(2, *out.shape, device=DEVICE)
        with pytest.raises(RuntimeError, match=r"expected gradients one by one of 'triton'"):
            torch.autograd.grad(out, leaves, many, is_grads_batched=True, retain_graph=True)
        grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        with pytest.raises(RuntimeError, match=r"expected first derivatives of 'triton'"):
            grads[0].sum().backward()
    assert len(planned) == 1


def test_transforms_modes_and_subclasses_are_not_served_from_memory(planned: list[plans.Plan]):
    tokens = draw()
    expected = call(tokens)
    with pytest.raises(ValueError, match="expected a call outside torch"):
        torch.func.vmap(lambda q, k, v: call([q[None], k[None], v[None]]))(*tokens)
    with FakeTensorMode() as mode:
        fake = call([mode.from_tensor(x) for x in tokens])
    assert fake.shape == expected.shape
    assert type(fake) is not Tensor
    call([torch.nn.Parameter(x) for x in tokens])
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(ValueError, match="got one inside; differentiate backward"),
    ):
        call(tokens)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens), expected)
    assert not planned
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(call(tokens), expected)
    assert len(planned) == 1


def test_addresses_that_are_not_aligned_take_the_long_way(planned: list[plans.Plan]):
    room = torch.randn(2 * 9 * 16 * 3 + 1, device=DEVICE)
    aligned, not_aligned = ([x[None] for x in room[i : i + 864].view(3, 18, 1, 16).unbind()] for i in (0, 1))
    for tokens in (not_aligned, aligned, not_aligned, aligned):
        call(tokens)
    assert len(planned) == 1
    expected = af.attention(*(x.double() for x in not_aligned), backend="torch")
    assert (call(not_aligned) - expected).norm() < 3e-6 * expected.norm()


def test_tokens_farther_apart_than_kernels_count_are_copied_every_time(
    planned: list[plans.Plan], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(library, "FARTHEST", 1)
    tokens, grad = draw(), torch.randn(2, 9, 2, 16, device=DEVICE)
    first = with_gradients(tokens, grad)
    assert same(with_gradients(tokens, grad), first)
    assert planned == []


def test_a_gradient_farther_apart_than_kernels_count_is_copied_every_time(
    planned: list[plans.Plan], monkeypatch: pytest.MonkeyPatch
):
    tokens, grad = draw(), torch.randn(2, 9, 2, 16, device=DEVICE)
    far = torch.empty(2, 9, 2, 999, device=DEVICE)[..., :16].copy_(grad)
    monkeypatch.setattr(library, "FARTHEST", 9 * 999)
    first = with_gradients(tokens, far)
    for number in (1, 2):  # forward alone
        assert same(with_gradients(tokens, far), first)
        assert len(planned) == number


def test_a_checkpoint_may_meet_a_first_call_and_then_a_prepared_one(planned: list[plans.Plan]):
    leaves = draw(learning=True)
    out = checkpoint(lambda *tokens: call(list(tokens)), *leaves, use_reentrant=False)
    assert isinstance(out, Tensor)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert len(planned) == 1
    expected = torch.autograd.grad(call(leaves).sum(), leaves)
    assert same(list(grads), list(expected))


def test_somebody_who_watches_launches_sees_all_of_them(
    planned: list[plans.Plan], monkeypatch: pytest.MonkeyPatch
):  # fmt: skip
    tokens = draw()
    expected = call(tokens)
    hook: Callable[..., None] = lambda *_: None  # noqa: E731
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [hook])
    assert torch.equal(call(tokens), expected)
    assert not planned


def test_memory_has_an_end(memory: plain.Memory):
    memory.most = 2
    for length in (3, 4, 5):
        call(draw(length))
    assert len(memory.calls) == 1

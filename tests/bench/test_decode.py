"""One token at a time, by any callable that is plugged in, checked like everything else."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from affinear.bench import decode, ops
from affinear.bench.cases import Case, Shape
from affinear.bench.decode import Decoder, Decoding, functional, state_bytes
from affinear.bench.measure import Clock
from affinear.ops import State


@pytest.fixture
def decoding(clock: Clock) -> Decoding:
    return Decoding(Case(Shape(2, 3, 1, 8), torch.float32, causal=True), clock)


def in_place(state: State, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, State]:
    out, after = functional("mala", "torch")(state, query, key, value)
    for name in ("count", "key_mean", "value_mean", "covariance"):
        getattr(state, name).copy_(getattr(after, name))
    return out, state


def forgetful(state: State, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, State]:
    out, _ = functional("mala", "torch")(state, query, key, value)
    return out, state


def test_a_step_moves_the_state_twice(decoding: Decoding):
    # Per head: 8 * 8 + 8 + 8 float32 and one int64.
    assert state_bytes(decoding.states[0]) == 2 * 3 * (80 * 4 + 8)
    row = decoding.measure(Decoder("affinear torch", functional("mala", "torch")))
    assert row.status == "ok"
    assert row.call is not None
    assert row.traffic == 2 * 2 * 3 * 328


def test_a_step_in_place_can_be_plugged_in(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(decode, "decoders", lambda mechanism, device: [Decoder("in place", in_place)])
    plan = ops.prepare(hurry=True, seconds=0.002)
    (row,) = decode.rows(plan, lambda said: None)
    assert (row.contender, row.status) == ("in place", "ok")
    assert row.shape == plan.decode


def test_in_place_steps_leave_the_states_of_others_alone(decoding: Decoding):
    before = decoding.states[0].covariance.clone()
    assert decoding.measure(Decoder("in place", in_place)).status == "ok"
    assert torch.equal(decoding.states[0].covariance, before)


def test_a_step_that_forgets_the_token_gets_no_time(decoding: Decoding):
    row = decoding.measure(Decoder("forgetful", forgetful))
    assert row.status == "wrong"
    assert row.call is None


def test_a_mechanism_without_a_state_fails_its_row_only():
    plan = replace(ops.prepare(hurry=True), mechanism="softmax")
    (row,) = decode.rows(plan, lambda said: None)
    assert (row.status, row.reason) == ("failed", "cannot serve")

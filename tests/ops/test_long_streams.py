"""Many small merges: a long text, one token at a time, is as good as one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import affinear as af
from affinear.ops import rotary_1d
from affinear.ops.state import merge

Randn = Callable[..., Tensor]
STEPS = 1500


def largest(x: Tensor, truth: Tensor) -> float:
    return (x.double() - truth).abs().max().item()


@pytest.mark.parametrize("rotary", [False, True])
def test_decoding_values_with_a_large_mean_is_as_good_as_one_call(rotary: bool, randn: Randn):
    query, key, value = (randn(1, STEPS, 1, 4, dtype=torch.float32) for _ in "qkv")
    value = value + 1000
    tables = rotary_1d(STEPS, 4) if rotary else None
    wide = None if tables is None else (tables[0].double(), tables[1].double())
    truth, whole = af.attention(
        query.double(), key.double(), value.double(), causal=True, rotary=wide, return_state=True
    )
    once, _ = af.attention(query, key, value, causal=True, rotary=tables, return_state=True)
    state, answers = None, list[Tensor]()
    for i in range(STEPS):
        now = slice(i, i + 1)
        out, state = af.attention(
            query[:, now], key[:, now], value[:, now], causal=True, initial_state=state, return_state=True,
            rotary=None if tables is None else (tables[0][now], tables[1][now]),
        )  # fmt: skip
        answers.append(out)
    assert state is not None
    assert largest(torch.cat(answers, dim=1), truth) <= 1.5 * largest(once, truth)
    assert largest(state.value_mean, whole.value_mean) <= 1000 * torch.finfo(torch.float32).eps
    assert largest(state.covariance, whole.covariance) <= 1e-5 * whole.covariance.abs().max().item()


def test_merging_states_of_single_tokens_does_not_drift(randn: Randn):
    key, value = (randn(1, STEPS, 1, 4, dtype=torch.float32) for _ in "kv")
    value = value + 1000
    truth = af.summarize(key.double(), value.double())
    state = sum(af.summarize(key[:, i : i + 1], value[:, i : i + 1]) for i in range(STEPS))
    assert isinstance(state, af.State)
    assert largest(state.value_mean, truth.value_mean) <= 1000 * torch.finfo(torch.float32).eps
    assert largest(state.covariance, truth.covariance) <= 1e-5 * truth.covariance.abs().max().item()


@pytest.mark.exhaustive
def test_a_hundred_thousand_tokens_one_by_one_are_as_good_as_one_call(randn: Randn):
    tokens = 100_000  # a million, which takes ten times as long, is in docs/numbers.md
    query, key, value = (randn(1, size, 1, 8, dtype=torch.float32) for size in (1000, tokens, tokens))
    value = value + 1000
    features = af.mechanisms()["mala"].key_map(key).transpose(0, 1).unbind()
    count, still = torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, 1, 8, 8)
    state = af.summarize(key[:, :1], value[:, :1])
    torch.testing.assert_close(features[0], state.key_mean)
    for feature, one in zip(features[1:], value.transpose(0, 1).unbind()[1:], strict=True):
        state = merge(state, af.State(count, feature, one, still, state.mechanism))
    truth, once = af.summarize(key.double(), value.double()), af.summarize(key, value)
    exact = af.attend(query.double(), truth)
    rounding = 1000 * torch.finfo(torch.float32).eps
    assert largest(af.attend(query, state), exact) <= max(largest(af.attend(query, once), exact), rounding)
    assert largest(state.covariance, truth.covariance) <= 1e-6 * truth.covariance.abs().max().item()


def test_what_is_rounded_off_is_saved_moved_and_mapped(randn: Randn, tmp_path: object):
    key, value = (randn(2, 9, 2, 4, dtype=torch.float32) for _ in "kv")
    state = af.summarize(key[:, :4], value[:, :4]) + af.summarize(key[:, 4:], value[:, 4:])
    assert state.rest is not None
    path = f"{tmp_path}/state.pt"
    torch.save(state, path)
    loaded = torch.load(path, weights_only=True)
    assert all(y is not None and torch.equal(x, y) for x, y in zip(loaded.rest, state.rest, strict=True))
    wide = state.to(torch.float64)
    assert wide.rest is not None
    assert all(x is not None and x.dtype == torch.float64 for x in wide.rest)
    partly = replace(state, rest=(state.rest[0], None, None))
    torch.save(partly, path2 := f"{tmp_path}/partly.pt")
    kept = torch.load(path2, weights_only=True).rest
    assert [x is None for x in kept] == [False, True, True]
    assert torch.equal((partly + partly).count, 2 * state.count)


def test_a_state_prints_its_shapes():
    state = af.summarize(torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 4))
    assert repr(state) == (
        "State('mala', count=(2, 3), key_mean=(2, 3, 8), value_mean=(2, 3, 4), covariance=(2, 3, 8, 4), "
        "dtype=torch.float32, device='cpu')"
    )

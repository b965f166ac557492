"""The bits of an answer depend on the tokens that it is about, and on nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


@CAUSAL
@DTYPES
def test_the_same_call_gives_the_same_bits(dtype: torch.dtype, causal: bool, make: Any, same_bits: Any):
    problem = make(dtype=dtype, causal=causal, groups=2)
    first = problem.answers()
    for _ in range(3):
        same_bits(problem.answers(), first)


@CAUSAL
@DTYPES
@pytest.mark.parametrize("batch", [3, 160])
def test_a_sample_does_not_depend_on_its_batch(batch: int, dtype: torch.dtype, causal: bool, make: Any, same_bits: Any):
    problem = make(batch=batch, tokens=1100, dtype=dtype, causal=causal)
    sample = problem.query.shape[0] - 1
    alone = problem.map(lambda x: x[sample:]).answers()
    same_bits([x[sample:] for x in problem.answers()], alone)


@pytest.mark.parametrize("width", [64, 96, 128])
def test_nor_do_two_features_of_a_channel(width: int, make: Any, same_bits: Any):
    problem = make("nala_released", batch=40, tokens=1100, heads=2, width=width, rotary=1)
    first = problem.answers()
    same_bits(problem.answers(), first)
    alone = problem.map(lambda x: x[-1:]).answers()
    same_bits([x[-1:] for x in first], alone)


@CAUSAL
def test_a_packed_sequence_is_as_good_as_alone(causal: bool, make: Any, same_bits: Any):
    problem = make(batch=1, tokens=2500, causal=causal)
    length = problem.query.shape[1]
    first, last = length // 5, length - length // 7
    bounds = torch.tensor([0, first, first, last, length], device=problem.query.device)
    packed = replace(problem, bounds=bounds).answers()
    alone = problem.map(lambda x: x[:, first:last]).answers()
    same_bits([x[:, first:last] for x in packed], alone)


@CAUSAL
def test_the_order_of_heads_and_tokens_in_memory_does_not_matter(causal: bool, make: Any, same_bits: Any):
    problem = make(causal=causal, tokens=1100)
    transposed = problem.map(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2))
    same_bits(transposed.answers(), problem.answers())


@CAUSAL
def test_channels_may_lie_apart(causal: bool, make: Any, judge: Any):
    # Loads of another width are summed in another order: as good, but not the same bits.
    problem = make(causal=causal, tokens=1100)
    judge(problem.map(lambda x: torch.stack((x, x.new_full((), float("nan")).expand_as(x)), -1)[..., 0]))

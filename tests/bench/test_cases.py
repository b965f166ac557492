"""Bytes are counted as on paper: 8 per element forward and 22 with the backward pass, in two-byte types."""

import pytest
import torch

from affinear.bench.cases import FORWARD, TRAINING, Case, Shape, draw


@pytest.mark.parametrize(
    ("dtype", "direction", "expected"),
    [
        (torch.bfloat16, FORWARD, 8 * 67_108_864),
        (torch.bfloat16, TRAINING, 22 * 67_108_864),
        (torch.float16, TRAINING, 22 * 67_108_864),
        (torch.float32, FORWARD, 16 * 67_108_864),
        (torch.float32, TRAINING, 44 * 67_108_864),
    ],
)
def test_traffic_of_a_shape_worked_out_by_hand(dtype: torch.dtype, direction: str, expected: int):
    assert Case(Shape(64, 1, 16384, 64), dtype).traffic(direction) == expected


@pytest.mark.parametrize("text", ["1,2,3", "1,2,3,4,5", "a,1,1,1", "1,0,1,1", "1,-2,3,4", "", "1x2x3x4"])
def test_what_is_no_shape_is_refused_with_an_example(text: str):
    with pytest.raises(ValueError, match=r"shape: expected four positive numbers .*; write it as 2,16,1024,64"):
        Shape.parse(text)


def test_a_shape_reads_as_it_is_written():
    assert Shape.parse("128, 3,196,64") == Shape(128, 3, 196, 64)


def test_inputs_are_the_same_for_the_same_seed_and_tokens_come_before_heads():
    case = Case(Shape(2, 3, 5, 4), torch.bfloat16)
    first, again, other = (draw(case, torch.device("cpu"), seed) for seed in (1, 1, 2))
    assert first.query.shape == (2, 5, 3, 4)
    assert first.grad.dtype == torch.bfloat16
    assert torch.equal(first.key, again.key)
    assert not torch.equal(first.key, other.key)
    assert not torch.equal(first.key, first.value)


def test_rotary_tables_are_made_only_for_a_case_with_positions():
    shape = Shape(1, 1, 10, 8)
    assert Case(shape, torch.float32).tables(torch.device("cpu")) is None
    tables = Case(shape, torch.float32, rotary=True).tables(torch.device("cpu"))
    assert tables is not None
    assert tables[0].shape == (10, 8)

"""Where a linearized network begins to be faster: what is said of timings, and that they are taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import affinear
from affinear.linearizing.crossover import Crossover, Timing, crossovers

from .conftest import Hugging, vision


def crossover(*times: tuple[float, float]) -> Crossover:
    return Crossover("reading", "CPU", tuple(Timing(128 * 2**i, *both) for i, both in enumerate(times)))


def test_it_is_faster_only_from_where_it_stays_faster():
    assert crossover((1, 2), (3, 2), (3, 4), (9, 4), (20, 5)).tokens == 1024
    assert "faster from 1,024 tokens on, 4.0 times at 2,048" in str(crossover((1, 2), (3, 2), (3, 4), (9, 4), (20, 5)))
    assert crossover((2, 1), (4, 2)).tokens == 128
    assert "at 128 tokens already" in str(crossover((2, 1), (4, 2)))


def test_where_it_is_not_it_says_so():
    slow = crossover((1, 2), (3, 2), (3, 4))
    assert slow.tokens is None
    assert "not faster up to 512 tokens (0.75 times the speed there)" in str(slow)


def test_an_encoder_is_timed_reading_and_a_decoder_with_its_next_token_too():
    teacher, _ = vision("vit_tiny_patch16_224")
    [reading] = crossovers(affinear.linearize(teacher, "mala", convolution=3)[0], longest=256)
    assert [timing.tokens for timing in reading.timings] == [128, 256]
    assert all(timing.softmax > 0 and timing.linear > 0 for timing in reading.timings)
    student, _ = affinear.linearize(Hugging("llama").model, "nala", window=4, sinks=1)
    both = crossovers(student, shortest=16, longest=32)
    assert [one.what for one in both] == ["reading", "the next token"]
    assert "CPU, float32" in str(both[1])


def test_a_network_without_a_linear_layer_is_refused():
    with pytest.raises(ValueError, match="linearized network"):
        crossovers(nn.Linear(2, 2), device=torch.device("cpu"))

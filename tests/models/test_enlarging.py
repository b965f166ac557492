"""Strip by strip: the numbers of one piece."""

from __future__ import annotations

import random

import pytest
import torch

from affinear.models.enlarging import enlarge
from affinear.models.upscaler import Upscaler

ARMS = ("windows", "softmax", "linear", "inline", "nala", "mala", "none")


@pytest.mark.parametrize("mechanism", ARMS)
def test_strips_give_what_one_piece_gives(mechanism: str):
    for size in ((random.randint(1, 40), random.randint(1, 20)), (16, 8), (1, 1)):
        network = Upscaler(
            random.choice((2, 3, 4)),
            8,
            (2, 1),
            2,
            mechanism=mechanism,
            alternate=mechanism != "windows" and random.random() < 0.5,
            window=4,
            position_kernel=random.choice((3, 5)),
            gate=random.choice(("none", "linear", "silu")),
        )
        network = network.double().eval()
        images = torch.rand(2, 3, *size, dtype=torch.float64)
        shares = list[float]()
        for rows in (1, random.randint(2, 20), 100):
            strips = list(enlarge(network, images, rows=rows, told=shares.append))
            assert torch.allclose(torch.cat(strips, dim=2), network(images), atol=1e-10), (size, rows)
            assert shares[-1] == pytest.approx(1)


def test_a_strip_is_not_larger_than_asked():
    network = Upscaler(2, 8, (2,), 2, mechanism="mala", position_kernel=3).eval()
    heights = [strip.shape[2] for strip in enlarge(network, torch.rand(1, 3, 50, 6), rows=16)]
    assert heights == [32, 32, 32, 4]


def test_under_autocast_strips_are_as_exact_as_one_piece():
    network = Upscaler(2, 16, (2, 2), 2, mechanism="mala", alternate=True, position_kernel=3, window=4).eval()
    images = torch.rand(1, 3, 37, 20)
    with torch.no_grad():
        exact = network(images)
        with torch.autocast("cpu", torch.bfloat16):
            whole, strips = network(images), torch.cat(list(enlarge(network, images, rows=8)), dim=2)
    assert strips.dtype == whole.dtype == torch.float32
    assert (strips - exact).abs().max() < 2 * (whole - exact).abs().max() + 1e-4


def test_windows_alone_need_no_convolution():
    network = Upscaler(2, 8, (3,), 2, window=4).double().eval()
    images = torch.rand(1, 3, 21, 9, dtype=torch.float64)
    assert torch.allclose(torch.cat(list(enlarge(network, images, rows=8)), dim=2), network(images), atol=1e-10)


def test_what_trains_or_has_no_rows_is_refused():
    network = Upscaler(2, 8, (1,), 2)
    with pytest.raises(ValueError, match="evaluation mode"):
        next(enlarge(network, torch.rand(1, 3, 8, 8)))
    with pytest.raises(ValueError, match="rows: expected 1 or more, got 0"):
        next(enlarge(network.eval(), torch.rand(1, 3, 8, 8), rows=0))

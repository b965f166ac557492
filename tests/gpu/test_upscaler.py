"""The upscaler on a GPU: every arm as good as in float64, strips as good as one piece, and in less memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from affinear.models.enlarging import enlarge
from affinear.models.upscaler import Upscaler

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
ARMS = ("windows", "softmax", "linear", "inline", "nala", "mala", "none")
Size = Callable[[int, int], int]


def made(mechanism: str, depths: tuple[int, ...] = (2, 2)) -> Upscaler:
    return Upscaler(2, 64, depths, 2, mechanism=mechanism, position_kernel=5).to(DEVICE).eval()


def in_strips(network: Upscaler, images: Tensor, keep: str | None = None) -> Tensor:
    place = None if keep is None else torch.device(keep)
    return torch.cat(list(enlarge(network, images, rows=32, keep=place)), dim=2)


@torch.no_grad()
@pytest.mark.parametrize("mechanism", ARMS)
def test_strips_are_as_exact_as_one_piece_wherever_maps_are_kept(mechanism: str, size: Size):
    network = made(mechanism)
    images = torch.rand(1, 3, size(200, 20), size(264, 12), device=DEVICE)
    found = {"whole": network(images), "strips": in_strips(network, images), "kept": in_strips(network, images, "cpu")}
    truth = network.double()(images.double())
    errors = {name: (out.double() - truth).abs().max().item() for name, out in found.items()}
    assert errors["whole"] < 1e-2  # TF32 in convolutions
    assert max(errors["strips"], errors["kept"]) < 2 * errors["whole"] + 1e-5


@pytest.mark.alone
@pytest.mark.skipif(not CUDA, reason="only a GPU tells how much memory was taken")
@torch.no_grad()
def test_strips_take_less_memory_than_one_piece():
    network = made("mala")
    images = torch.rand(1, 3, 1024, 1024, device=DEVICE)
    peaks: list[int] = []
    for run in (lambda: network(images), lambda: [strip.shape for strip in enlarge(network, images, rows=32)]):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < peaks[0] / 2

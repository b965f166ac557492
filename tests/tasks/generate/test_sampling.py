"""From noise to images: our samplers give what diffusers' give, and find what is known beforehand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from affinear.tasks.generate import sampling
from affinear.tasks.generate.process import Diffusion, Flow, Process
from affinear.tasks.generate.sampling import Way, check_way, sample
from affinear.tasks.generate.settings import Generation

PAIRS = [
    (Diffusion(), "ddpm", "DDPMScheduler"),
    (Diffusion(), "ddim", "DDIMScheduler"),
    (Flow(), "euler", "FlowMatchEulerDiscreteScheduler"),
]


class Net(nn.Module):
    """Something that depends on all it is told, in float64."""

    num_classes = 3

    def __init__(self, learns_variance: bool) -> None:
        super().__init__()
        self.mix = nn.Conv2d(2, 4 if learns_variance else 2, 3, padding=1).double().requires_grad_(False)
        self.table = torch.randn(4, 2, dtype=torch.float64)

    def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        told = self.table[labels] + torch.sin(times.double() / 300)[:, None]
        return torch.tanh(self.mix(x + told[:, :, None, None]))


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers of diffusers with tables in float64, as ours are; they keep them in float32."""
    made = sampling.scheduler_of

    def widened(process: Process, way: Way) -> Any:
        found = made(process, way)
        if isinstance(process, Diffusion):
            found.alphas_cumprod = process.kept
            found.one = found.final_alpha_cumprod = torch.ones((), dtype=torch.float64)
        return found

    monkeypatch.setattr(sampling, "scheduler_of", widened)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(("process", "own", "theirs"), PAIRS)
@pytest.mark.usefixtures("exact")
def test_ours_and_diffusers_make_the_same(process: Process, own: str, theirs: str, clip: bool, guidance: float):
    network, noise, labels = Net(process.learns_variance), torch.randn(2, 2, 4, 4).double(), torch.tensor([2, 0])
    made = [
        sample(network, process, Way(name, 20, guidance, clip), noise, labels, torch.Generator().manual_seed(1))
        for name in (own, theirs)
    ]
    # The flow's scheduler keeps its times in float32; the others agree to the last bits.
    close = 1e-5 if own == "euler" else 1e-11
    torch.testing.assert_close(made[0], made[1], rtol=close, atol=close)


def test_guidance_of_one_asks_once_and_of_nothing_is_any_class():
    network, noise = Net(False), torch.randn(2, 2, 4, 4).double()
    asked: list[int] = []

    class Counted(nn.Module):
        num_classes = 3

        def forward(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
            asked.append(len(x))
            return network(x, times, labels)

    labels = torch.tensor([0, 1])
    sample(Counted(), Flow(), Way("euler", 2), noise, labels)
    assert asked == [2, 2]
    plain = sample(network, Flow(), Way("euler", 5), noise, torch.tensor([3, 3]))
    torch.testing.assert_close(sample(network, Flow(), Way("euler", 5, 0.0), noise, labels), plain)


def test_heun_is_of_second_order_and_euler_of_first():
    """Of x' = x the flow from 1 to 0 ends at x / e."""

    def growth(x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        return x

    noise = torch.randn(1, 1, 2, 2).double()
    for name, order in (("euler", 2), ("heun", 4)):
        errors = [
            (sample(growth, Flow(), Way(name, steps), noise, torch.zeros(1, dtype=torch.int64)) - noise / math.e)
            .abs()
            .max()
            for steps in (64, 128)
        ]
        assert float(errors[0] / errors[1]) == pytest.approx(order, rel=0.1)


@pytest.mark.parametrize(("process", "name"), [(process, own) for process, own, _ in PAIRS])
def test_whoever_knows_the_only_image_makes_it(process: Process, name: str):
    """Where data is one image, the best answers are known, and every sampler must end there."""
    image = torch.rand(1, 1, 4, 4).double() * 2 - 1

    def knowing(x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        if isinstance(process, Diffusion):
            of_image, of_noise = process.amounts(times, x)
            noise = (x - of_image * image) / of_noise
            return torch.cat((noise, torch.zeros_like(noise)), dim=1)
        return (x - image) / (times / 1000).view(-1, 1, 1, 1)

    found = sample(knowing, process, Way(name, 25), torch.randn(3, 1, 4, 4).double(), torch.zeros(3).long())
    torch.testing.assert_close(found, image.expand(3, -1, -1, -1), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("process", "name", "said"),
    [
        ("flow", "ddim", "sampler: expected euler or heun for flow"),
        ("ddpm", "euler", "sampler: expected ddpm or ddim for ddpm"),
        ("flow", "os.system", "sampler: expected euler or heun for flow"),
    ],
)
def test_a_sampler_of_another_kind_is_refused(process: str, name: str, said: str):
    with pytest.raises(ValueError, match=said):
        Generation(process=process, sampler=name)


def test_schedulers_that_do_not_fit_or_are_not_there_are_refused():
    noise, labels = torch.zeros(1, 1, 2, 2), torch.zeros(1).long()
    for process, name, said in (
        (Flow(), "DDIMScheduler", "expected one for flows"),
        (Diffusion(), "FlowMatchEulerDiscreteScheduler", "which is for flows"),
        (Flow(), "NoSuchScheduler", "diffusers has no scheduler called 'NoSuchScheduler'"),
    ):
        with pytest.raises(ValueError, match=said):
            sample(lambda x, times, labels: x, process, Way(name, 2), noise, labels)
    with pytest.raises(ValueError, match="sample_steps: expected at most 1000, got 2000"):
        check_way("ddpm", Way("ddpm", 2000))


def test_other_schedulers_of_diffusers_serve_both():
    noise, labels = torch.randn(2, 2, 4, 4).double(), torch.tensor([2, 0])
    for process in (Flow(), Diffusion()):
        way = Way("UniPCMultistepScheduler", 8, 2.0)
        assert sample(Net(process.learns_variance), process, way, noise, labels).isfinite().all()

"""From noise to images: small samplers of our own, and any scheduler of diffusers.

Ours are DDPM's and DDIM's steps for diffusion, and Euler's and Heun's for flows. They need torch alone; the first three
give what diffusers' `DDPMScheduler`, `DDIMScheduler` and `FlowMatchEulerDiscreteScheduler` give.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .process import FIRST_BETA, LAST_BETA, STEPS, Diffusion, Process

OWN = {"ddpm": ("ddpm", "ddim"), "flow": ("euler", "heun")}
STRAIGHT = "FlowMatchEulerDiscreteScheduler"
LEARNED = "DDPMScheduler"  # the one of diffusers' that takes a variance
SCHEDULER = re.compile(r"[A-Z]\w{0,60}Scheduler")

Network = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    """How noise becomes an image.

    Attributes:
        sampler: "ddpm" or "ddim" for diffusion, "euler" or "heun" for flows; or a scheduler of diffusers by its name.
        steps: How often the network is asked; by "heun" twice, but for the last step.
        guidance: How far the class is exaggerated: 1 for not at all.
        clip: Whether images on the way stay between -1 and 1, as pixels do; diffusion alone knows them.
    """

    sampler: str
    steps: int
    guidance: float = 1.0
    clip: bool = True


def check_way(process: str, way: Way) -> None:
    """Raise ValueError if a sampler does not go with a process, or has more steps than there are."""
    if way.sampler not in OWN[process] and not SCHEDULER.fullmatch(way.sampler):
        raise ValueError(
            f"sampler: expected {' or '.join(OWN[process])} for {process}, or the name of a scheduler of diffusers, "
            f"got {way.sampler!r}"
        )
    if way.steps > STEPS:
        raise ValueError(f"sample_steps: expected at most {STEPS}, got {way.steps}")


def sample(
    network: Network,
    process: Process,
    way: Way,
    noise: Tensor,
    labels: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Images (B, C, H, W), float32, that a network makes of noise.

    Args:
        network: Called with images (B, C, H, W), times (B,) and labels (B,); `num_classes` of labels stands for any.
        process: What it was trained for.
        way: How.
        noise: (B, C, H, W), float32.
        labels: (B,), int64.
        generator: For "ddpm" and other samplers that draw; torch's own if None.
    """
    ask = Guided(network, way.guidance, process.learns_variance, labels)
    if SCHEDULER.fullmatch(way.sampler):
        return _by_diffusers(ask, process, way, noise, generator)
    if isinstance(process, Diffusion):
        return _back(ask, process, way, noise, generator)
    return _along(ask, way, noise)


class Guided:
    """A network with its labels, whose answer may be moved away from what it says of any class.

    Args:
        network: As `sample` takes it; its `num_classes` tells which label stands for any.
        guidance: 1 for the answer as it is.
        variance: Whether the second half of the answer's channels is a variance, which is left as it is.
        labels: (B,), int64.
    """

    def __init__(self, network: Network, guidance: float, variance: bool, labels: Tensor) -> None:
        self.network, self.guidance, self.variance, self.labels = network, guidance, variance, labels
        if guidance != 1:
            count: int = getattr(network, "num_classes")  # noqa: B009  # a plain callable has none, and cannot be guided
            self.both = torch.cat((labels, torch.full_like(labels, count)))

    def __call__(self, x: Tensor, time: float | Tensor) -> Tensor:
        """What the network says, (B, C or 2 C, H, W), in the dtype of `x`, at one time for all."""
        if self.guidance == 1:
            return self.network(x, _times(time, x), self.labels).to(x.dtype)
        twice = torch.cat((x, x))
        told, of_any = self.network(twice, _times(time, twice), self.both).to(x.dtype).chunk(2)
        if not self.variance:
            return torch.lerp(of_any, told, self.guidance)
        guess, share = told.chunk(2, dim=1)
        return torch.cat((torch.lerp(of_any.chunk(2, dim=1)[0], guess, self.guidance), share), dim=1)


def moments(sampler: str, steps: int) -> Iterator[tuple[int, int]]:
    """Pairs of times of diffusion, from noise to image, evenly apart; the last leads to -1, the image.

    DDPM's go from the last step of training to the first, as published; DDIM's are as far apart from the image as from
    each other (arXiv 2305.08891).

    Examples:
        >>> list(moments("ddpm", 4)), list(moments("ddim", 4))[-1]
        ([(999, 666), (666, 333), (333, 0), (0, -1)], (249, -1))
    """
    if sampler == "ddpm" and steps > 1:
        times = [round((STEPS - 1) * (steps - 1 - number) / (steps - 1)) for number in range(steps)]
    else:
        times = [round(STEPS - STEPS * number / steps) - 1 for number in range(steps)]
    return pairwise([*times, -1])


def _back(ask: Guided, process: Diffusion, way: Way, noise: Tensor, generator: torch.Generator | None) -> Tensor:
    """DDPM's or DDIM's steps."""
    x = noise
    for now, then in moments(way.sampler, way.steps):
        guess, share = ask(x, now).chunk(2, dim=1)
        times, before = (torch.full((len(x),), at, device=x.device) for at in (now, then))
        if way.sampler == "ddpm":
            mean, log_variance = process.back(x, guess, share, times, before, way.clip)
            x = mean if then < 0 else mean + (0.5 * log_variance).exp() * _drawn(x, generator)
            continue
        of_image, of_noise = process.amounts(before, x)
        x = of_image * process.clean(x, guess, times, way.clip) + of_noise * guess
    return x


def _along(ask: Guided, way: Way, noise: Tensor) -> Tensor:
    """Euler's or Heun's steps along a flow, from time 1 to 0."""
    x = noise
    times = torch.linspace(1, 0, way.steps + 1, dtype=torch.float64).tolist()
    for now, then in pairwise(times):
        speed = ask(x, STEPS * now)
        ahead = x + (then - now) * speed
        if way.sampler == "heun" and then > 0:
            ahead = x + (then - now) / 2 * (speed + ask(ahead, STEPS * then))
        x = ahead
    return x


def scheduler_of(process: Process, way: Way) -> Any:
    """The scheduler of diffusers that a way names, for what the network was trained for.

    Raises:
        ValueError: If diffusers is not there, has no such scheduler, or it cannot do the process.
    """
    try:
        import diffusers
    except ImportError:
        raise ValueError(
            f"sampler: {way.sampler} is one of diffusers': pip install 'affinear[generate]', or take "
            f"{' or '.join(OWN['ddpm' if process.learns_variance else 'flow'])}"
        ) from None
    kind: Any = getattr(diffusers, way.sampler, None)
    if kind is None or not hasattr(kind, "set_timesteps"):
        raise ValueError(f"sampler: diffusers has no scheduler called {way.sampler!r}")
    if process.learns_variance:
        if way.sampler.startswith("FlowMatch"):
            raise ValueError(f"sampler: expected one for diffusion, got {way.sampler}, which is for flows")
        own = {"clip_sample": way.clip}
        if way.sampler == LEARNED:
            own |= {"variance_type": "learned_range", "timestep_spacing": "linspace"}
        return _made(kind, {**DIFFUSION, **own})
    made = _made(kind, FLOW)
    if not way.sampler.startswith("FlowMatch") and not made.config.get("use_flow_sigmas"):
        raise ValueError(f"sampler: expected one for flows, such as FlowMatchEulerDiscreteScheduler, got {way.sampler}")
    return made


def _made(kind: Any, config: dict[str, Any]) -> Any:
    """A scheduler with as much of a configuration as it knows."""
    known = inspect.signature(kind.__init__).parameters
    return kind(**{name: value for name, value in config.items() if name in known})


DIFFUSION: dict[str, Any] = {
    "num_train_timesteps": STEPS,
    "beta_start": FIRST_BETA,
    "beta_end": LAST_BETA,
    "beta_schedule": "linear",
    "timestep_spacing": "trailing",
    "prediction_type": "epsilon",
}
FLOW: dict[str, Any] = {
    "num_train_timesteps": STEPS,
    "use_flow_sigmas": True,
    "prediction_type": "flow_prediction",
    "flow_shift": 1.0,
    "shift": 1.0,
}


def _by_diffusers(ask: Guided, process: Process, way: Way, noise: Tensor, generator: torch.Generator | None) -> Tensor:
    scheduler = scheduler_of(process, way)
    if way.sampler == STRAIGHT:
        # As ours are: evenly from 1 to 0, of which the last step is as long as the others.
        sigmas = torch.linspace(1, 1 / way.steps, way.steps, dtype=torch.float64).tolist()
        scheduler.set_timesteps(sigmas=sigmas, device=noise.device)
    else:
        scheduler.set_timesteps(way.steps, device=noise.device)
    takes = inspect.signature(scheduler.step).parameters
    given: dict[str, Any] = {"generator": generator} if "generator" in takes else {}
    x = noise * getattr(scheduler, "init_noise_sigma", 1.0)
    for time in scheduler.timesteps:
        seen = scheduler.scale_model_input(x, time) if hasattr(scheduler, "scale_model_input") else x
        told = ask(seen, time)
        if process.learns_variance and way.sampler != LEARNED:  # which take the noise alone
            told = told.chunk(2, dim=1)[0]
        x = scheduler.step(told, time, x, **given, return_dict=False)[0]
    return x


def _times(time: float | Tensor, x: Tensor) -> Tensor:
    dtype = x.dtype if isinstance(time, float) else None  # times of diffusion are whole numbers
    return torch.as_tensor(time, device=x.device, dtype=dtype).expand(len(x))


def _drawn(x: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)

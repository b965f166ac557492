"""The settings of generation: what is learnt, and how images are made and judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ...train import settings
from ...train.settings import Check, Settings
from .features import NAMES as FEATURES
from .process import NAMES as PROCESSES
from .sampling import Way, check_way

LATENT_SCALE = 0.18215  # of the published autoencoder: its latents then have a spread of about one


@dataclass(frozen=True)
class Generation(Settings):
    """What training a generator needs beside the engine's recipe.

    Attributes:
        process: "ddpm": diffusion with a learned variance, as DiT; "flow": straight flows, as SiT.
        image_size: Height and width in pixels; None for the data's own, or 32 where images have several.
        label_drop: Share of training images whose class is not told, which guidance needs.
        flip: Share of training images that are mirrored; latents never are.
        latent_scale: What latents are multiplied with.
        sampler: Who makes images when they are judged: ddpm, ddim, euler, heun, or a scheduler of diffusers.
        sample_steps: Its steps.
        guidance: How far it exaggerates the class; 1 for not at all, as published figures are.
        made: Images that are made to be judged.
        features: What they are compared by: "inception", which gives FID, or "random", which needs no file.
        reference: Which half they are compared with: "train", as is usual, or "test".
        reference_limit: Images of that half at most, evenly among all; None for all.
        neighbours: Rank of the neighbour that sets the reach of precision and recall.
        judge_batch: Images that are made at once, over all processes.

    Examples:
        >>> Generation(process="flow", sampler="ddim")
        Traceback (most recent call last):
        ValueError: sampler: expected euler or heun for flow, or the name of a scheduler of diffusers, got 'ddim'
    """

    kind: ClassVar[str] = "settings of generate"
    free: ClassVar[tuple[str, ...]] = ("judge_batch",)
    bound: ClassVar[tuple[str, ...]] = ("process", "image_size", "latent_scale")

    process: str = "ddpm"
    image_size: tuple[int, int] | None = None
    label_drop: float = 0.1
    flip: float = 0.5
    latent_scale: float = LATENT_SCALE
    sampler: str = "ddpm"
    sample_steps: int = 250
    guidance: float = 1.0
    made: int = 10_000
    features: str = "random"
    reference: str = "train"
    reference_limit: int | None = None
    neighbours: int = 3
    judge_batch: int = 500

    checks: ClassVar[Mapping[str, Check]] = {
        "process": settings.one_of(PROCESSES),
        "image_size": settings.size(),
        "label_drop": settings.share(below=True),
        "flip": settings.share(),
        "latent_scale": settings.more_than_0(),
        "sampler": settings.text(),
        "sample_steps": settings.whole(1),
        "guidance": settings.at_least_0(),
        "made": settings.whole(2),
        "features": settings.one_of(FEATURES),
        "reference": settings.one_of(("train", "test")),
        "reference_limit": settings.whole(2, optional=True),
        "neighbours": settings.whole(1),
        "judge_batch": settings.whole(1),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_way(self.process, Way(self.sampler, self.sample_steps))


@dataclass(frozen=True)
class Drawing(Settings):
    """What `affinear predict` can be told.

    Attributes:
        count: Pictures of each class.
        sampler: Who makes them; None for the one that judged them.
        sample_steps: Its steps; None for as many as when they were judged.
        guidance: How far the class is exaggerated; None for as far as when they were judged.
        draw_seed: Of the noise that they are made of.
        strip: Pictures of a strip from the first noise to the second; 0 for no strip.
        picture_size: Height and width, multiples of the patch; None for what was learnt.
        decoder: Folder of an `AutoencoderKL` of diffusers that makes pictures of latents; None for none.
    """

    kind: ClassVar[str] = "options of generate"

    count: int = 4
    sampler: str | None = None
    sample_steps: int | None = None
    guidance: float | None = None
    draw_seed: int = 0
    strip: int = 0
    picture_size: tuple[int, int] | None = None
    decoder: str | None = None

    checks: ClassVar[Mapping[str, Check]] = {
        "count": settings.whole(1),
        "sampler": settings.text(optional=True),
        "sample_steps": settings.whole(1, optional=True),
        "guidance": settings.at_least_0(optional=True),
        "draw_seed": settings.whole(0),
        "strip": settings.whole(0),
        "picture_size": settings.size(),
        "decoder": settings.text(optional=True),
    }

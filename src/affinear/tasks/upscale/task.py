"""`--task upscale`: photos made larger."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...models import making
from ...models.catalogue import count_macs
from ...models.checkpoints import read, room_for
from ...models.upscaler import NETWORKS, SCALES, Upscaler, from_released, make_upscaler, takes
from ...train.task import Answer, Job, Measure, Setup, Task, Trained
from ...train.weights import fill
from ..fewer import fewer, places
from ..images.reading import CorruptImage
from .looking import Look, enlarged, fitting
from .opening import Album, open_album, open_to_judge
from .photos import check_result, joined, open_photo, written
from .recipes import RECIPES, SMALL, SWINIR_LIGHT
from .settings import Enlarging, Upscaling
from .telling import Telling
from .work import UpscaleWork

PATCH = 64  # side of a small training crop, where photos are large enough
LARGEST, MOST_AT_ONCE = 2**12, 2**16  # that a file of weights may ask for
ARMS = ("windows", "softmax", "linear", "inline", "nala", "mala", "none")


class Upscale(Task[Album, Upscaling]):
    """Photos made larger: SwinIR-light, or its shell around attention over the whole image."""

    name: ClassVar[str] = "upscale"
    about: ClassVar[str] = "photos made larger"
    samples: ClassVar[str] = "photos"
    unit: ClassVar[str] = "crops"
    parts: ClassVar[str] = "sets"
    metric: ClassVar[Measure] = Measure("psnr", "PSNR", form=".2f")
    measures: ClassVar[tuple[Measure, ...]] = (
        metric,
        Measure("ssim", "SSIM", form=".4f"),
        Measure("gain", "dB over bicubic", form="+.2f"),
    )
    settings = Upscaling
    options = Enlarging
    draws: ClassVar[bool] = True

    @property
    def recipes(self) -> Mapping[str, Setup]:
        """The published recipe and a small one, by name."""
        return MappingProxyType({name: Setup(self, *parts) for name, parts in RECIPES.items()})

    def preset(self, model: str, name: str | None) -> Setup:
        """The recipe of this name, or the published one."""
        return self.named(name or SWINIR_LIGHT)

    def open(self, spec: str, settings: Upscaling) -> Album:
        """Folders of photos, open."""
        return open_album(spec, settings.scale, test_sets=settings.test_sets, memory=settings.memory)

    def open_to_judge(self, spec: str, settings: Upscaling) -> tuple[Album, str]:
        """Sets to be judged by, which need no photos to learn from beside them."""
        return open_to_judge(spec, settings.scale, test_sets=settings.test_sets, memory=settings.memory)

    def settle(self, job: Job[Upscaling], data: Album) -> Job[Upscaling]:
        """The job with the size of crops decided."""
        _check_args(job.model, job.model_args)
        scale = job.settings.scale
        smallest = min((min(size) // scale for size in data.train.sizes if min(size)), default=PATCH)
        patch = job.settings.patch or min(PATCH, smallest)
        if patch > smallest:
            raise ValueError(
                f"patch: expected at most {smallest}, as the smallest photo to learn from has a side of "
                f"{smallest * scale} pixels, got {patch}"
            )
        return dataclasses.replace(job, settings=dataclasses.replace(job.settings, patch=patch))

    def network(self, job: Job[Upscaling], *, room: int = making.MOST_NUMBERS) -> nn.Module:
        """The network of a settled job, for its scale."""
        _check_args(job.model, job.model_args)
        given = {"drop_path_rate": job.settings.drop_path, **job.model_args, "scale": job.settings.scale}
        return make_upscaler(job.model, given, room=room)

    def work(self, job: Job[Upscaling], data: Album, device: torch.device) -> UpscaleWork:
        """A settled job at work."""
        return UpscaleWork(job, data, device)

    def check_job(self, job: Job[Upscaling]) -> None:
        """Raise ValueError if a job that was read from a file lacks what it needs, or asks for what no user would."""
        settings = job.settings
        if settings.patch is None:
            raise ValueError("settings: patch: expected what the weights were trained with, got none")
        sides = max(settings.patch, settings.tile, settings.overlap)
        if sides > LARGEST or max(job.recipe.batch_size, settings.test_batch, settings.crops) > MOST_AT_ONCE:
            raise ValueError(
                f"settings: expected sides of at most {LARGEST} and batches of at most {MOST_AT_ONCE}, got a side of "
                f"{sides} and a batch of {max(job.recipe.batch_size, settings.test_batch, settings.crops)}"
            )

    def summary(self, job: Job[Upscaling], data: Album) -> str:
        """Photos, scale and the size of crops."""
        patch, scale = job.settings.patch, job.settings.scale
        return f"{super().summary(job, data)}, made {scale} times larger, learnt from crops of {patch} x {patch}"

    def macs(self, job: Job[Upscaling]) -> int | None:
        """Multiply-adds for one training crop."""
        assert job.settings.patch is not None
        with torch.device("meta"):
            network = self.network(job).eval()
        return count_macs(network, (3, job.settings.patch, job.settings.patch))

    def start(self, network: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
        """Load weights, SwinIR's released ones too; those of another scale but for the last convolution."""
        fill(network, from_released(tensors), source, fresh=("upsample.",))

    def bare(
        self, path: Path, model: str | None, model_args: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> Trained[Album, Upscaling]:
        """SwinIR-light's released weights, which tell their scale by their last convolution."""
        name = model or "swinir_light"
        tensors = from_released(read(path).tensors)
        last = tensors.get("upsample.weight")
        scale = next((s for s in SCALES if last is not None and last.ndim == 4 and last.shape[0] == 3 * s * s), None)
        if scale is None:
            raise ValueError(
                f"{path}: expected weights of an upscaler, whose last convolution is called upsample, got others; give "
                "the folder of a run, or SwinIR's lightweight ones"
            )
        setup = self.preset(name, None)
        settings = setup.settings.changed(**{"scale": scale, **changes})
        assert isinstance(settings, Upscaling)
        job = Job(name, dict(model_args), setup.recipe, settings)
        network = self.network(job, room=room_for(tensors))
        fill(network, tensors, str(path))
        return Trained(self, job, network.eval())

    def limited(self, data: Album, limit: int) -> Album:
        """At most so many photos of each half, evenly among all."""
        sets = tuple(data.set_of[i] for i in places(len(data.test), limit))
        return fewer(data, limit, set_of=sets)

    def variants(self, model: str) -> Mapping[str, Mapping[str, Any]]:
        """Windows, every mechanism over the whole image, and no attention at all."""
        return {name: self.variant(model, name) for name in ARMS}

    def variant(self, model: str, name: str) -> Mapping[str, Any]:
        """The network with this mechanism, the same convolution in all; "own" for the network as it is."""
        return {} if name == "own" else {"mechanism": name, "position_kernel": 5}

    def variant_about(self, name: str) -> str:
        """What a variant is, in a few words."""
        told = {
            "own": "the network as it is",
            "windows": "softmax within windows, as published",
            "none": "no attention: the convolutions alone",
        }
        return told.get(name, f"{name} over the whole image")

    def trial(self, model: str, data: Album) -> Setup:
        """The recipe for few photos and little time."""
        return self.preset(model, SMALL)

    def predict(self, trained: Trained[Album, Upscaling], sources: Sequence[str], options: Any) -> Iterator[Answer]:
        """The larger photos, as files."""
        assert isinstance(options, Enlarging)
        network = trained.network
        assert isinstance(network, Upscaler)
        for source in sources:
            try:
                yield _answer(network, source, options)
            except (CorruptImage, OSError) as error:
                yield Answer(source, error=str(error))
            except ValueError as error:
                yield Answer(source, error=f"{source}: {error}")
            except (MemoryError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "memory" not in str(error):  # torch's word for it
                    raise
                yield Answer(source, error=f"{source}: it does not fit into memory; --set look=tiles takes less")


def _answer(network: Upscaler, source: str, options: Enlarging) -> Answer:
    """One photo made larger."""
    photo = open_photo(source)
    check_result(photo, network.scale, options)
    height, width = photo.size
    look = Look(options.look, options.strip, options.tile, options.overlap)
    if options.look == "auto":
        look = fitting(network, height * width, look)
    device = next(network.parameters()).device
    telling = Telling(Path(source).name)
    try:
        strips = enlarged(network, photo.pixels[None].to(device), look, telling)
        image = joined(strips, photo, network.scale, deep=options.format in ("png", "tif"))
    finally:
        telling.end()
    name = f"{Path(source).stem}_x{network.scale}.{options.format}"
    return Answer(
        source,
        text=f"{width} x {height} became {image.width} x {image.height} pixels, {look.words}",
        content={"source": source, "size": [height, width], "larger": [image.height, image.width], "look": look.kind},
        files={name: written(image, photo, options)},
    )


def _check_args(model: str, model_args: Mapping[str, Any]) -> None:
    """Raise ValueError if a network is not known, or its scale is given twice."""
    if "scale" in model_args:
        raise ValueError("model_args: scale: it is a setting of the task; --set scale=4")
    if model in NETWORKS:
        making.check_given(model, takes(model), model_args)
    else:
        make_upscaler(model, {})  # says which there are


TASK = Upscale()

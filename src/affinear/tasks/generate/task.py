"""`--task generate`: pictures of a class, out of noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...models import making
from ...models.dit import SIZES, DiT
from ...train.task import Answer, Job, Measure, Setup, Task, Trained
from ...train.weights import fill
from .drawing import between, grid, picture, png_file, seen
from .inception import inception_file
from .opening import MOST_CLASSES, Pictures, limited, open_pictures
from .process import process_of
from .recipes import DIT, RECIPES, SMALL
from .samples import noise_of
from .sampling import Network, Way, check_way, sample
from .settings import Drawing, Generation
from .work import CALM, GenerateWork, judged_by

SMALLEST_SIZE = (32, 32)  # of pictures that come in many sizes
LARGEST, MOST_AT_ONCE, MOST_CHANNELS = 2**13, 2**16, 2**10  # that a file of weights may ask for
MOST_MADE = 2**20
DRAWN_AT_ONCE = 64
ANY = "any"
NAMED = 8  # classes that an error names
# What stands around the mechanism in every arm of a comparison: MALA's own parts, so that the arms differ in the
# mechanism alone, and one without any attention is left with them.
AROUND: Mapping[str, Any] = MappingProxyType({"rotary": True, "position_kernel": 5, "gate": "linear"})


class Generate(Task[Pictures, Generation]):
    """Pictures of a class, out of noise: a DiT around any mechanism, by diffusion or by a flow."""

    name: ClassVar[str] = "generate"
    about: ClassVar[str] = "pictures of a class, out of noise"
    samples: ClassVar[str] = "images"
    metric: ClassVar[Measure] = Measure("frechet", "Fréchet distance", False, ".2f")
    measures: ClassVar[tuple[Measure, ...]] = (
        metric,
        Measure("kernel", "kernel distance", False, ".5f"),
        Measure("precision", "precision"),
        Measure("recall", "recall"),
    )
    settings = Generation
    options = Drawing
    judged = "averaged"
    draws: ClassVar[bool] = True

    @property
    def recipes(self) -> Mapping[str, Setup]:
        """The published recipes by name."""
        return MappingProxyType({name: Setup(self, *parts) for name, parts in RECIPES.items()})

    def preset(self, model: str, name: str | None) -> Setup:
        """The recipe of this name, or DiT's."""
        return self.named(name or DIT)

    def open(self, spec: str, settings: Generation) -> Pictures:
        """Pictures with classes, or latents in files."""
        return open_pictures(spec)

    def open_held_out(self, spec: str, settings: Generation) -> tuple[Pictures, str]:
        """Pictures or latents, open; and which half of them made images are compared with, in words."""
        data = self.open(spec, settings)
        return data, f"the {'training' if settings.reference == 'train' else 'test'} half of {data.name}"

    def settle(self, job: Job[Generation], data: Pictures) -> Job[Generation]:
        """The job with size, channels and classes decided."""
        size = data.size if data.is_latent else job.settings.image_size or data.size or SMALLEST_SIZE
        assert size is not None
        if data.is_latent and job.settings.image_size not in (None, size):
            raise ValueError(f"image_size: expected none, as the latents are {size[0]} x {size[1]}, got another")
        facts = {"class_names": list(data.class_names), "channels": data.channels, "latent": data.is_latent}
        found = dataclasses.replace(job, settings=job.settings.changed(image_size=size), facts=facts)
        if data.is_latent and found.settings.features == "inception":
            raise ValueError(
                "features: expected random, as latents are no pictures that Inception knows, got inception"
            )
        if found.settings.features == "inception":
            inception_file()  # is asked for after thousands of steps, and said to be missing before the first
        _check_size(size, _outline(found).patch_size, "latents" if data.is_latent else "pictures")
        return found

    def network(self, job: Job[Generation], *, room: int = making.MOST_NUMBERS) -> nn.Module:
        """The DiT of a settled job."""
        _check_model(job.model)
        return making.make(job.model, _wanted(job), room=room)

    def work(self, job: Job[Generation], data: Pictures, device: torch.device) -> GenerateWork:
        """A settled job at work."""
        return GenerateWork(job, data, device)

    def check_job(self, job: Job[Generation]) -> None:
        """Raise ValueError if a job that was read from a file lacks a fact, or asks for what no user would."""
        names: Any = job.facts.get("class_names")
        listed = cast("list[Any]", names) if isinstance(names, list) else []
        if not 0 < len(listed) <= MOST_CLASSES or not all(isinstance(name, str) for name in listed):
            raise ValueError(f"class_names: expected names in a list, got {making.short(names)}")
        channels: Any = job.facts.get("channels")
        if type(channels) is not int or not 0 < channels <= MOST_CHANNELS:
            raise ValueError(f"channels: expected a number from 1 to {MOST_CHANNELS}, got {making.short(channels)}")
        if not isinstance(job.facts.get("latent"), bool):
            raise ValueError(f"latent: expected true or false, got {making.short(job.facts.get('latent'))}")
        settings = job.settings
        if settings.image_size is None or max(settings.image_size) > LARGEST:
            raise ValueError(f"image_size: expected sides of at most {LARGEST}, got {settings.image_size}")
        if settings.made > MOST_MADE:
            raise ValueError(f"made: expected at most {MOST_MADE:,} images, got {settings.made}")
        if max(settings.judge_batch, job.recipe.batch_size) > MOST_AT_ONCE:
            raise ValueError(f"settings: expected batches of at most {MOST_AT_ONCE}, got {settings.judge_batch}")

    def summary(self, job: Job[Generation], data: Pictures) -> str:
        """Images, classes, size, and what they are compared by."""
        size = job.settings.image_size
        assert size is not None
        what = f"{data.channels} x {size[0]} x {size[1]}"
        classes = f"{len(data.class_names)} class{'es' if len(data.class_names) > 1 else ''}"
        return f"{data.sizes[0]:,} training images, {classes}, made as {what}. {judged_by(job.settings)}"

    def check_data(self, trained: Trained[Pictures, Generation], data: Pictures) -> None:
        """Raise ValueError if the data has other classes or channels than the network."""
        facts = trained.job.facts
        known = (list(facts["class_names"]), facts["channels"], facts["latent"])
        if known != (list(data.class_names), data.channels, data.is_latent):
            raise ValueError(
                f"data: expected {len(known[0])} classes of {known[1]} channels, as the network was trained for, got "
                f"{len(data.class_names)} of {data.channels}, or others of that number"
            )

    def start(self, network: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
        """Load weights; a table of other classes stays fresh."""
        fill(network, tensors, source, fresh=("labels.",))

    def limited(self, data: Pictures, limit: int) -> Pictures:
        """At most so many images of each half, evenly among all."""
        return limited(data, limit)

    def variants(self, model: str) -> Mapping[str, Mapping[str, Any]]:
        """Every mechanism, and none at all, with the same convolution, gate and positions around each."""
        names = ("softmax", "linear", "inline", "nala", "mala", "mala_released", "none")
        return {name: self.variant(model, name) for name in names}

    def variant(self, model: str, name: str) -> Mapping[str, Any]:
        """The network with this mechanism in all of its blocks; "own" for the network as it is published."""
        return {} if name == "own" else {"mechanism": name, **AROUND}

    def variant_about(self, name: str) -> str:
        """What a variant is, in a few words."""
        told = {"own": "DiT as published", "none": "no attention: the convolutions and the gate alone"}
        return told.get(name, f"{name} in every block")

    def trial(self, model: str, data: Pictures) -> Setup:
        """The recipe for small images and little time."""
        return self.preset(model, SMALL)

    @torch.no_grad()
    def predict(self, trained: Trained[Pictures, Generation], sources: Sequence[str], options: Any) -> Iterator[Answer]:
        """Pictures of classes, each by its number or its name, or of "any"."""
        assert isinstance(options, Drawing)
        way, shape = _way(trained, options), _shape(trained, options)
        decode = _decoder(options.decoder, trained.job)
        for source in sources:
            try:
                label = class_of(source, trained.job.facts["class_names"])
            except ValueError as error:
                yield Answer(source, error=str(error))
                continue
            yield _drawn(trained, source, label, way, shape, options, decode)


def class_of(told: str, names: Sequence[str]) -> int:
    """The number of a class that is told by its number or its name; one beyond all for "any".

    Raises:
        ValueError: If there is no such class.

    Examples:
        >>> class_of("1", ["cat", "dog"]), class_of("cat", ["cat", "dog"]), class_of("any", ["cat", "dog"])
        (1, 0, 2)
    """
    text = told.strip()
    if text in names:
        return list(names).index(text)
    if text == ANY:
        return len(names)
    if text.isdecimal() and int(text) < len(names):
        return int(text)
    listed = ", ".join(names[:NAMED]) + (" ..." if len(names) > NAMED else "")
    raise ValueError(f"class: expected a number from 0 to {len(names) - 1}, {ANY}, or one of {listed}, got {told!r}")


def _drawn(
    trained: Trained[Pictures, Generation],
    source: str,
    label: int,
    way: Way,
    shape: tuple[int, int, int],
    options: Drawing,
    decode: Callable[[Tensor], Tensor] | None,
) -> Answer:
    """The pictures of one class."""
    names = [*trained.job.facts["class_names"], ANY]
    noise = torch.stack([noise_of(number, shape, options.draw_seed) for number in range(options.count)])
    made = _made(trained, noise, label, way, options.draw_seed, decode)
    stem = f"{label:03d}-{''.join(sign if sign.isalnum() else '-' for sign in names[label])[:40]}"
    files = {f"{stem}-{number}.png": png_file(picture(pixels)) for number, pixels in enumerate(made)}
    if options.strip:
        ends = [noise_of(number, shape, options.draw_seed) for number in (0, 1)]
        calm = way if way.sampler != "ddpm" else dataclasses.replace(way, sampler=CALM["ddpm"])
        frames = _made(trained, between(ends[0], ends[1], options.strip), label, calm, options.draw_seed, decode)
        files[f"{stem}-strip.png"] = png_file(grid(frames, options.strip))
    height, width = made.shape[2:]
    text = f"{options.count} picture{'s' if options.count > 1 else ''} of {names[label]}, {width} x {height}"
    content = {"class": label, "name": names[label], "size": [height, width], "files": list(files)}
    return Answer(source, text=text, content=content, files=files)


def _made(
    trained: Trained[Pictures, Generation],
    noise: Tensor,
    label: int,
    way: Way,
    seed: int,
    decode: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Pictures (B, 1 or 3, H, W), uint8, some at a time."""
    device, job = next(trained.network.parameters()).device, trained.job
    generator = torch.Generator(device).manual_seed(seed)
    process, pictures = process_of(job.settings.process), list[Tensor]()
    for some in noise.split(DRAWN_AT_ONCE):
        labels = torch.full((len(some),), label, device=device)
        made = sample(cast(Network, trained.network), process, way, some.to(device), labels, generator)
        if decode is not None:
            pictures.append(seen(decode(made / job.settings.latent_scale), False).cpu())
        else:
            pictures.append(seen(made, job.facts["latent"]).cpu())
    return torch.cat(pictures)


def _way(trained: Trained[Pictures, Generation], options: Drawing) -> Way:
    settings = trained.job.settings
    way = Way(
        options.sampler or settings.sampler,
        options.sample_steps or settings.sample_steps,
        settings.guidance if options.guidance is None else options.guidance,
        clip=not trained.job.facts["latent"],
    )
    check_way(settings.process, way)
    return way


def _shape(trained: Trained[Pictures, Generation], options: Drawing) -> tuple[int, int, int]:
    size = options.picture_size or trained.job.settings.image_size
    assert size is not None
    assert isinstance(trained.network, DiT)
    _check_size(size, trained.network.patch_size, "pictures", "picture_size")
    return trained.job.facts["channels"], *size


def _decoder(folder: str | None, job: Job[Generation]) -> Callable[[Tensor], Tensor] | None:
    """What makes pictures of latents, if anybody names one."""
    if folder is None:
        return None
    if not job.facts["latent"]:
        raise ValueError("decoder: expected none, as the network makes pictures and no latents")
    try:
        from diffusers import AutoencoderKL
    except ImportError:
        raise ValueError("decoder: an AutoencoderKL needs diffusers: pip install 'affinear[generate]'") from None
    try:
        network: Any = AutoencoderKL.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    except (OSError, ValueError) as error:
        said = str(error).partition("\n")[0][:120]
        raise ValueError(f"decoder: expected the folder of an AutoencoderKL, got {folder!r} ({said})") from None

    def decode(latents: Tensor) -> Tensor:
        return network.to(latents.device).decode(latents).sample

    return decode


def _check_size(size: tuple[int, int], patch: int, what: str, setting: str = "image_size") -> None:
    if any(side % patch for side in size):
        raise ValueError(
            f"{setting}: expected {what} whose sides are multiples of the patch, {patch}, got {size[0]} x {size[1]}"
        )


def _check_model(model: str) -> None:
    if model not in SIZES:
        raise ValueError(f"model: expected one that makes pictures, {', '.join(SIZES)}, got {model!r}")


def _wanted(job: Job[Generation]) -> dict[str, Any]:
    """What the network of a settled job is made with."""
    learns = process_of(job.settings.process).learns_variance
    own = {"num_classes": len(job.facts["class_names"]), "in_chans": job.facts["channels"], "learn_sigma": learns}
    for name in own:
        if name in job.model_args and job.model_args[name] != own[name]:
            raise ValueError(f"model_args: {name}: expected {own[name]}, which data and process decide; leave it out")
    return own | dict(job.model_args)


def _outline(job: Job[Generation]) -> DiT:
    _check_model(job.model)
    found = making.outline(job.model, _wanted(job))
    assert isinstance(found, DiT)
    return found


TASK = Generate()

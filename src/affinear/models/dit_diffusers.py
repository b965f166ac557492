"""DiT as a citizen of diffusers: its `DiTTransformer2DModel` with our attention, weights to and fro, and a pipeline.

    transformer = to_diffusers(network, size=32)
    transformer.save_pretrained("here")
    LinearDiTTransformer2DModel.from_pretrained("here")

diffusers gives every block embedders of time and class of its own; ours has one of each. Weights go there as copies,
and come back where the copies are still the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from diffusers import DDPMScheduler, DiffusionPipeline, DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler
from diffusers import ModelMixin as ModelMixin  # a pipeline's folder names this module, where diffusers looks for it
from diffusers.configuration_utils import register_to_config
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor, nn

from .. import ops
from ..ops.mechanisms import Mechanism
from .dit import NORM_EPS, TRAINED_STEPS, Block, DiT

EMBEDDERS = {
    "times.inner": "timestep_embedder.linear_1",
    "times.outer": "timestep_embedder.linear_2",
    "labels": "class_embedder.embedding_table",
}
OUTSIDE = {"patch_embed": "pos_embed.proj", "modulation": "proj_out_1", "head": "proj_out_2"}
INSIDE = {"fc1": "ff.net.0.proj", "fc2": "ff.net.2", "attn.proj": "attn1.to_out.0", "modulation": "norm1.linear"}


class AffinearAttnProcessor:
    """A processor of diffusers' that attends with a mechanism of ours, through the layer's own projections.

    Args:
        mechanism: A registered name, or a `Mechanism`; "softmax" too.
    """

    def __init__(self, mechanism: str | Mechanism) -> None:
        self.mechanism = mechanism

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Tokens (B, N, C) that have looked at each other."""
        if encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError("attention: expected tokens alone, as in DiT, got a memory or a mask")
        project = (attn.to_q, attn.to_k, attn.to_v)
        query, key, value = (one(hidden_states).unflatten(-1, (attn.heads, -1)) for one in project)
        out = ops.attention(query, key, value, mechanism=self.mechanism).flatten(2)
        return attn.to_out[1](attn.to_out[0](out.to(value.dtype)))


class LinearDiTTransformer2DModel(DiTTransformer2DModel):
    """diffusers' DiT with a mechanism of ours in every block: made, saved, loaded and called as that is.

    Args:
        mechanism: A registered name.
        closed_frequencies: Whether times are seen as diffusers shows them; False for as the paper does.
        sample_size: Side of images or latents.
        num_attention_heads: Heads.
        attention_head_dim: Their width.
        in_channels: Channels that come in.
        out_channels: Channels that come out; twice as many where a variance is learnt.
        num_layers: Blocks.
        patch_size: Side of a patch.
        num_embeds_ada_norm: Classes.
        norm_eps: Of the norms before the MLPs.

    Example:
        >>> import torch
        >>> from affinear.models.dit_diffusers import LinearDiTTransformer2DModel
        >>> model = LinearDiTTransformer2DModel("mala", sample_size=8, num_attention_heads=2, attention_head_dim=8,
        ...     in_channels=3, num_layers=1, num_embeds_ada_norm=10).eval()
        >>> model(torch.randn(1, 3, 8, 8), timestep=torch.tensor([5]), class_labels=torch.tensor([7])).sample.shape
        torch.Size([1, 3, 8, 8])
    """

    @register_to_config
    def __init__(
        self,
        mechanism: str = "mala",
        closed_frequencies: bool = False,
        sample_size: int = 32,
        num_attention_heads: int = 6,
        attention_head_dim: int = 64,
        in_channels: int = 4,
        out_channels: int | None = None,
        num_layers: int = 12,
        patch_size: int = 2,
        num_embeds_ada_norm: int = 1000,
        norm_eps: float = NORM_EPS,
    ) -> None:
        super().__init__(
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            in_channels=in_channels,
            out_channels=out_channels,
            num_layers=num_layers,
            sample_size=sample_size,
            patch_size=patch_size,
            num_embeds_ada_norm=num_embeds_ada_norm,
            norm_eps=norm_eps,
        )
        ops.find(mechanism)
        for block in cast("list[Any]", self.transformer_blocks):
            block.attn1.set_processor(AffinearAttnProcessor(mechanism))
            block.norm1.emb.time_proj.downscale_freq_shift = int(closed_frequencies)


def to_diffusers(network: DiT, size: int = 32) -> LinearDiTTransformer2DModel:
    """A network of ours as diffusers', with the same weights and the same answers.

    Args:
        network: As published: without rotary positions, convolution or gate, which diffusers' has no place for.
        size: Side of the images or latents.

    Raises:
        ValueError: If the network has a part that diffusers' has not.
    """
    blocks = _blocks(network)
    parts = blocks[0].attn.parts
    if parts.rotary or parts.position_kernel or parts.gate != "none":
        raise ValueError(
            "network: expected a DiT without rotary positions, convolution or gate, which DiTTransformer2DModel has no "
            f"place for, got {parts}"
        )
    if not isinstance(parts.mechanism, str):
        raise ValueError(f"network: expected a mechanism that is registered by its name, got {parts.mechanism}")
    heads, width = blocks[0].attn.num_heads, blocks[0].fc1.out_features
    if width != 4 * network.embed_dim:
        raise ValueError(f"network: expected an MLP of four times the width, as diffusers has it, got {width}")
    made = LinearDiTTransformer2DModel(
        parts.mechanism,
        network.times.closed,
        sample_size=size,
        num_attention_heads=heads,
        attention_head_dim=network.embed_dim // heads,
        in_channels=network.in_chans,
        out_channels=network.out_chans,
        num_layers=len(blocks),
        patch_size=network.patch_size,
        num_embeds_ada_norm=network.num_classes,
    )
    made.load_state_dict(tensors_to_diffusers(network.state_dict(), len(blocks)))
    first = next(network.parameters())
    return cast(Any, made).to(first.device, first.dtype).train(network.training)


def from_diffusers(transformer: DiTTransformer2DModel, mechanism: str | None = None) -> DiT:
    """A DiT of diffusers' as ours, with the same weights and the same answers.

    Args:
        transformer: Any `DiTTransformer2DModel`, such as the published ones, or one of ours.
        mechanism: What attends; the transformer's own, or softmax, if None. With another one than it was trained with,
            the answers are others until it is trained on.

    Raises:
        ValueError: If blocks have embedders that differ from each other.
    """
    about: Any = transformer.config
    ours = isinstance(transformer, LinearDiTTransformer2DModel)
    heads, channels = about.num_attention_heads, about.in_channels
    out = about.out_channels or channels
    if out not in (channels, 2 * channels):
        raise ValueError(f"transformer: expected {channels} or {2 * channels} channels out, got {out}")
    made = DiT(
        about.patch_size,
        channels,
        about.num_embeds_ada_norm,
        heads * about.attention_head_dim,
        about.num_layers,
        heads,
        mechanism=mechanism or (about.mechanism if ours else "softmax"),
        learn_sigma=out == 2 * channels,
        closed_frequencies=about.closed_frequencies if ours else True,
    )
    for block in _blocks(made):
        block.norm2.eps = about.norm_eps
    made.load_state_dict(tensors_from_diffusers(transformer.state_dict(), about.num_layers))
    first = next(transformer.parameters())
    return made.to(first.device, first.dtype).train(transformer.training)


def tensors_to_diffusers(tensors: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Our tensors by diffusers' names: one projection becomes three, embedders go into every block."""
    found: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        found |= {f"{theirs}.{kind}": tensors[f"{ours}.{kind}"] for ours, theirs in OUTSIDE.items()}
        for i in range(depth):
            before, after = f"blocks.{i}.", f"transformer_blocks.{i}."
            found |= {f"{after}{theirs}.{kind}": tensors[f"{before}{ours}.{kind}"] for ours, theirs in INSIDE.items()}
            three = tensors[f"{before}attn.qkv.{kind}"].chunk(3)
            found |= {f"{after}attn1.to_{letter}.{kind}": part for letter, part in zip("qkv", three, strict=True)}
            embedded = [(ours, theirs) for ours, theirs in EMBEDDERS.items() if f"{ours}.{kind}" in tensors]
            found |= {f"{after}norm1.emb.{theirs}.{kind}": tensors[f"{ours}.{kind}"] for ours, theirs in embedded}
    return found


def tensors_from_diffusers(tensors: Mapping[str, Tensor], depth: int) -> dict[str, Tensor]:
    """Diffusers' tensors by our names.

    Raises:
        ValueError: If embedders of different blocks are not the same.
    """
    found: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        found |= {f"{ours}.{kind}": tensors[f"{theirs}.{kind}"] for ours, theirs in OUTSIDE.items()}
        for i in range(depth):
            before, after = f"transformer_blocks.{i}.", f"blocks.{i}."
            found |= {f"{after}{ours}.{kind}": tensors[f"{before}{theirs}.{kind}"] for ours, theirs in INSIDE.items()}
            three = [tensors[f"{before}attn1.to_{letter}.{kind}"] for letter in "qkv"]
            found[f"{after}attn.qkv.{kind}"] = torch.cat(three)
            for ours, theirs in EMBEDDERS.items():
                name = f"{before}norm1.emb.{theirs}.{kind}"
                if name not in tensors:
                    continue
                if not torch.equal(found.setdefault(f"{ours}.{kind}", tensors[name]), tensors[name]):
                    raise ValueError(
                        f"{name}: expected what the first block has, since a DiT has one embedder for all; these were "
                        "trained apart"
                    )
    return found


class LinearDiTPipeline(DiffusionPipeline):
    """Pictures of classes, in pixels, or in latents through an autoencoder: `save_pretrained`, `from_pretrained`.

    Args:
        transformer: Any `DiTTransformer2DModel`.
        scheduler: A `DDPMScheduler` with a learned variance, a `DDIMScheduler`, or one for flows.
        vae: An `AutoencoderKL` where the transformer works on latents; None for pixels.
        names: Of the classes, which then may be asked for by name.

    Example:
        >>> from affinear.models.dit_diffusers import LinearDiTPipeline, LinearDiTTransformer2DModel, flow_scheduler
        >>> model = LinearDiTTransformer2DModel("mala", sample_size=8, num_attention_heads=2, attention_head_dim=8,
        ...     in_channels=3, num_layers=1, num_embeds_ada_norm=10).eval()
        >>> pipeline = LinearDiTPipeline(model, flow_scheduler())
        >>> pipeline.set_progress_bar_config(disable=True)
        >>> pipeline(class_labels=[7, 7], num_inference_steps=2).images[0].size
        (8, 8)
    """

    _optional_components = ["vae"]  # noqa: RUF012  # diffusers reads it off the class
    model_cpu_offload_seq = "transformer->vae"

    def __init__(
        self, transformer: DiTTransformer2DModel, scheduler: Any, vae: Any = None, names: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        self.register_to_config(names=None if names is None else list(names))

    @torch.no_grad()
    def __call__(
        self,
        class_labels: Sequence[int | str],
        guidance_scale: float = 1.0,
        generator: torch.Generator | None = None,
        num_inference_steps: int = 50,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """Pictures, one for each class.

        Args:
            class_labels: Numbers, or names where the pipeline knows them.
            guidance_scale: How far the class is exaggerated; 1 for not at all.
            generator: Of the noise.
            num_inference_steps: How often the transformer is asked.
            output_type: "pil", "np" or "pt".
            return_dict: Whether to return an `ImagePipelineOutput`, or a tuple.

        Raises:
            ValueError: If there is no such class.
        """
        transformer: Any = self.transformer
        about, device = transformer.config, self._execution_device
        labels = torch.tensor([self._label(label) for label in class_labels], device=device)
        shape = (len(labels), about.in_channels, about.sample_size, about.sample_size)
        x = randn_tensor(shape, generator=generator, device=device, dtype=transformer.dtype)
        self.scheduler.set_timesteps(num_inference_steps, device=device)
        for time in cast(Any, self).progress_bar(self.scheduler.timesteps):
            told = self._told(x, time, labels, guidance_scale)
            if told.shape[1] != x.shape[1] and getattr(self.scheduler.config, "variance_type", None) != "learned_range":
                told = told.chunk(2, dim=1)[0]
            given = {"generator": generator} if isinstance(self.scheduler, DDPMScheduler) else {}
            x = self.scheduler.step(told, time, x, return_dict=False, **given)[0]
        if self.vae is not None:
            x = self.vae.decode(x / self.vae.config.scaling_factor).sample
        pictures: Any = (x.float() / 2 + 0.5).clamp(0, 1)
        if output_type != "pt":
            pictures = pictures.cpu().permute(0, 2, 3, 1).numpy()
        if output_type == "pil":
            pictures = self.numpy_to_pil(pictures)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=pictures) if return_dict else (pictures,)

    def _told(self, x: Tensor, time: Tensor, labels: Tensor, guidance: float) -> Tensor:
        """What the transformer says, with the class exaggerated; a variance stays as it is."""
        transformer: Any = self.transformer
        if guidance == 1:
            return transformer(x, timestep=time.expand(len(x)), class_labels=labels).sample
        anybody = torch.full_like(labels, transformer.config.num_embeds_ada_norm)
        twice = torch.cat((x, x))
        both = transformer(twice, timestep=time.expand(len(twice)), class_labels=torch.cat((labels, anybody))).sample
        told, of_any = both.chunk(2)
        channels = x.shape[1]
        moved = torch.lerp(of_any[:, :channels], told[:, :channels], guidance)
        return torch.cat((moved, told[:, channels:]), dim=1)

    def _label(self, told: int | str) -> int:
        names: list[str] = cast(Any, self.config).names or []
        if isinstance(told, str) and told in names:
            return names.index(told)
        count = self.transformer.config.num_embeds_ada_norm
        if isinstance(told, str) or not 0 <= told < count:
            known = f", or one of {', '.join(names[:8])}" if names else ""
            raise ValueError(f"class_labels: expected numbers from 0 to {count - 1}{known}, got {told!r}")
        return told


def flow_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The scheduler for a network that was trained as a flow."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=int(TRAINED_STEPS), shift=1.0)


def diffusion_scheduler(clip: bool = True) -> DDPMScheduler:
    """The scheduler for a network that was trained by diffusion with a learned variance.

    Args:
        clip: Whether images on the way stay between -1 and 1: in pixels, not in latents.
    """
    return DDPMScheduler(
        num_train_timesteps=int(TRAINED_STEPS),
        beta_start=1e-4,
        beta_end=0.02,
        beta_schedule="linear",
        variance_type="learned_range",
        timestep_spacing="linspace",
        clip_sample=clip,
    )


def _blocks(network: nn.Module) -> list[Block]:
    return [cast(Block, block) for block in cast(Any, network).blocks]

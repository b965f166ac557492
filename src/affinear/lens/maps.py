"""What patches of real images look at, layer by layer, as pictures for a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor, nn

from .glance import Map, draw_maps
from .reading import Readers

IMAGES = 3  # that are shown
SIDE = 144  # pixels of the longer side of a picture
STRONG = 4.0  # times a uniform row, from which on a place is as bright as it gets
HOT = np.array([255.0, 196.0, 0.0])


def section(network: nn.Module, pixels: Tensor, names: Sequence[str], mechanisms: Sequence[tuple[str, str]]) -> str:
    """A part of a page: some images, and beside each what its most striking patch looks at in every layer.

    Args:
        network: In evaluation mode.
        pixels: Images (B, channels, H, W) as the network wants them.
        names: What they are called.
        mechanisms: Name and mechanism of each layer, in the order of the page, which numbers them from one.

    Returns:
        HTML without scripts; all that it shows is in it.
    """
    shown = [(number, pixels[number]) for number in range(min(IMAGES, len(pixels)))]
    found = draw_maps(network, shown, Readers(), every=True)
    if not found:
        return (
            '<h2>Maps</h2><p class="note">No layer has one map over the whole image: its keys lie in windows, or on no '
            "grid.</p>"
        )
    numbers = {name: (number, mechanism) for number, (name, mechanism) in enumerate(mechanisms, 1)}
    rows = "".join(
        _row(_picture(image, network), names[number], [one for one in found if one.image == number], numbers)
        for number, image in shown
    )
    return (
        '<h2>Maps</h2><p class="note">What the framed patch looks at, mean over heads: as the image where a uniform '
        f"row looks too, darker where less, yellow where more, up to {STRONG:g} times as much.</p>{rows}"
    )


def _row(picture: Image.Image, name: str, maps: Sequence[Map], numbers: dict[str, tuple[int, str]]) -> str:
    cards = [_card(picture, name)]
    for one in maps:
        number, mechanism = numbers.get(one.layer, (0, ""))
        cards.append(_card(overlaid(picture, one), f"{number} {mechanism}".strip(), f"layer {one.layer} of {name}"))
    return f'<div class="maps">{"".join(cards)}</div>'


def _card(picture: Image.Image, caption: str, alt: str = "") -> str:
    held = io.BytesIO()
    picture.save(held, "JPEG", quality=80)
    source = f"data:image/jpeg;base64,{base64.b64encode(held.getvalue()).decode()}"
    said = f"<figcaption>{escape(caption)}</figcaption>"
    return f'<figure><img alt="{escape(alt or caption)}" src="{source}">{said}</figure>'


def _picture(image: Tensor, network: nn.Module) -> Image.Image:
    """An image as people see it: what was normalised, put back."""
    config: Any = getattr(network, "pretrained_cfg", None) or {}
    channels = image.detach().float().cpu().numpy()
    shape = (len(channels), 1, 1)
    mean, std = (
        _fit(config.get(name), plain, len(channels)).reshape(shape) for name, plain in (("mean", 0.5), ("std", 0.5))
    )
    values = np.clip((channels * std + mean) * 255, 0, 255).astype(np.uint8).transpose(1, 2, 0)
    shown = Image.fromarray(values[..., 0] if values.shape[2] == 1 else values).convert("RGB")
    factor = SIDE / max(shown.size)
    return shown.resize(
        (max(1, round(shown.width * factor)), max(1, round(shown.height * factor))), Image.Resampling.BICUBIC
    )


def _fit(given: Any, plain: float, channels: int) -> NDArray[np.float64]:
    known = np.asarray(given if given is not None else [plain], dtype=np.float64).reshape(-1)
    return known if len(known) == channels else np.full(channels, known.mean())


def overlaid(picture: Image.Image, one: Map) -> Image.Image:
    """A picture with a map laid over it, and a frame around the patch that looks."""
    rows, columns = one.grid
    weights = np.asarray(one.weights, dtype=np.float32).reshape(rows, columns)
    heat = Image.fromarray(weights).resize(picture.size, Image.Resampling.NEAREST)
    share = np.asarray(heat, dtype=np.float64)[..., None]
    seen = np.asarray(picture, dtype=np.float64)
    more = np.clip((share - 1) / (STRONG - 1), 0, 1) * 0.85
    dim = 0.25 + 0.75 * np.clip(share, 0, 1)
    mixed = Image.fromarray((seen * dim * (1 - more) + HOT * more).clip(0, 255).astype(np.uint8))
    row, column = divmod(one.query, columns)
    wide, high = picture.width / columns, picture.height / rows
    frame = [column * wide, row * high, (column + 1) * wide - 1, (row + 1) * high - 1]
    ImageDraw.Draw(mixed).rectangle(frame, outline=(255, 255, 255))
    return mixed

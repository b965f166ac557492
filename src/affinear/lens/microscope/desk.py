"""What one running microscope holds: its pictures, its network, and the layers that were looked at last."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from affinear.lens.microscope import answers, networks, patches, pictures
from affinear.lens.microscope.answers import Answer, Spot
from affinear.lens.microscope.pictures import Album
from affinear.lens.microscope.refusal import Refusal
from affinear.lens.microscope.tokens import Layer

MOST_LAYERS = 4  # pairs of a source and a picture whose layers are kept


@dataclass(frozen=True)
class Network:
    """The network that may be looked into.

    Attributes:
        name: As `affinear models` lists it.
        model: In eval mode.
        weights: The name of the file that they came from; "" where they are random.
    """

    name: str
    model: nn.Module
    weights: str = ""


@dataclass(frozen=True)
class Desk:
    """State of one microscope; safe to use from several threads."""

    album: Album
    network: Network | None = None
    _layers: OrderedDict[tuple[str, str], list[Layer]] = field(
        default_factory=OrderedDict[tuple[str, str], list[Layer]]
    )
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> Answer:
        """What the page has to know first."""
        samples = [vars(sample) for sample in pictures.SAMPLES]
        network = None
        if self.network is not None:
            network = {"name": self.network.name, "weights": self.network.weights}
        return {
            "samples": samples,
            "network": network,
            "mechanisms": list(answers.MECHANISMS),
            "factors": list(answers.FACTORS),
        }

    def layers(self, asked: Mapping[str, str]) -> Answer:
        """The layers of a source that can be drawn, for one picture."""
        found = self._find_layers(asked)
        return {"layers": [_described(number, layer) for number, layer in enumerate(found) if layer.drawable]}

    def rows(self, asked: Mapping[str, str]) -> Answer:
        """Rows of a patch at one factor."""
        with torch.no_grad():
            return answers.rows(self._spot(asked), _number(asked, "factor", "1"))

    def curves(self, asked: Mapping[str, str]) -> Answer:
        """Curves of a patch over all factors."""
        with torch.no_grad():
            return answers.curves(self._spot(asked))

    def add(self, content: bytes) -> Answer:
        """Read and keep an upload."""
        picture = pictures.read(content)
        self.album.add(picture)
        return {"id": picture.number, "width": picture.width, "height": picture.height}

    def _spot(self, asked: Mapping[str, str]) -> Spot:
        found = self._find_layers(asked)
        number = _count(asked, "layer", "0")
        if number >= len(found):
            raise Refusal(
                f"layer: expected a number from 0 to {len(found) - 1}, the layers of this source, got {number}; "
                "choose another."
            )
        layer = found[number]
        if not layer.drawable:
            raise Refusal(
                f"layer: {layer.name} has a grid of {layer.grid[0]} x {layer.grid[1]}, expected at most 56 x 56; "
                "choose another."
            )
        return Spot(layer, _count(asked, "patch", None), _count(asked, "head", "0"), _count(asked, "window", "0"))

    def _find_layers(self, asked: Mapping[str, str]) -> list[Layer]:
        """The layers of a source for one picture; a network runs once at a time, and once for a picture."""
        source, name = asked.get("source", "raw"), asked.get("image", "")
        picture = self.album.find(name)
        if source != "raw" and (source != "network" or self.network is None):
            raise Refusal(
                f"source: expected {'raw' if self.network is None else 'raw or network'}, got {source[:40]!r}; "
                "start `affinear lens` with --model to look into a network."
            )
        with self._lock:
            if (source, picture.number) not in self._layers:
                self._layers[source, picture.number] = self._compute(source, picture)
            self._layers.move_to_end((source, picture.number))
            while len(self._layers) > MOST_LAYERS:
                self._layers.popitem(last=False)
            return self._layers[source, picture.number]

    def _compute(self, source: str, picture: pictures.Picture) -> list[Layer]:
        if source == "raw" or self.network is None:
            return [patches.layer(picture)]
        found = networks.layers(self.network.model, picture)
        if not any(layer.drawable for layer in found):
            raise Refusal(f"{self.network.name} has no attention layer with a grid of at most 56 x 56; try another.")
        return found


def make_desk(network: Network | None) -> Desk:
    """A desk with the samples and, where there is one, a network."""
    return Desk(Album(pictures.samples()), network)


def _described(number: int, layer: Layer) -> Answer:
    return {
        "number": number,
        "name": layer.name,
        "grid": list(layer.grid),
        "heads": layer.heads,
        "windows": layer.windows,
        "prefix": layer.prefix_tokens,
        "rotary": layer.rotary is not None,
        "mechanism": layer.mechanism,
    }


def _number(asked: Mapping[str, str], name: str, default: str) -> float:
    text = asked.get(name, default)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise Refusal(f"{name}: expected a number, got {text[:40]!r}; move the slider.")
    return number


def _count(asked: Mapping[str, str], name: str, default: str | None) -> int:
    text = asked.get(name, default)
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Refusal(f"{name}: expected a whole number from 0, got {(text or 'nothing')[:40]!r}; choose another.")
    return int(text)

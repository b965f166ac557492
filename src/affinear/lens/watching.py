"""Watching the attention layers of a network at work: numbers per layer and head, and outputs as they were."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from affinear.lens import scene as scenes
from affinear.lens.measures import spearman
from affinear.lens.reading import Around, Look, Reader, Readers, read
from affinear.lens.rows import measure

FEWEST = 3  # rows that a correlation is taken of


@dataclass(frozen=True)
class LayerReport:
    """What one attention layer did; tensors are (H,), the mean over images, windows and rows, in float64 on the CPU.

    A row is what one query looks at. Where keys are hidden, by a mask or because they are padding, a row has as many
    keys as its query may see. Rows of padding are not counted.

    Attributes:
        name: Of the layer in the network.
        mechanism: Its mechanism.
        linear: Whether its time is linear in the number of tokens.
        biased: Whether scores got a bias or a mask, which the numbers include.
        heads: H.
        tokens: Queries that a query is among, in the last pass: of the map, or of one window.
        keys: Keys of one query, in the last pass.
        grid: Rows and columns of the map or window, in the last pass; None where the keys lie on no grid. Of stripes,
            `tokens`, `keys` and `grid` are those of the first half of the heads.
        rows: Rows that were counted, of the first head.
        entropy: In nats, of |w| / Σ|w|.
        entropy_share: Entropy over the log of the number of keys: 0 for a single key, 1 for a uniform row. None where
            no query sees more than one key.
        effective_keys: exp of the entropy.
        largest_weight: The largest weight.
        negative_share: How many of the weights are negative, from 0 to 1.
        negative_mass: Sum of |w| over them.
        absolute_mass: Sum of |w| over all.
        row_sum_error: The largest |Σw - 1| of any row: the maximum, not the mean.
        norm_correlation: Spearman's correlation of entropy and query norm over the rows of an image or window; None
            where no image or window has three rows.
        neighbourhood: Sum of the weights in the 3 x 3 places around the query; None without a grid.
        neighbourhood_uniform: What a uniform row has there; None without a grid.
        distance: Mean distance of query and key in places, under |w| / Σ|w|; None without a grid.
    """

    name: str
    mechanism: str
    linear: bool
    biased: bool
    heads: int
    tokens: int
    keys: int
    grid: tuple[int, int] | None
    rows: int
    entropy: Tensor
    entropy_share: Tensor | None
    effective_keys: Tensor
    largest_weight: Tensor
    negative_share: Tensor
    negative_mass: Tensor
    absolute_mass: Tensor
    row_sum_error: Tensor
    norm_correlation: Tensor | None
    neighbourhood: Tensor | None
    neighbourhood_uniform: Tensor | None
    distance: Tensor | None


MEANS = (
    "entropy",
    "entropy_share",
    "effective_keys",
    "largest_weight",
    "negative_share",
    "negative_mass",
    "absolute_mass",
    "norm_correlation",
    "neighbourhood",
    "neighbourhood_uniform",
    "distance",
)


@dataclass(frozen=True)
class Kind:
    """What a report says of a layer beside numbers; see `LayerReport`."""

    mechanism: str
    linear: bool
    biased: bool
    tokens: int
    keys: int
    grid: tuple[int, int] | None


@dataclass
class Tally:
    """Sums over everything that a layer has done so far.

    Attributes:
        totals: By name of a number, (2, H): its sum, and how many rows were summed.
        worst: (H,), the largest error of a row's sum.
        last: What the layer was in the last pass; None before it.
    """

    totals: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    worst: Tensor | None = None
    last: Kind | None = None

    def add(self, found: dict[str, Tensor], worst: Tensor, last: Kind) -> None:
        """Take the sums of one pass, (2, H) each, on board."""
        for name, sums in found.items():
            self.totals[name] = self.totals[name] + sums if name in self.totals else sums
        self.worst = worst if self.worst is None else torch.maximum(self.worst, worst)
        self.last = last

    def report(self, name: str) -> LayerReport:
        """The means."""
        assert self.last is not None
        assert self.worst is not None
        numbers: dict[str, Any] = {number: self._mean(number) for number in MEANS}
        return LayerReport(
            name=name,
            **vars(self.last),
            heads=len(self.worst),
            rows=int(self.totals["entropy"][1, 0]),
            row_sum_error=self.worst,
            **numbers,
        )

    def _mean(self, name: str) -> Tensor | None:
        total, count = self.totals.get(name, torch.zeros(2, 1, device="cpu"))
        return total / count if count.all() else None


@dataclass(frozen=True)
class Watched:
    """What `watch` has seen so far.

    Attributes:
        tallies: Sums of every hooked layer, by name.
        unread: Names and classes of layers that look like attention, which nothing is known about.
    """

    tallies: dict[str, Tally]
    unread: tuple[str, ...] = ()

    @property
    def layers(self) -> list[LayerReport]:
        """A report of each layer that was called, in the order of the network."""
        return [tally.report(name) for name, tally in self.tallies.items() if tally.last is not None]


@contextmanager
def watch(model: nn.Module, *, rows: int | None = None, layers: str | None = None) -> Generator[Watched]:
    """Hook the attention layers of a network, ours and timm's, and collect numbers while it works.

    Outputs and gradients are bit for bit what they are without. Weights are looked at a few rows at a time and thrown
    away; only sums are kept. Passes of any size may follow each other; what gradient checkpointing repeats is not
    counted twice.

    Args:
        model: The network.
        rows: At most so many rows of each image are looked at, drawn once, by a generator of their own; all if None.
            In windows at most so many for all windows of an image together.
        layers: Names of the layers to look at, such as "stages.0.*"; all if None.

    Yields:
        The numbers, which grow with each pass.

    Raises:
        ValueError: If no layer is hooked, or the network is compiled.

    Example:
        >>> import timm, torch
        >>> import affinear.models
        >>> from affinear.lens.watching import watch
        >>> model = timm.create_model("inline_deit_tiny", depth=2, img_size=64).eval()
        >>> with watch(model, rows=8) as watched, torch.no_grad():
        ...     _ = model(torch.randn(2, 3, 64, 64))
        >>> watched.layers[1].name, watched.layers[1].mechanism, watched.layers[1].rows
        ('blocks.1.attn', 'inline', 16)
        >>> watched.layers[0].entropy.shape
        torch.Size([6])
    """
    if rows is not None and rows < 1:
        raise ValueError(f"rows: expected at least one, or None for all, got {rows}")
    _check_eager(model)
    readers = Readers()
    found = _chosen(model, readers, layers)
    watched = Watched({name: Tally() for name, _, _ in found}, _unread(model, readers))
    surroundings: dict[str, Around] = {}
    with ExitStack() as hooks:
        for name, layer, reader in found:
            around = surroundings.setdefault(_owner(model, name), Around())
            hooks.callback(_hook(layer, reader, watched.tallies[name], around, rows).remove)
        for name, around in surroundings.items():
            _look_around(model.get_submodule(name), around, hooks)
        yield watched


def _check_eager(model: nn.Module) -> None:
    """Compiled code does not call layers one by one, and may leave hooks out without a word."""
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            where = f", in {name}" if name else ""
            raise ValueError(
                f"model: expected a network that is not compiled, got a compiled one{where}; pass the original"
            )


def _chosen(model: nn.Module, readers: Readers, pattern: str | None) -> list[tuple[str, nn.Module, Reader]]:
    """Name, layer and reader of all that can be read and fits the pattern."""
    known = [
        (name, layer, reader) for name, layer in model.named_modules() if (reader := readers.find(layer)) is not None
    ]
    if not known:
        raise ValueError(
            f"model: expected attention layers, got none in {type(model).__name__}; what is hooked is "
            f"{', '.join(readers.names)}"
        )
    found = [entry for entry in known if pattern is None or fnmatch.fnmatchcase(entry[0], pattern)]
    if not found:
        names = ", ".join(name for name, _, _ in known[:3])
        raise ValueError(
            f"layers: expected a pattern that fits a name such as {names}, got {pattern!r}, which fits none"
        )
    return found


def _unread(model: nn.Module, readers: Readers) -> tuple[str, ...]:
    """Layers whose class sounds like attention, that cannot be read and neither hold nor are part of one that can."""
    modules = list(model.named_modules())
    known = [f"{name}." for name, layer in modules if readers.find(layer) is not None]

    def apart(name: str) -> bool:
        return not any(other.startswith(f"{name}.") or f"{name}.".startswith(other) for other in known)

    sounds = [(name, type(layer).__name__) for name, layer in modules if name]
    return tuple(f"{name} ({kind})" for name, kind in sounds if re.search("Attention|Attn", kind) and apart(name))


def _owner(model: nn.Module, name: str) -> str:
    """Name of the innermost network around a layer: what makes tokens of images itself."""
    while name:
        name = name.rpartition(".")[0]
        if _embedding(model.get_submodule(name)) is not None:
            break
    return name


def _embedding(network: nn.Module) -> nn.Module | None:
    """What makes tokens of images."""
    found = getattr(network, "patch_embed", None) or getattr(network, "stem", None)
    return found if isinstance(found, nn.Module) else None


def _look_around(network: nn.Module, around: Around, hooks: ExitStack) -> None:
    """Keep track of the images that a network gets."""
    prefix: Any = getattr(network, "num_prefix_tokens", None)
    around.prefix_tokens = prefix if isinstance(prefix, int) else None
    embedding = _embedding(network)
    if embedding is None:
        return

    def see(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].ndim == 4:
            height, width = args[0].shape[-2:]
            grid: Any = getattr(module, "dynamic_feat_size", None)
            around.images, around.grid = len(args[0]), None if grid is None else tuple(grid((height, width)))

    hooks.callback(embedding.register_forward_pre_hook(see).remove)


def _hook(layer: nn.Module, reader: Reader, tally: Tally, around: Around, rows: int | None) -> Any:
    """Look at a layer after each of its calls: other hooks have then had their say about the arguments."""

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if _in_backward():
            return  # gradient checkpointing repeats what was counted
        with torch.no_grad():
            looks = read(reader, module, args, kwargs, around)
            device = looks[0].scene.query.device.type
            with torch.autocast(device, enabled=False):
                found = [_sums(look, rows) for look in looks]
        names = [name for name in found[0][0] if all(name in sums for sums, _ in found)]
        together = {name: torch.cat([sums[name] for sums, _ in found], dim=1) for name in names}
        tally.add(together, torch.cat([worst for _, worst in found]), _kind(looks[0]))

    return layer.register_forward_hook(look, with_kwargs=True)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def _kind(look: Look) -> Kind:
    scene, mechanism = look.scene, look.mechanism
    return Kind(
        mechanism=mechanism.name,
        linear=mechanism.gain is not None,
        biased=look.bias is not None,
        tokens=scene.query.shape[1],
        keys=scene.key.shape[1],
        grid=scene.grid,
    )


def _sums(look: Look, most: int | None) -> tuple[dict[str, Tensor], Tensor]:
    """Sum and number of every number over the rows of one pass, (2, H) each, and the largest error of a row's sum."""
    entries, numbers = _draw(look, most)
    totals: dict[str, Tensor] = {}
    worst = torch.zeros(look.scene.query.shape[2], dtype=torch.float64, device="cpu")
    for group in entries.split(max(1, scenes.MOST_WEIGHTS // _size_of_row(look))):
        part = look.only(group)
        entropy: list[Tensor] = []
        for rows in numbers.split(max(1, scenes.MOST_WEIGHTS // (_size_of_row(look) * len(group)))):
            real = _real(part, rows)[:, None]
            found, error = _numbers(part, rows)
            entropy.append(found["entropy"][0])
            for name, (values, valid) in found.items():
                _gather(totals, name, values, valid & real)
            worst = torch.maximum(worst, error.where(real, 0.0).amax((0, 2)).double().cpu())
        _correlate(totals, part, numbers, torch.cat(entropy, dim=-1))
    return totals, worst


def _size_of_row(look: Look) -> int:
    return look.scene.query.shape[2] * look.scene.key.shape[1]


def _draw(look: Look, most: int | None) -> tuple[Tensor, Tensor]:
    """Entries of the batch and numbers of rows to look at: at most so many rows of an image."""
    (entries, tokens), windows = look.scene.query.shape[:2], look.windows
    count = min(most, windows * tokens) if most is not None else windows * tokens
    # Some rows of some windows: enough of a window for a correlation, enough windows for the whole image.
    in_window = min(tokens, count, max(FEWEST, math.isqrt(count), count // windows))
    generator = torch.Generator("cpu").manual_seed(0)  # the network's own random numbers stay as they are
    kept = torch.randperm(windows, generator=generator, device="cpu")[: count // in_window].sort().values
    rows = torch.randperm(tokens, generator=generator, device="cpu")[:in_window].sort().values
    first = torch.arange(entries // windows, device="cpu")[:, None] * windows
    device = look.scene.query.device
    return (first + kept).flatten().to(device), rows.to(device)


def _real(look: Look, rows: Tensor) -> Tensor:
    """Which rows are not padding, (B, R)."""
    if look.real is not None:
        return look.real[:, rows]
    return torch.ones(len(look.scene.query), len(rows), dtype=torch.bool, device=rows.device)


def _numbers(look: Look, rows: Tensor) -> tuple[dict[str, tuple[Tensor, Tensor]], Tensor]:
    """Numbers of these rows, (B, H, R), each with where it counts, and the errors of their sums."""
    weights, seen = look.weights(rows), look.seen(rows)
    found, keys = measure(weights), seen.sum(-1)[:, None].to(weights.dtype)
    always = torch.ones((), dtype=torch.bool, device=weights.device)
    numbers = {
        "entropy": (found.entropy, always),
        "entropy_share": (found.entropy / keys.log(), keys > 1),
        "effective_keys": (found.entropy.exp(), always),
        "largest_weight": (found.largest_weight, always),
        "negative_share": ((weights < 0).sum(-1) / keys, always),
        "negative_mass": (found.negative_mass, always),
        "absolute_mass": (found.row_sum + 2 * found.negative_mass, always),
    }
    if look.scene.grid is not None:
        numbers |= _numbers_on_grid(look, rows, weights, seen)
    return numbers, (found.row_sum - 1).abs()


def _numbers_on_grid(look: Look, rows: Tensor, weights: Tensor, seen: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Neighbourhood and distance; class tokens have neither, and do not count as keys at a distance."""
    assert look.scene.grid is not None
    first, columns = look.scene.prefix_tokens, look.scene.grid[1]
    place = torch.arange(math.prod(look.scene.grid), device=rows.device)
    place = torch.stack((place // columns, place % columns), dim=-1)
    offset = place[(rows - first).clamp(min=0)][:, None] - place  # (R, M, 2)
    near, way = offset.abs().amax(-1) <= 1, offset.to(weights.dtype).norm(dim=-1)
    patches, sizes = weights[..., first:], weights[..., first:].abs()
    uniform = (near & seen[..., first:]).sum(-1) / seen.sum(-1)
    length = sizes.sum(-1)
    on_grid = rows >= first
    return {
        "neighbourhood": ((patches * near).sum(-1), on_grid),
        "neighbourhood_uniform": (uniform[:, None].expand_as(length), on_grid),
        "distance": ((sizes * way).sum(-1) / length, on_grid & (length > 0)),
    }


def _correlate(totals: dict[str, Tensor], look: Look, rows: Tensor, entropy: Tensor) -> None:
    """Add the correlation of entropy and query norm over the rows of each entry, padding left out."""
    norm = look.scene.query[:, rows].norm(dim=-1).transpose(1, 2)
    real = _real(look, rows)
    for mask in real.unique(dim=0):  # few: windows inside the map, and those at its borders
        if mask.sum() >= FEWEST:
            same = (real == mask).all(-1)
            found = spearman(entropy[same][..., mask], norm[same][..., mask])[..., None]
            _gather(totals, "norm_correlation", found, torch.ones_like(found, dtype=torch.bool))


def _gather(totals: dict[str, Tensor], name: str, values: Tensor, valid: Tensor) -> None:
    """Add the valid ones of some values (B, H, R) to their sum and number."""
    valid = valid.expand_as(values)
    found = torch.stack((values.where(valid, 0.0).sum((0, 2)), valid.sum((0, 2)))).double().cpu()
    totals[name] = totals[name] + found if name in totals else found

"""What a report shows of a generator: samples of its classes, strips between noises, and what guidance does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...train.page import Section, cards, figure, png
from .drawing import between, grid, rows_of
from .samples import noise_of

ROWS, COLUMNS, FRAMES = 10, 8, 9
STRIPS = 4
GUIDANCES = (1.0, 1.5, 2.5, 4.0)

Draw = Callable[[Tensor, Tensor, float | None, bool], Tensor]  # noise, labels, guidance, without chance -> bytes


def samples(draw: Draw, classes: Sequence[str], shape: tuple[int, int, int], seed: int, most: int) -> Tensor:
    """Pictures of some classes, (rows * columns, C, H, W), uint8: each row a class, each column a noise."""
    rows = rows_of(classes, ROWS)
    columns = columns_of(classes, most)
    noise = torch.stack([noise_of(number, shape, seed) for number in range(columns)]).repeat(len(rows), 1, 1, 1)
    return draw(noise, torch.tensor(rows).repeat_interleave(columns), None, False)


def columns_of(classes: Sequence[str], most: int) -> int:
    """Pictures of each class in a grid, no more than are made to be judged."""
    return max(1, min(COLUMNS, most // max(1, min(len(classes), ROWS))))


def sections(
    draw: Draw, classes: Sequence[str], shape: tuple[int, int, int], seed: int, most: int, about: str
) -> list[Section]:
    """Samples, strips, and guidance.

    Args:
        draw: Makes pictures.
        classes: Their names.
        shape: Channels, height and width of what the network makes.
        seed: Of the noise.
        most: Pictures in a grid at most.
        about: What pictures were compared by, for the note.
    """
    rows, columns = rows_of(classes, ROWS), columns_of(classes, most)
    names = ", ".join(classes[row] for row in rows)
    made = samples(draw, classes, shape, seed, most)
    shown = figure(png(grid(made, columns)), f"From above: {names}")
    found = [
        Section("Samples", cards([shown]), f"Each row is a class, each column begins with the same noise. {about}")
    ]
    frames = min(FRAMES, max(2, most))
    ends = [noise_of(number, shape, seed) for number in (0, 1)]
    strips: list[str] = []
    for row in rows[:STRIPS]:
        way = draw(between(ends[0], ends[1], frames), torch.full((frames,), row), None, True)
        strips.append(figure(png(grid(way, frames)), classes[row]))
    found.append(
        Section("From noise to noise", cards(strips), "The first noise becomes the second along their sphere.")
    )
    noise = torch.stack([noise_of(number, shape, seed) for number in range(columns)])
    label = torch.full((columns,), rows[-1])
    guided = [
        figure(png(grid(draw(noise, label, guidance, True), columns)), f"{classes[rows[-1]]}, guidance {guidance:g}")
        for guidance in GUIDANCES
    ]
    found.append(Section("Guidance", cards(guided), "How far the class is exaggerated; the same noises each time."))
    return found

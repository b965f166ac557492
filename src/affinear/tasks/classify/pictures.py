"""What the report of a classifier shows: each class by itself, and the test images that it tells worst."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...train import confused, page
from ...train.page import Section
from ..images.batching import Batching, as_tensor
from ..images.labelled.images import Images
from ..images.labelled.some import chosen

LOOKED_AT = 512  # test images, evenly among all
AT_ONCE = 64
SHOWN = 12
SIDE = 96  # pixels of a picture
MOST_CLASSES = 200  # in the table


def sections(network: nn.Module, images: Images, batching: Batching, device: torch.device) -> list[Section]:
    """The sections of a report.

    Args:
        network: In evaluation mode.
        images: The data set.
        batching: How the network wants images.
        device: Where it is.
    """
    numbers = [number for number, _ in chosen(images.test, LOOKED_AT)]
    if not numbers:
        return []
    chances = torch.cat([_chances(network, images, part, batching, device) for part in _split(numbers)])
    targets = torch.tensor([images.test[number][1] for number in numbers])
    note = f"Of {len(numbers)} test images, evenly among all."
    return [
        _worst(images, numbers, chances, targets, note),
        _classes(images.class_names, chances, targets, note),
        _confusion(images.class_names, chances, targets, note),
    ]


def _confusion(class_names: tuple[str, ...], chances: Tensor, targets: Tensor, note: str) -> Section:
    """Which class is taken for which."""
    count = len(class_names)
    taken = torch.zeros(count, count, dtype=torch.int64)
    taken.index_put_((targets, chances.argmax(1)), torch.ones_like(targets), accumulate=True)
    shown = confused.html(class_names, taken.tolist())
    return Section("What is taken for what", shown, f"Rows are what images show, columns what they are told as. {note}")


def _split(numbers: list[int]) -> list[list[int]]:
    return [numbers[first : first + AT_ONCE] for first in range(0, len(numbers), AT_ONCE)]


def _chances(
    network: nn.Module, images: Images, numbers: list[int], batching: Batching, device: torch.device
) -> Tensor:
    pixels = torch.stack([as_tensor(images.test[number][0], batching) for number in numbers])
    with torch.no_grad():
        return network(pixels.to(device)).float().softmax(1).cpu()


def _worst(images: Images, numbers: list[int], chances: Tensor, targets: Tensor, note: str) -> Section:
    """The images whose own class got the least."""
    own = chances.gather(1, targets[:, None])[:, 0]
    figures: list[str] = []
    for place in own.argsort(stable=True)[:SHOWN].tolist():
        image, label = images.test[numbers[place]]
        guess = int(chances[place].argmax())
        shown = image.copy()
        shown.thumbnail((2 * SIDE, 2 * SIDE))
        said = f"{images.class_names[guess]} {chances[place, guess]:.0%}"
        caption = (
            f"{images.class_names[label]}, told right" if guess == label else f"{images.class_names[label]}, not {said}"
        )
        figures.append(page.figure(page.png(shown), caption, images.test.path(numbers[place]), SIDE))
    return Section("The hardest test images", page.cards(figures), f"Least sure of what they are. {note}")


def _classes(class_names: tuple[str, ...], chances: Tensor, targets: Tensor, note: str) -> Section:
    guesses = chances.argmax(1)
    rows: list[list[str]] = []
    for number, name in enumerate(class_names):
        those = targets == number
        if not those.any() or len(rows) == MOST_CLASSES:
            continue
        right = (guesses[those] == number).float().mean().item()
        wrong = guesses[those & (guesses != number)]
        taken = "" if not len(wrong) else class_names[int(wrong.mode().values)]
        rows.append([name, str(int(those.sum())), f"{right:.1%}".replace("%", " %"), taken])
    table = page.table(["class", "images", "told right", "mostly taken for"], rows)
    return Section("Class by class", f"<details open><summary>{len(rows)} classes</summary>{table}</details>", note)

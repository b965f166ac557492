"""Pictures of a network as its training went on: kept at every evaluation, shown side by side in the report."""

from __future__ import annotations

import base64
from pathlib import Path

from affinear.lens.files import place

from .checkpoint import why
from .faults import SaveError
from .page import Section, cards, figure

FOLDER = "glimpses"
SHOWN = 8  # on the page, evenly among all; the others stay in the folder


def keep(output: Path, step: int, picture: bytes) -> Path:
    """Write the picture of a step, a PNG file, into the folder of a run.

    Raises:
        SaveError: If it could not be written.
    """
    path = output / FOLDER / f"step-{step:09d}.png"
    try:
        path.parent.mkdir(exist_ok=True)
        return place(picture, path, force=True).path
    except OSError as error:
        raise SaveError(f"The picture of step {step} could not be saved to {path}: {why(error)}.") from None


def sections(output: Path, last: int) -> list[Section]:
    """What was kept, by step, up to the last one; nothing if that is fewer than two pictures."""
    found = {int(path.stem.removeprefix("step-")): path for path in sorted((output / FOLDER).glob("step-*.png"))}
    steps = [step for step in sorted(found) if step <= last]
    if len(steps) < 2:
        return []
    spread = sorted({steps[round(number * (len(steps) - 1) / (SHOWN - 1))] for number in range(SHOWN)})
    pictures = [figure(_address(found[step]), f"after step {step:,}") for step in spread]
    return [Section("As training went on", cards(pictures), "The same questions at every evaluation.")]


def _address(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()

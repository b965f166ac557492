"""The learning curves of a run as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .records import EpochRecord

NAME = "curves.png"


def draw(output: Path, epochs: Sequence[EpochRecord]) -> Path:
    """Draw losses, accuracy and learning rate over epochs into `curves.png`.

    Args:
        output: Folder of the run.
        epochs: What was measured.

    Raises:
        SaveError: If the picture could not be written.
    """
    from io import BytesIO

    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6))
    figure.subplots_adjust(left=0.05, right=0.98, bottom=0.14, top=0.9)
    losses, shares, rates = figure.subplots(1, 3)
    numbers = [record.epoch for record in epochs]
    tested = [record for record in epochs if record.top1 is not None]
    losses.plot(numbers, [record.train_loss for record in epochs], marker=".", label="training")
    losses.plot([r.epoch for r in tested], [r.test_loss or 0.0 for r in tested], marker=".", label="test")
    shares.plot([r.epoch for r in tested], [100 * (r.top1 or 0.0) for r in tested], marker=".", label="top-1")
    averaged = [record for record in tested if record.ema_top1 is not None]
    if averaged:
        shares.plot(
            [r.epoch for r in averaged], [100 * (r.ema_top1 or 0.0) for r in averaged], label="averaged weights"
        )
    rates.plot(numbers, [record.lr for record in epochs], marker=".")
    for axes, title in ((losses, "loss"), (shares, "test images told right, %"), (rates, "learning rate")):
        axes.set(title=title, xlabel="epoch")
        axes.grid(alpha=0.3)
    losses.legend()
    shares.legend()
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    return _keep(drawn.getvalue(), output / NAME)


def _keep(content: bytes, path: Path) -> Path:
    from affinear.lens.files import place

    from .checkpoint import why
    from .faults import SaveError

    try:
        return place(content, path, force=True).path
    except OSError as error:
        raise SaveError(f"The curves could not be saved to {path}: {why(error)}.") from None

"""What a run shows of itself, on a terminal and in a file."""

from __future__ import annotations

import io

from rich.console import Console

from affinear.train import Lines, Live, Measure, Outline, Record
from affinear.train.progress import described, spoken

RECORD = Record(1, 5, 1.5, 1e-3, 4.0, 1320.0, {"loss": 1.25, "top1": 0.625, "top5": 0.875}, {"loss": 1.0, "top1": 0.5})
MEASURES = Measure("loss", "test loss", False, ".3f"), Measure("top1", "top-1"), Measure("top5", "top-5")


def show(progress: Lines | Live) -> None:
    progress.begin(Outline("mavit_tiny", 10, 2, 2, measures=MEASURES))
    for step in range(3, 6):
        progress.step(step, 1.5, 64)
    progress.testing()
    progress.stretch(RECORD)
    progress.say("[bold]as it is[/bold]")
    progress.end()


def test_a_file_gets_a_line_per_epoch_and_no_control_characters():
    stream = io.StringIO()
    show(Lines(stream))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "mavit_tiny: 10 steps, 2 of them done"
    assert lines[1].startswith(
        "epoch 1 of 2: loss 1.500, test loss 1.250, top-1 62.5 %, top-5 87.5 %, averaged top-1 50.0 %"
    )
    assert lines[1].endswith(" left")
    assert lines[2] == "[bold]as it is[/bold]"
    assert all(sign.isprintable() for line in lines for sign in line)


def test_a_terminal_gets_a_bar_that_goes_away():
    stream = io.StringIO()
    live = Live(Console(file=stream, force_terminal=True, width=120))
    live.PAUSE = 0.0
    show(live)
    shown = stream.getvalue()
    for part in ("mavit_tiny", "loss 1.500", "images/s", "left", "epoch 1 of 2", "[bold]as it is[/bold]", "testing"):
        assert part in shown
    live.end()  # twice is once


def test_epochs_that_were_not_tested_say_nothing_of_it():
    record = Record(3, 9, 0.5, 1e-4, 1.0, 10.0)
    assert described(record, Outline("a", 9, 0, 9)) == "epoch 3 of 9: loss 0.500, 10 images/s, lr 1.0e-04"
    tokens = Outline("a", 90, 0, 9, unit="tokens", by_steps=True)
    assert described(record, tokens) == "step 9 of 90: loss 0.500, 10 tokens/s, lr 1.0e-04"
    assert spoken(3600 * 30) == "30.0 h"

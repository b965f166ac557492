"""What a run writes down as it goes: numbers of each epoch, JSON lines, TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from affinear.lens.files import place

from .faults import SaveError

LOG = "log.jsonl"
EVENTS = "tensorboard"


@dataclass(frozen=True)
class Record:
    """A stretch of a run in numbers: an epoch, or the steps between two evaluations.

    Attributes:
        epoch: The epoch that its last step belongs to, counted from 1.
        step: Optimizer steps done at its end.
        train_loss: Mean over the stretch, of the loss that was minimised.
        lr: Learning rate of its last step.
        seconds: That training took; evaluation and saving not counted.
        per_second: Units of the task, such as images, in training.
        test: The numbers of the score; None where it was not evaluated.
        averaged: Those of the averaged weights, where there are any.
    """

    epoch: int
    step: int
    train_loss: float
    lr: float
    seconds: float
    per_second: float
    test: Mapping[str, float] | None = None
    averaged: Mapping[str, float] | None = None


class Log:
    """The log of a run, for machines: `log.jsonl`, and TensorBoard's events where that is installed.

    Args:
        folder: Of the run.
        step: Steps done so far; whatever the log has beyond them is cut off, because it will happen again.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.path = folder / LOG
        try:
            _cut(self.path, step)
            self._file = self.path.open("a", encoding="utf-8")
            self._events = _writer(folder / EVENTS, step)
        except OSError as error:
            raise SaveError(f"The log {self.path} could not be opened: {error.strerror or error}.") from None

    def step(self, step: int, **numbers: float) -> None:
        """Numbers of one step."""
        self._write({"kind": "step", "step": step, **numbers})
        self._chart("train", step, numbers)

    def stretch(self, record: Record) -> None:
        """Numbers of an epoch, or of the steps between two evaluations."""
        told = asdict(record)
        self._write({"kind": "epoch", **told})
        averaged = {f"averaged_{name}": value for name, value in (told.pop("averaged") or {}).items()}
        self._chart("test", record.step, {**(told.pop("test") or {}), **averaged})
        self._chart("epoch", record.step, {k: v for k, v in told.items() if k not in ("step", "epoch")})

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            raise SaveError(f"The log {self.path} could not be written: {error.strerror or error}.") from None

    def _chart(self, group: str, step: int, numbers: Mapping[str, float | None]) -> None:
        if self._events is None:
            return
        for name, value in numbers.items():
            if value is not None:
                self._events.add_scalar(f"{group}/{name}", value, step)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's log up to the first that is torn, as a killed run may leave the last."""
    path = folder / LOG
    if not path.is_file():
        return []
    lines: list[dict[str, Any]] = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            break
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            break
        lines.append(line)
    return lines


def _cut(path: Path, step: int) -> None:
    kept = "".join(json.dumps(line) + "\n" for line in read_log(path.parent) if line["step"] <= step)
    place(kept.encode(), path, force=True)


def _writer(folder: Path, step: int) -> Any:
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)

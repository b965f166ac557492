"""Training: from a run to its result, through kills, full disks and bad numbers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import skip_first_batches
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import nn

from ..models.sealing import broken
from ..tasks.classify import network as networks
from ..tasks.classify.data import Images, open_data, ready
from ..tasks.classify.evaluate import Score, score
from . import checkpoint, curves, folder
from .blame import weights_at_fault
from .checkpoint import Position
from .devices import accelerated, device, is_sharded, peak_memory
from .faults import Interrupted, NonFinite, RunError
from .kit import Kit, build
from .ownership import owned
from .progress import Progress
from .recipe import Recipe
from .records import EpochRecord, Log
from .seeding import kept_random_state
from .signals import Wish, wishes
from .state import load_into, snapshot
from .stepping import Fault, Stepper

ASK_EVERY = 10  # steps between two times that many processes ask each other whether to stop


@dataclass(frozen=True)
class Run:
    """A network to be trained.

    Attributes:
        model: Name of the network, any of timm's or ours.
        data: What `open_data` takes: "digits", a folder ...
        output: Folder for all that the run writes.
        recipe: How to train.
        model_args: What the network is made with beside classes, channels and size.
        weights: File of weights to begin with; None for fresh ones.
    """

    model: str
    data: str
    output: Path
    recipe: Recipe
    model_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weights: Path | None = None


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        top1: Share of test images told right by the weights after the last epoch.
        top5: Share whose class is among the first five guesses.
        best_top1: The largest top-1 of any epoch, averaged weights included.
        best_epoch: Where it was reached, counted from 1.
        epochs: Every epoch in numbers.
        parameters: Trained weights.
        images_per_second: In training, in the median epoch: the first may have had to compile.
        peak_memory: Bytes: of the GPU in this run, or else of the whole process so far.
        weights: The file of the best weights.
        last: The file of the last weights.
        skipped: Corrupt images that were passed over.
        skipped_names: What they are called.
    """

    top1: float
    top5: float
    best_top1: float
    best_epoch: int
    epochs: tuple[EpochRecord, ...]
    parameters: int
    images_per_second: float
    peak_memory: int
    weights: Path
    last: Path
    skipped: int
    skipped_names: tuple[str, ...]


def train(
    run: Run,
    *,
    resume: bool = True,
    force: bool = False,
    progress: Progress | None = None,
    images: Images | None = None,
) -> Result:
    """Train a network, or go on where it was interrupted.

    All that is random in a step depends on the recipe's seed, the step and the process, so a run that was killed and
    continued ends, on a CPU, with the same weights to the last bit. A run that is finished is not run again.

    Args:
        run: What to train.
        resume: Whether to continue a run that is in the folder. If not, the folder must not hold one.
        force: Without `resume`, remove a run that is in the folder.
        progress: Who listens; nobody if None.
        images: The data set, if it is open already.

    Raises:
        ValueError: If something about the run is not possible.
        RunError: If it could not begin or had to stop: `OtherRun`, `SaveError`, `NonFinite`, `Interrupted`.
        TooManyCorrupt: If more than one image in a hundred cannot be read.

    Examples:
        >>> import tempfile
        >>> from affinear.train import Run, recipe_for, train
        >>> recipe = recipe_for("inline_deit_tiny", "tiny", epochs=1, batch_size=256, image_size=(16, 16), workers=0)
        >>> small = {"depth": 1, "embed_dim": 32, "num_heads": 2, "patch_size": 4}
        >>> with tempfile.TemporaryDirectory() as output:
        ...     result = train(Run("inline_deit_tiny", "digits", Path(output), recipe, small))
        >>> len(result.epochs), 0 <= result.top1 <= 1
        (1, True)
    """
    images = open_data(run.data) if images is None else images
    recipe = networks.resolve(run.recipe, run.model, run.model_args, images, device())
    with ExitStack() as held, kept_random_state(), accelerated(recipe) as accelerator, wishes() as wish:
        about = _about(run, recipe, images)
        if accelerator.is_main_process:  # which alone writes
            held.enter_context(owned(run.output))
        with accelerator.main_process_first():
            # Others look after the first has found everything in order, and change nothing.
            found = folder.enter(run.output, about, resume=resume, force=force and accelerator.is_main_process)
        start = _start(run) if found is None else None
        kit = build(accelerator, recipe, run.model, run.model_args, images, start, str(run.weights))
        if accelerator.is_main_process and found is None:
            folder.describe(run.output, about, accelerator.device, accelerator.num_processes)
        position = Position() if found is None else load_into(kit, checkpoint.load(found))
        if position.best_epoch:
            checkpoint.check_weights(run.output, checkpoint.BEST, f"the best weights, of epoch {position.best_epoch}")
        listener = progress if progress is not None and accelerator.is_main_process else Progress()
        trainer = _Trainer(run, about, images, kit, position, listener, wish)
        try:
            return trainer.run()
        finally:
            listener.end()
            if accelerator.device.type == "cuda":  # where the next run may need the room
                accelerator.free_memory()


class _Trainer:
    """The loop over epochs and steps, and all that happens between them."""

    def __init__(
        self,
        run: Run,
        about: Mapping[str, Any],
        images: Images,
        kit: Kit,
        position: Position,
        progress: Progress,
        wish: Wish,
    ) -> None:
        self._run, self._about, self._images, self._kit = run, about, images, kit
        self._position, self._progress, self._wish = position, progress, wish
        self._stepper = Stepper(kit)
        self._main = kit.accelerator.is_main_process
        self._log: Log | None = None
        self._rate = 0.0  # of the step that was last

    def run(self) -> Result:
        """Train until the end."""
        kit, at = self._kit, self._position
        if kit.accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(kit.accelerator.device)
        if at.step < kit.steps:
            self._progress.begin(self._run.model, kit.steps, at.step, kit.recipe.epochs)
            if self._main:
                self._log = Log(self._run.output, at.step)
            try:
                for epoch in range(at.step // kit.steps_per_epoch, kit.recipe.epochs):
                    self._epoch(epoch)
            except RuntimeError as error:
                if self._wish.signal is None or isinstance(error, RunError):
                    raise
                raise self._cut_short(self._wish.signal) from None
            finally:
                if self._log is not None:
                    self._log.__exit__(None, None, None)
        if at.step < kit.steps or is_sharded(kit.accelerator) or not self._is_finished():
            self._finish()
        return self._result()

    def _epoch(self, epoch: int) -> None:
        kit = self._kit
        kit.network.train()
        kit.called.train()
        done = self._position.step - epoch * kit.steps_per_epoch
        batches = self._batches(epoch, done)
        began = time.perf_counter()
        for step in range(self._position.step, (epoch + 1) * kit.steps_per_epoch):
            loss = self._step(batches, step)
            at = self._position
            self._position = dataclasses.replace(at, step=step + 1, loss_sum=at.loss_sum + loss)
            if step + 1 < (epoch + 1) * kit.steps_per_epoch:
                self._between(began)
        for _ in batches:  # what does not fill a step; read, so that the loader ends as accelerate expects
            pass
        self._close_epoch(epoch, self._position.seconds + time.perf_counter() - began)
        if epoch + 1 < kit.recipe.epochs:
            self._stop_if(self._asked())

    def _batches(self, epoch: int, done: int) -> Iterator[Any]:
        loader = self._kit.train_batches
        loader.set_epoch(epoch)
        rest = skip_first_batches(loader, done * self._kit.recipe.accumulate) if done else loader
        return ready(rest, self._kit.normalize)

    def _step(self, batches: Iterator[Any], step: int) -> float:
        self._rate = max(group["lr"] for group in self._kit.optimizer.param_groups)
        try:
            loss = self._stepper.step(batches, step)
        except Fault as fault:
            raise self._non_finite(fault, step) from None
        recipe = self._kit.recipe
        self._progress.step(step + 1, loss, recipe.batch_size)
        if self._log is not None and (step + 1) % recipe.log_every == 0:
            self._log.step(step + 1, loss=loss, lr=self._rate)
        return loss

    def _between(self, began: float) -> None:
        """Stop or save between two steps of an epoch, if it is time to."""
        at, every = self._position, self._kit.recipe.save_every
        many = self._kit.accelerator.num_processes > 1
        asked = None if many and at.step % ASK_EVERY else self._asked()
        if asked or (every and at.step % every == 0):
            self._save(dataclasses.replace(at, seconds=at.seconds + time.perf_counter() - began))
        self._stop_if(asked)

    def _asked(self) -> int | None:
        """The signal that asked the run to stop; many processes have to ask together."""
        accelerator = self._kit.accelerator
        if accelerator.num_processes == 1:
            return self._wish.signal
        if self._wish.signal is not None:
            accelerator.set_trigger()
        return (self._wish.signal or signal.SIGTERM) if accelerator.check_trigger() else None

    def _stop_if(self, asked: int | None) -> None:
        if asked:
            name = "Ctrl-C" if asked == signal.SIGINT else "a signal"
            raise Interrupted(
                f"Stopped by {name} after step {self._position.step} of {self._kit.steps}, and saved to "
                f"{self._run.output}. The same command goes on from there.",
                asked,
            )

    def _cut_short(self, number: int) -> Interrupted:
        """For a signal that ended the readers of images too: a step may be half done, so nothing is saved."""
        before = checkpoint.latest(self._run.output)
        left = "nothing was saved yet" if before is None else f"the last checkpoint is {before}"
        return Interrupted(
            f"Stopped by a signal that also ended the readers of images; {left}. The same command goes on from there.",
            number,
        )

    def _close_epoch(self, epoch: int, seconds: float) -> None:
        kit, at = self._kit, self._position
        sums = kit.accelerator.reduce(torch.tensor(at.loss_sum, device=kit.accelerator.device), "mean")
        record = EpochRecord(
            epoch=epoch + 1,
            step=at.step,
            train_loss=float(sums) / kit.steps_per_epoch,  # pyright: ignore[reportArgumentType]
            lr=self._rate,
            seconds=seconds,
            images_per_second=kit.steps_per_epoch * kit.recipe.batch_size / seconds,
        )
        if (epoch + 1) % kit.recipe.eval_every == 0 or epoch + 1 == kit.recipe.epochs:
            record = self._test(record)
        self._position = dataclasses.replace(self._position, epochs=(*at.epochs, record), loss_sum=0.0, seconds=0.0)
        if self._log is not None:
            self._log.epoch(record)
        self._save(self._position)
        self._progress.epoch(record)

    def _test(self, record: EpochRecord) -> EpochRecord:
        kit = self._kit
        self._progress.testing()
        found = self._score(kit.called if is_sharded(kit.accelerator) else kit.network)
        averaged = None if kit.average is None else self._score(kit.average.module)
        self._keep_best(record.epoch, found.top1, kit.network)
        if kit.average is not None and averaged is not None:
            self._keep_best(record.epoch, averaged.top1, kit.average.module)
        return dataclasses.replace(
            record,
            test_loss=found.loss,
            top1=found.top1,
            top5=found.top5,
            ema_top1=None if averaged is None else averaged.top1,
        )

    def _score(self, network: Any) -> Score:
        network.eval()
        batches = ready(self._kit.test_batches, self._kit.normalize)
        return score(network, batches, self._images.class_names, self._kit.accelerator)

    def _keep_best(self, epoch: int, top1: float, network: nn.Module) -> None:
        if top1 > self._position.best:
            self._position = dataclasses.replace(self._position, best=top1, best_epoch=epoch)
            self._export(checkpoint.BEST, network, epoch, top1)

    def _export(self, name: str, network: nn.Module, epoch: int, top1: float | None) -> None:
        tensors = self._tensors(network)
        if self._main:
            about = {**self._about, "epoch": epoch, "top1": top1}
            checkpoint.save_weights(self._run.output / name, tensors, about)

    def _tensors(self, network: nn.Module) -> Mapping[str, torch.Tensor]:
        if is_sharded(self._kit.accelerator):
            return snapshot(self._kit, self._position).weights
        return network.state_dict()

    def _save(self, position: Position) -> None:
        kit = self._kit
        fault = None if is_sharded(kit.accelerator) else weights_at_fault(kit.network)
        if fault is not None:
            raise NonFinite(
                f"The {fault} is not finite after step {position.step}; it was not saved. {self._advice()}", fault, None
            )
        taken = snapshot(kit, dataclasses.replace(position, skipped=self._skipped()))
        if self._main:
            checkpoint.save(self._run.output, taken)
        kit.accelerator.wait_for_everyone()

    def _non_finite(self, fault: Fault, step: int) -> NonFinite:
        rank = self._kit.accelerator.process_index
        path = self._run.output / f"nonfinite-step-{step + 1:09d}{f'-process-{rank}' if rank else ''}.safetensors"
        facts = {"step": str(step + 1), "where": fault.where, "images": "\n".join(self._names(step, fault.part))}
        tensors = {"images": fault.images.detach().cpu().contiguous(), "targets": fault.targets.detach().cpu()}
        kept: Path | None = path
        try:
            save_file(tensors, path, facts)
        except Exception:  # whatever a full disk makes it do: the fault itself is what has to be told
            kept = None
        where = f"The batch is in {kept}." if kept else "The batch could not be saved."
        told = f"Step {step + 1} met a number that is not finite, first in the {fault.where}."
        return NonFinite(f"{told} {where} {self._advice()}", fault.where, kept)

    def _names(self, step: int, part: int) -> list[str]:
        """The images of a part of a step, as far as none of them was corrupt and replaced by another."""
        kit = self._kit
        number = step % kit.steps_per_epoch * kit.recipe.accumulate + part
        draws = next(itertools.islice(iter(kit.train_batches.batch_sampler), number, None))
        return [self._images.train.path(draw.index) for draw in draws]

    def _advice(self) -> str:
        before = checkpoint.latest(self._run.output)
        last = f" The last checkpoint, {before.name}, is from before." if before is not None else ""
        return f"A smaller lr, a longer warm-up, clip_grad, or precision 'no' where it is 'fp16', may help.{last}"

    def _is_finished(self) -> bool:
        output = self._run.output
        return (
            (output / curves.NAME).is_file()
            and (output / checkpoint.LAST).is_file()
            and not broken(output / checkpoint.LAST)
        )

    def _finish(self) -> None:
        self._export(checkpoint.LAST, self._kit.network, self._kit.recipe.epochs, self._position.epochs[-1].top1)
        if self._main:
            curves.draw(self._run.output, self._position.epochs)

    def _skipped(self) -> tuple[tuple[str, int], ...]:
        """Corrupt images that any process met."""
        self._kit.skipped.absorb(gather_object(self._kit.skipped.state()))
        return tuple(self._kit.skipped.state())

    def _result(self) -> Result:
        kit, at, output = self._kit, self._position, self._run.output
        last = at.epochs[-1]
        if last.top1 is None or last.top5 is None:
            raise RunError(f"The last epoch in {output} was not evaluated; its checkpoint is damaged.")
        return Result(
            top1=last.top1,
            top5=last.top5,
            best_top1=at.best,
            best_epoch=at.best_epoch,
            epochs=at.epochs,
            parameters=kit.parameters,
            images_per_second=statistics.median(record.images_per_second for record in at.epochs),
            peak_memory=peak_memory(kit.accelerator.device),
            weights=output / checkpoint.BEST,
            last=output / checkpoint.LAST,
            skipped=len(kit.skipped),
            skipped_names=kit.skipped.names,
        )


def _about(run: Run, recipe: Recipe, images: Images) -> dict[str, Any]:
    """What a run is, for `run.json` and for the weights."""
    try:
        model_args = json.loads(json.dumps(dict(run.model_args)))
    except TypeError as error:
        raise ValueError(f"model_args: expected numbers, names and lists, which a file can hold: {error}") from None
    return {
        "model": run.model,
        "model_args": model_args,
        "data": images.name,
        "train_images": len(images.train),
        "test_images": len(images.test),
        "fingerprint": images.fingerprint,
        "class_names": list(images.class_names),
        "channels": networks.channels_of(run.model_args, images),
        "weights": None if run.weights is None else str(run.weights),
        "recipe": dataclasses.asdict(recipe),
    }


def _start(run: Run) -> Mapping[str, torch.Tensor] | None:
    if run.weights is None:
        return None
    from affinear.models.checkpoints import read

    if not run.weights.is_file():
        raise ValueError(f"weights: expected a file of weights, got {run.weights}, which is none")
    return read(run.weights).tensors

"""Training: from a run to its result, through kills, full disks and bad numbers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import signal
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import gather_object
from safetensors.torch import save_file
from torch import nn

from ..models.sealing import broken
from . import checkpoint, curves, examples, folder, glimpses, longer, report
from .blame import named_tensors, weights_at_fault
from .checkpoint import Position
from .devices import accelerated, device, is_sharded, peak_memory
from .faults import Interrupted, NonFinite, RunError
from .folder import weights_in
from .kit import Kit, build, steps_per_epoch
from .ownership import owned
from .progress import Outline, Progress
from .recipe import Recipe
from .records import Log, Record
from .seeding import kept_random_state, seed_step
from .signals import Wish, wishes
from .starting import made_with
from .state import load_into, share_buffers, snapshot
from .stepping import Fault, Stepper
from .task import Data, Job, Score, Setup, Work

EVALUATION = 2**31  # in place of a part's number, where no part of a step is seeded
ASK_EVERY = 10  # steps between two times that many processes ask each other whether to stop


@dataclass(frozen=True)
class Run:
    """A network to be trained.

    Attributes:
        model: Name of the network, one that the task knows.
        data: What the task opens: a folder, a name ...
        output: Folder for all that the run writes.
        setup: The task, and how to train: what `affinear.tasks.recipe_for` gives.
        model_args: What the network is made with beside what data and settings say.
        weights: Weights to begin with, a file or the folder of a run; None for fresh ones. What they tell of the
            network's making holds, and is not contradicted.
    """

    model: str
    data: str
    output: Path
    setup: Setup
    model_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weights: Path | None = None


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        score: The numbers of the weights after the last step, by name.
        metric: The one of them that decides.
        best: The best value of the metric at any evaluation, averaged weights included.
        best_epoch: Where it was reached, counted from 1.
        best_step: The same in steps.
        records: Every epoch, or stretch between two evaluations, in numbers.
        parameters: Trained weights.
        per_second: Units of the task, such as images, in training, in the median stretch: the first may have had to
            compile.
        peak_memory: Bytes: of the GPU in this run, or else of the whole process so far.
        weights: The file of the best weights.
        last: The file of the last weights.
        skipped: Samples that could not be read and were passed over.
        skipped_names: What they are called.
    """

    score: Mapping[str, float]
    metric: str
    best: float
    best_epoch: int
    best_step: int
    records: tuple[Record, ...]
    parameters: int
    per_second: float
    peak_memory: int
    weights: Path
    last: Path
    skipped: int
    skipped_names: tuple[str, ...]

    @property
    def value(self) -> float:
        """The metric of the weights after the last step."""
        return self.score[self.metric]


def train(
    run: Run,
    *,
    resume: bool = True,
    force: bool = False,
    progress: Progress | None = None,
    data: Data | None = None,
) -> Result:
    """Train a network, or go on where it was interrupted.

    All that is random in a step depends on the recipe's seed, the step and the process, so a run that was killed and
    continued ends, on a CPU, with the same weights to the last bit. A run that is finished is not run again.

    Args:
        run: What to train.
        resume: Whether to continue a run that is in the folder. If not, the folder must not hold one.
        force: Without `resume`, remove a run that is in the folder.
        progress: Who listens; nobody if None.
        data: The data set, if it is open already.

    Raises:
        ValueError: If something about the run is not possible.
        RunError: If it could not begin or had to stop: `OtherRun`, `SaveError`, `NonFinite`, `Interrupted`.
        TooManyCorrupt: If more samples cannot be read than the recipe allows; those that are found quickly are named
            before anything is trained.
    """
    task = run.setup.task
    opened: Data = task.open(run.data, run.setup.settings) if data is None else data
    job = settled(run, opened)
    with ExitStack() as held, kept_random_state(), accelerated(job.recipe) as accelerator, wishes() as wish:
        wish.worth_saving = accelerator.num_processes > 1  # which stop together, between two steps
        about = describe(run, job, opened)
        lengthened = resume and _is_lengthened(run, job, opened)
        free = (*job.recipe.free, *job.settings.free, *(longer.LENGTH if lengthened else ()))
        if accelerator.is_main_process:  # which alone writes
            held.enter_context(owned(run.output))
        with accelerator.main_process_first():
            # Others look after the first has found everything in order, and change nothing.
            found = folder.enter(run.output, about, free, resume=resume, force=force and accelerator.is_main_process)
        start = _start(run) if found is None else None
        kit = build(accelerator, task, job, opened, start, str(run.weights))
        if accelerator.is_main_process and (found is None or lengthened):
            folder.describe(run.output, about, accelerator.device, accelerator.num_processes)
        position = Position() if found is None else load_into(kit, checkpoint.load(found))
        if position.best_epoch:
            checkpoint.check_weights(run.output, checkpoint.BEST, f"the best weights, of epoch {position.best_epoch}")
        listener = progress if progress is not None and accelerator.is_main_process else Progress()
        if found is None:
            kit.work.look_through()
            for name in kit.work.skipped.names:
                listener.say(f"Skipped, because it cannot be read: {name}")
        trainer = _Trainer(run, about, kit, position, listener, wish)
        try:
            return trainer.run()
        finally:
            listener.end()
            if accelerator.device.type == "cuda":  # where the next run may need the room
                accelerator.free_memory()


def settled(run: Run, data: Data) -> Job[Any]:
    """What a run trains, with nothing left open: what machine, data and network decide is decided."""
    made = made_with(run.weights, run.model, run.model_args)
    asked = Job(run.model, made, _on(run.setup.recipe, device()), run.setup.settings)
    return run.setup.task.settle(asked, data)


def _is_lengthened(run: Run, job: Job[Any], data: Data) -> bool:
    """Whether the run in the folder was begun with another length, and goes on with this one to the same bits."""
    before, recipe, found = folder.recipe_of(run.output), job.recipe, checkpoint.latest(run.output)
    if found is None or all(before.get(name) == getattr(recipe, name) for name in longer.LENGTH):
        return False
    batches = len(run.setup.task.work(job, data, torch.device("cpu")).train_loader())
    done = int(found.name.removeprefix("step-"))
    return longer.goes_on(before, recipe, steps_per_epoch(batches, recipe, run.setup.task.samples), done)


def _on(recipe: Recipe, place: torch.device) -> Recipe:
    cuda = place.type == "cuda"
    found: dict[str, Any] = {"precision": "bf16" if cuda else "no", "compile": cuda, "channels_last": cuda}
    return dataclasses.replace(recipe, **{name: v for name, v in found.items() if getattr(recipe, name) is None})


class _Abandoned(Exception):
    """A signal came during an evaluation, which begins anew when the run goes on."""


class _Trainer:
    """The loop over epochs and steps, and all that happens between them."""

    def __init__(
        self,
        run: Run,
        about: Mapping[str, Any],
        kit: Kit,
        position: Position,
        progress: Progress,
        wish: Wish,
    ) -> None:
        self._run, self._about, self._kit = run, about, kit
        self._task, self._work = run.setup.task, kit.work
        self._position, self._progress, self._wish = position, progress, wish
        self._stepper = Stepper(kit)
        self._main = kit.accelerator.is_main_process
        self._log: Log | None = None
        self._rate = 0.0  # of the step that was last
        self._began = 0.0  # when this process began the stretch that is not finished

    @property
    def _outline(self) -> Outline:
        kit, task = self._kit, self._task
        by_steps = by_steps_of(kit.recipe)
        return Outline(self._run.model, kit.steps, self._position.step, kit.epochs, task.unit, task.measures, by_steps)

    def run(self) -> Result:
        """Train until the end."""
        kit, at = self._kit, self._position
        unfinished = at.step < kit.steps or self._is_open()
        if kit.accelerator.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(kit.accelerator.device)
        if unfinished:
            self._progress.begin(self._outline)
            if self._main:
                self._log = Log(self._run.output, at.step)
            try:
                if self._is_open():
                    self._close_what_is_open()
                for epoch in range(at.step // kit.steps_per_epoch, kit.epochs):
                    self._epoch(epoch)
            except RuntimeError as error:
                if self._wish.signal is None or isinstance(error, RunError):
                    raise
                raise self._cut_short(self._wish.signal) from None
            finally:
                if self._log is not None:
                    self._log.__exit__(None, None, None)
        if unfinished or is_sharded(kit.accelerator) or not self._is_finished():
            self._finish()
        return self._result()

    def _epoch(self, epoch: int) -> None:
        """The steps of a pass over the training samples, as far as they are not done yet."""
        kit = self._kit
        first, last = epoch * kit.steps_per_epoch, min((epoch + 1) * kit.steps_per_epoch, kit.steps)
        self._learn()
        batches = self._batches(epoch, self._position.step - first)
        for step in range(self._position.step, last):
            loss = self._step(batches, step)
            at = self._position
            self._position = dataclasses.replace(at, step=step + 1, loss_sum=at.loss_sum + loss)
            if not self._is_close(step + 1):
                self._between()
            elif step + 1 < last:  # between two steps of an epoch, so the loader goes on afterwards
                self._close(epoch)
                self._learn()
                self._stop_if(self._asked())
        if last == first + kit.steps_per_epoch:
            for _ in batches:  # what does not fill a step; read, so that the loader ends as accelerate expects
                pass
        if self._is_close(last):
            self._close(epoch)
            if last < kit.steps:
                self._stop_if(self._asked())
        else:
            self._position = dataclasses.replace(self._position, seconds=self._seconds())

    def _learn(self) -> None:
        self._kit.network.train()
        self._kit.called.train()
        for module in self._kit.still:
            module.eval()
        self._began = time.perf_counter()

    def _is_close(self, step: int) -> bool:
        """Whether a stretch ends after so many steps: an epoch, or the steps between two evaluations."""
        kit = self._kit
        every = kit.recipe.eval_steps or kit.steps_per_epoch
        return step == kit.steps or step % every == 0

    def _is_open(self) -> bool:
        """Whether a stretch is through that was not summed up, as a signal came while it was evaluated."""
        at = self._position
        return at.step > 0 and self._is_close(at.step) and (not at.records or at.records[-1].step < at.step)

    def _close_what_is_open(self) -> None:
        kit, step = self._kit, self._position.step
        kit.schedule.step_update(step - 1)
        self._rate = max(group["lr"] for group in kit.optimizer.param_groups)
        kit.schedule.step_update(step)
        self._wish.worth_saving = True
        self._began = time.perf_counter()
        self._close((step - 1) // kit.steps_per_epoch)
        if step < kit.steps:
            self._stop_if(self._asked())

    def _is_evaluated(self, step: int) -> bool:
        kit = self._kit
        if step == kit.steps or kit.recipe.eval_steps:
            return True
        return step // kit.steps_per_epoch % kit.recipe.eval_every == 0

    def _batches(self, epoch: int, done: int) -> Iterator[Any]:
        loader = self._kit.train_batches
        loader.set_epoch(epoch)
        rest = skip_first_batches(loader, done * self._kit.recipe.accumulate) if done else loader
        return ready(rest, self._work)

    def _step(self, batches: Iterator[Any], step: int) -> float:
        self._rate = max(group["lr"] for group in self._kit.optimizer.param_groups)
        try:
            loss = self._stepper.step(batches, step)
        except Fault as fault:
            raise self._non_finite(fault, step) from None
        self._wish.worth_saving = True
        self._progress.step(step + 1, loss, self._work.per_step)
        if self._log is not None and (step + 1) % self._kit.recipe.log_every == 0:
            self._log.step(step + 1, loss=loss, lr=self._rate)
        return loss

    def _seconds(self) -> float:
        """What the stretch took so far, in this process and before."""
        return self._position.seconds + time.perf_counter() - self._began

    def _between(self) -> None:
        """Stop or save between two steps of a stretch, if it is time to."""
        at, every = self._position, self._kit.recipe.save_every
        many = self._kit.accelerator.num_processes > 1
        asked = None if many and at.step % ASK_EVERY else self._asked()
        if asked or (every and at.step % every == 0):
            self._save(dataclasses.replace(at, seconds=self._seconds()))
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
        """For a signal that ended the readers of samples too: a step may be half done, so nothing is saved."""
        before = checkpoint.latest(self._run.output)
        left = "nothing was saved yet" if before is None else f"the last checkpoint is {before}"
        return Interrupted(
            f"Stopped by a signal that also ended the readers of samples; {left}. The same command goes on from there.",
            number,
        )

    def _close(self, epoch: int) -> None:
        """Sum a stretch up: evaluate it if it is time to, write it down, save."""
        kit, at = self._kit, self._position
        seconds, before = self._seconds(), at.records[-1].step if at.records else 0
        sums = kit.accelerator.reduce(torch.tensor(at.loss_sum, device=kit.accelerator.device), "mean")
        record = Record(
            epoch=epoch + 1,
            step=at.step,
            train_loss=float(sums) / (at.step - before),  # pyright: ignore[reportArgumentType]
            lr=self._rate,
            seconds=seconds,
            per_second=(at.step - before) * self._work.per_step / seconds,
        )
        if self._is_evaluated(at.step):
            try:
                record = self._test(record)
            except _Abandoned:
                self._save(dataclasses.replace(at, seconds=seconds))
                self._stop_if(self._wish.signal)
        self._position = dataclasses.replace(self._position, records=(*at.records, record), loss_sum=0.0, seconds=0.0)
        if self._log is not None:
            self._log.stretch(record)
        self._save(self._position)
        self._progress.stretch(record)

    def _test(self, record: Record) -> Record:
        kit = self._kit
        self._progress.testing()
        averaged = None if kit.average is None else self._score(kit.average.module)
        if averaged is not None and self._task.judged == "averaged":
            found, averaged, judged = averaged, None, self._averaged()
        else:
            found, judged = self._score(kit.called if is_sharded(kit.accelerator) else kit.network), kit.network
        self._keep_best(record, found, judged)
        self._glimpse(record, judged)
        if averaged is not None:
            self._keep_best(record, averaged, self._averaged())
        return dataclasses.replace(
            record, test=dict(found.numbers), averaged=None if averaged is None else dict(averaged.numbers)
        )

    def _glimpse(self, record: Record, network: nn.Module) -> None:
        """Keep a picture of what is judged, where the task has one."""
        if not self._main or is_sharded(self._kit.accelerator):
            return
        with kept_random_state(), torch.no_grad():
            seed_step(self._kit.recipe.seed, 0, EVALUATION, 0, self._kit.accelerator.device)
            picture = self._work.glimpse(self._alone(network).eval())
        if picture is not None:
            glimpses.keep(self._run.output, record.step, picture)

    def _averaged(self) -> nn.Module:
        assert self._kit.average is not None
        return self._kit.average.module

    def _score(self, network: nn.Module) -> Score:
        network.eval()
        if self._kit.accelerator.num_processes > 1 and not is_sharded(self._kit.accelerator):
            share_buffers(network)  # what is saved is the first process's, so that is what all judge
        counting = self._kit.context.counting(self._kit.accelerator)
        return scored(self._work, network, self._unless_asked(self._kit.test_batches), counting)

    def _unless_asked(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Batches until a signal comes; many processes, which would have to stop together, take them all."""
        alone = self._kit.accelerator.num_processes == 1
        for batch in batches:
            if alone and self._wish.signal is not None:
                raise _Abandoned
            yield batch

    def _keep_best(self, record: Record, found: Score, network: nn.Module) -> None:
        value = found[self._task.metric.name]
        if self._task.metric.better(value, self._position.best):
            self._position = dataclasses.replace(
                self._position, best=value, best_epoch=record.epoch, best_step=record.step
            )
            self._export(checkpoint.BEST, network, record, value)

    def _export(self, name: str, network: nn.Module, record: Record, value: float | None) -> None:
        tensors = self._tensors(network)
        if self._main:
            about = {**self._about, "epoch": record.epoch, "step": record.step, self._task.metric.name: value}
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
        facts = {"step": str(step + 1), "where": fault.where, "samples": "\n".join(self._names(step, fault.part))}
        held = named_tensors(fault.batch)
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in held.items()}
        kept: Path | None = path
        try:
            save_file(tensors, path, facts)
        except Exception:  # whatever a full disk makes it do: the fault itself is what has to be told
            kept = None
        where = f"The batch is in {kept}." if kept else "The batch could not be saved."
        told = f"Step {step + 1} met a number that is not finite, first in the {fault.where}."
        return NonFinite(f"{told} {where} {self._advice()}", fault.where, kept)

    def _names(self, step: int, part: int) -> list[str]:
        """The samples of a part of a step, as far as none of them was corrupt and replaced by another."""
        kit = self._kit
        number = step % kit.steps_per_epoch * kit.recipe.accumulate + part
        draws = next(itertools.islice(iter(kit.train_batches.batch_sampler), number, None))
        return self._work.names([draw.index for draw in draws])

    def _advice(self) -> str:
        before = checkpoint.latest(self._run.output)
        last = f" The last checkpoint, {before.name}, is from before." if before is not None else ""
        return f"A smaller lr, a longer warm-up, clip_grad, or precision 'no' where it is 'fp16', may help.{last}"

    def _is_finished(self) -> bool:
        drawn = (curves.NAME,) if curves.can_draw() else ()
        output, names = self._run.output, (checkpoint.LAST, *drawn, folder.REPORT)
        return all((output / name).is_file() for name in names) and not broken(output / checkpoint.LAST)

    def _finish(self) -> None:
        kit, records = self._kit, self._position.records
        value = (records[-1].test or {}).get(self._task.metric.name)
        self._export(checkpoint.LAST, kit.network, records[-1], value)
        if self._main:
            if curves.can_draw():
                curves.draw(self._run.output, records, self._task.metric, by_steps_of(kit.recipe))
            examples.keep(self._run.output, self._work.examples())
            shown = [] if is_sharded(kit.accelerator) else self._shown()
            shown += glimpses.sections(self._run.output, self._position.step)
            report.write(self._run.output, self._task, self._about, self._outline, self._position, shown)

    def _shown(self) -> list[report.Section]:
        """What the task shows, of the weights that were judged the better ones in the end."""
        last, metric = self._position.records[-1], self._task.metric
        network = self._kit.network
        if self._kit.average is not None:
            # Where averaged weights are judged alone, their numbers are all there are.
            averaged = last.averaged is None or metric.better(
                last.averaged[metric.name], (last.test or {})[metric.name]
            )
            network = self._averaged() if averaged else network
        with kept_random_state(), torch.no_grad():
            return self._work.report(self._alone(network).eval())

    def _alone(self, network: nn.Module) -> nn.Module:
        """A network that one process can ask: one that shares its images would wait for the others."""
        if self._kit.context.size == 1:
            return network
        plain = self._task.network(self._work.job)
        plain.load_state_dict(network.state_dict())
        return plain.to(self._kit.accelerator.device)

    def _skipped(self) -> tuple[tuple[str, int], ...]:
        """Samples that any process could not read."""
        self._work.skipped.absorb(gather_object(self._work.skipped.state()))
        return tuple(self._work.skipped.state())

    def _result(self) -> Result:
        kit, at, output = self._kit, self._position, self._run.output
        last = at.records[-1]
        if last.test is None or at.best is None:
            raise RunError(f"The end of the run in {output} was not evaluated; its checkpoint is damaged.")
        return Result(
            score=last.test,
            metric=self._task.metric.name,
            best=at.best,
            best_epoch=at.best_epoch,
            best_step=at.best_step,
            records=at.records,
            parameters=kit.parameters,
            per_second=statistics.median(record.per_second for record in at.records),
            peak_memory=peak_memory(kit.accelerator.device),
            weights=output / checkpoint.BEST,
            last=output / checkpoint.LAST,
            skipped=len(self._work.skipped),
            skipped_names=self._work.skipped.names,
        )


def scored(work: Work[Any, Any], network: nn.Module, batches: Iterable[Any], accelerator: Accelerator) -> Score:
    """How a network in evaluation mode does; what a task draws at random is the same each time."""
    with kept_random_state():
        seed_step(work.job.recipe.seed, 0, EVALUATION, accelerator.process_index, accelerator.device)
        return work.score(network, ready(batches, work), accelerator)


def ready(batches: Iterable[Any], work: Work[Any, Any]) -> Iterator[Any]:
    """Batches of a loader as the network wants them."""
    return map(work.ready, batches)


def by_steps_of(recipe: Recipe) -> bool:
    """Whether a run is told by steps, and not by epochs."""
    return recipe.eval_steps is not None


def describe(run: Run, job: Job[Any], data: Data) -> dict[str, Any]:
    """What a run is, for `run.json` and for the weights."""
    try:
        model_args = json.loads(json.dumps(dict(job.model_args)))
    except TypeError as error:
        raise ValueError(f"model_args: expected numbers, names and lists, which a file can hold: {error}") from None
    return {
        "task": run.setup.task.name,
        "model": run.model,
        "model_args": model_args,
        "data": data.name,
        "fingerprint": data.fingerprint,
        "train_samples": data.sizes[0],
        "test_samples": data.sizes[1],
        "weights": None if run.weights is None else str(run.weights),
        "recipe": job.recipe.as_dict(),
        "settings": job.settings.as_dict(),
        "facts": dict(job.facts),
    }


def _start(run: Run) -> Mapping[str, torch.Tensor] | None:
    if run.weights is None:
        return None
    from affinear.models.checkpoints import read

    try:
        return read(weights_in(run.weights)).tensors
    except ValueError as error:
        raise ValueError(f"weights: {error}") from None

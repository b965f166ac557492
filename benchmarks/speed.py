"""Every bar of speed in one run on a GPU: networks beside the released one, passes beside cuDNN, kernels beside rivals.

    PYTHONPATH=src:benchmarks python benchmarks/speed.py --out speed.json
    PYTHONPATH=src:benchmarks python benchmarks/speed.py --only widths causal --out speed.json
    PYTHONPATH=src:benchmarks python benchmarks/speed.py --kind detect_jobs speed_jobs --wait free --seconds 75 \
        --only "pyramid twin_tiny c" "pyramid mavit_tiny c" "twin_|mavit_|nalaformer_" pyramid --out speed.json

Compiling takes minutes and most of it is done by one core, so every job gets ready in a process of its own, all at
once or as many as `--crowd` says, networks before kernels; then they are timed one after the other, alone on the GPU.
What `--only` names first is ready first and timed first. With `--wait` they get ready while something else uses the GPU
and the cores, behind which they step back, and are timed once the file is there. What is not ready then is halted
while others are timed, and goes on where time is left. The report is written after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from speed_bars import verdicts

THREADS = 2  # of one job's compiler
NETWORKS = "twin_", "mavit_", "nalaformer_"  # how names of jobs begin that take longest to get ready


@dataclass
class Worker:
    """A process that gets one job ready, and then waits to be told to measure.

    Attributes:
        name: Of the job.
        process: It leads a group, with all that it starts.
        said: Its lines; None when it has ended.
        ready: What it said when it was.
        ended: Whether it has, before it was ready.
        listener: What hears it.
    """

    name: str
    process: subprocess.Popen[str]
    said: queue.Queue[str | None] = field(default_factory=queue.Queue[str | None])
    ready: dict[str, Any] | None = None
    ended: bool = False
    listener: threading.Thread | None = None

    def look(self) -> None:
        """Take note of what it has said, without waiting, until it is ready."""
        while not (self.ready or self.ended or self.said.empty()):
            line = self.said.get()
            if line is None:
                self.ended = True
            elif line.startswith("{"):
                self.ready = json.loads(line)

    @property
    def is_busy(self) -> bool:
        """Whether it is getting ready."""
        return not (self.ready or self.ended)

    def signal(self, number: signal.Signals) -> None:
        """Halt it, let it go on, or end it, with all that it has started."""
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:  # it leads no group yet, or has ended
            self.process.send_signal(number)

    def end(self) -> None:
        """End it, and let go of its pipes."""
        self.signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # of a word that it never read
            self.process.stdin.close()
        assert self.listener is not None
        self.listener.join()

    def hear(self, until: float) -> dict[str, Any] | None:
        """What it says next; None where it has ended, or says nothing until then."""
        while True:
            try:  # what was said in time is heard, however late it is now
                line = self.said.get(timeout=max(until - time.monotonic(), 0))
            except queue.Empty:
                return None
            if line is None:
                return None
            if line.startswith("{"):
                return json.loads(line)

    def tell(self, word: str) -> None:
        """One word."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(word + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass


def patience(name: str, kind: str, behind: bool) -> int:
    """How far a process steps back for others: what takes longest gets ready first, what may be left out last."""
    return (15 if kind == "tune_jobs" else 0 if name.startswith(NETWORKS) else 5) + 10 * behind


def begin(name: str, kind: str, behind: bool) -> Worker:
    """Start the process of a job."""
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": str(THREADS), "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, __file__, "--worker", name, "--kind", kind]
    process = subprocess.Popen(
        ["nice", "-n", str(patience(name, kind, behind)), *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **settings},
    )  # fmt: skip
    worker = Worker(name, process)
    assert process.stdout is not None
    worker.listener = threading.Thread(target=listen, args=(worker, process.stdout), daemon=True)
    worker.listener.start()
    return worker


def listen(worker: Worker, stream: IO[str]) -> None:
    """Pass on what a process says; what is not for us goes to the log."""
    with stream:
        for line in stream:
            if not line.startswith("{"):
                print(f"[{worker.name}] {line.rstrip()}", file=sys.stderr, flush=True)
            worker.said.put(line)
    worker.said.put(None)


def work(name: str, kind: str) -> None:
    """Be the process of a job: get ready, say so, wait, measure, and say every row."""
    import importlib

    os.setpgrp()
    jobs = importlib.import_module(kind).jobs()
    begun = time.monotonic()
    measure = jobs[name]()
    print(json.dumps({"ready": name, "seconds": time.monotonic() - begun}), flush=True)
    if sys.stdin.readline().strip() != "go":
        return
    for row in measure():
        print(json.dumps({"job": name, **row}), flush=True)
    print(json.dumps({"done": name}), flush=True)


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("affinear-bench-speed.json"))
    parser.add_argument("--only", nargs="+", default=[""], help="jobs whose names begin so, or so|so, in this order")
    parser.add_argument("--skip", nargs="+", default=[], help="jobs whose names begin so are left out")
    parser.add_argument("--ready", type=float, default=300, help="seconds after which a job that is not ready is left")
    parser.add_argument("--crowd", type=int, help="jobs that get ready at a time; all unless told otherwise")
    parser.add_argument("--wait", type=Path, help="measure when this file is there, and get ready behind all others")
    parser.add_argument("--seconds", type=float, default=600, help="of measuring, at most")
    parser.add_argument("--kind", nargs="+", default=["speed_jobs"], help="modules of the jobs")
    parser.add_argument("--list", action="store_true", help="print the names of the jobs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker, arguments.kind[0])
    import importlib

    jobs = {name: kind for kind in arguments.kind for name in importlib.import_module(kind).jobs()}
    chosen = named(jobs, arguments.only, arguments.skip)
    if arguments.list:
        print("\n".join(chosen))
        return
    run(chosen, arguments)


def run(chosen: dict[str, str], arguments: argparse.Namespace) -> None:
    """Start all jobs, wait until they are ready, and let them measure in turn."""
    import torch

    from affinear.bench import machine

    report: dict[str, Any] = {
        "machine": machine.describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "rows": [],
        "jobs": {},
    }

    def keep() -> None:
        report["bars"] = [str(verdict) for verdict in verdicts(report)]
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        draft = arguments.out.with_suffix(".part")
        draft.write_text(json.dumps(report, indent=1))
        draft.rename(arguments.out)

    def time_it(worker: Worker, until: float) -> None:
        worker.tell("go")
        while (row := worker.hear(min(until, time.monotonic() + 120))) is not None and "done" not in row:
            report["rows"].append(row)
            keep()
            print(short(row), flush=True)
        print(f"{time.monotonic() - start:6.1f} s  {worker.name} measured", flush=True)

    start = time.monotonic()
    with ended([]) as workers:
        get_ready(chosen, workers, arguments, start)
        report["jobs"] = dict.fromkeys(chosen, "not ready")
        until = time.monotonic() + arguments.seconds
        patient = until if arguments.wait else time.monotonic()
        for worker in in_turn(workers, patient):
            time_it(worker, until)
            worker.end()
            if time.monotonic() > until:
                break
        report["jobs"] |= {worker.name: worker.ready for worker in workers if worker.ready}
    report["seconds"] = time.monotonic() - start
    keep()
    print(*report["bars"], sep="\n", flush=True)


@contextmanager
def ended(workers: list[Worker]) -> Generator[list[Worker]]:
    """Workers that are ended at the end, whatever happens."""
    try:
        yield workers
    finally:
        for worker in workers:
            worker.end()


def get_ready(chosen: Mapping[str, str], workers: list[Worker], arguments: argparse.Namespace, start: float) -> None:
    """Start jobs, so many at a time, until it is time to measure."""
    waiting, told = list(chosen.items()), set[str]()
    while True:
        for worker in workers:
            worker.look()
            if not worker.is_busy and worker.name not in told:
                told.add(worker.name)
                print(f"{time.monotonic() - start:6.1f} s  {worker.name}: {worker.ready or 'ended'}", flush=True)
        busy = sum(worker.is_busy for worker in workers)
        while waiting and (arguments.crowd is None or busy < arguments.crowd):
            workers.append(begin(*waiting.pop(0), behind=arguments.wait is not None))
            busy += 1
        all_are_done = not (busy or waiting) or time.monotonic() > start + arguments.ready
        if arguments.wait.exists() if arguments.wait else all_are_done:
            return
        time.sleep(0.1)


def in_turn(workers: Sequence[Worker], until: float) -> Iterator[Worker]:
    """Those that are ready, the first first; the others halt meanwhile, and go on when nobody is left, until then."""
    measured = set[str]()
    while True:
        for worker in workers:
            worker.look()
        ready = [worker for worker in workers if worker.ready and worker.name not in measured]
        busy = [worker for worker in workers if worker.is_busy]
        if ready:
            for worker in busy:
                worker.signal(signal.SIGSTOP)
            measured.add(ready[0].name)
            yield ready[0]
        elif busy and time.monotonic() < until:
            for worker in busy:
                worker.signal(signal.SIGCONT)
            time.sleep(0.1)
        else:
            return


def named(jobs: Mapping[str, str], only: Sequence[str], skip: Sequence[str]) -> dict[str, str]:
    """Jobs whose names begin as is asked for, in the order in which that is asked."""
    places = {
        name: [place for place, some in enumerate(only) if name.startswith(tuple(some.split("|")))] for name in jobs
    }
    kept = [name for name in jobs if places[name] and not name.startswith(tuple(skip))]
    return {name: jobs[name] for name in sorted(kept, key=lambda name: places[name][0])}


def short(row: dict[str, Any]) -> str:
    """One row in one line."""
    left = {key: value for key, value in row.items() if key not in ("job", "kernels")}
    parts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in left.values()]
    return "  ".join(parts)


if __name__ == "__main__":
    main()

"""Every bar of speed in one run on a GPU: networks beside the released one, passes beside cuDNN, kernels beside rivals.

    PYTHONPATH=src:benchmarks python benchmarks/speed.py --out speed.json
    PYTHONPATH=src:benchmarks python benchmarks/speed.py --only widths causal --out speed.json
    PYTHONPATH=src:benchmarks python benchmarks/speed.py --kind detect_jobs speed_jobs --wait free --ready 300 \
        --only "mavit_tiny|twin_tiny" pyramid --share pyramid "mavit_tiny inf" "twin_tiny inf" --out speed.json

Compiling takes minutes and most of it is done by one core, so every job gets ready in a process of its own, all at
once or as many as `--crowd` says, networks before kernels; then they are timed one after the other, alone on the GPU.
What `--only` names first is ready first and timed first. Jobs that `--share` names together get ready in one process,
one after the other, which spares cores and memory; so does the profile of a job with the job itself. With `--wait` they
get ready while something else uses the GPU and the cores, behind which they step back, and are timed once the file is
there. What is not ready then is halted while others are timed, and goes on where time is left. The report is written
after every row.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from speed_bars import verdicts

THREADS = 2  # of one process's compiler
MORE = "more"  # tells a process to get another job ready
Measure = Callable[[], Iterator[dict[str, Any]]]
PROFILE = "profile "  # how names of jobs begin that look closer at the job named next
NETWORKS = "twin_", "mavit_", "nalaformer_", "pyramid "  # how names of jobs begin that take longest to get ready


@dataclass
class Worker:
    """A process that gets some jobs ready, one after the other, and then waits to be told which to measure.

    Attributes:
        names: Of the jobs.
        process: It leads a group, with all that it starts.
        said: Its lines; None when it has ended.
        ready: What it said of each job that was.
        left: Jobs that it has put off, since they would not have been ready in time.
        is_busy: Whether it is getting jobs ready.
        listener: What hears it.
    """

    names: Sequence[str]
    process: subprocess.Popen[str]
    said: queue.Queue[str | None] = field(default_factory=queue.Queue[str | None])
    ready: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    left: list[str] = field(default_factory=list[str])
    is_busy: bool = True
    listener: threading.Thread | None = None

    def look(self) -> None:
        """Take note of what it has said, without waiting, until it waits itself."""
        while self.is_busy and not self.said.empty():
            line = self.said.get()
            if line is None:
                self.is_busy = False
                self.ready.clear()  # nobody is there to measure them
            elif line.startswith("{"):
                told = json.loads(line)
                if "ready" in told:
                    self.ready[told["ready"]] = told
                else:
                    self.is_busy, self.left = False, told["left"]

    def go_on(self) -> None:
        """Get one more job ready of those that were put off."""
        self.is_busy, self.left = True, []
        self.tell(MORE)

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


def begin(jobs: Mapping[str, str], arguments: argparse.Namespace, start: float) -> Worker:
    """Start the process of some jobs, each with its kind."""
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": str(THREADS), "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    behind = arguments.wait is not None
    until = {"wait": str(arguments.wait), "seconds": start + arguments.ready - time.monotonic()} if behind else None
    command = [sys.executable, __file__, "--worker", json.dumps({"jobs": jobs, "until": until})]
    process = subprocess.Popen(
        ["nice", "-n", str(patience(*next(iter(jobs.items())), behind)), *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **settings},
    )  # fmt: skip
    worker = Worker(list(jobs), process)
    assert process.stdout is not None
    worker.listener = threading.Thread(target=listen, args=(worker, process.stdout), daemon=True)
    worker.listener.start()
    return worker


def listen(worker: Worker, stream: IO[str]) -> None:
    """Pass on what a process says; what is not for us goes to the log."""
    with stream:
        for line in stream:
            if not line.startswith("{"):
                print(f"[{worker.names[0]}] {line.rstrip()}", file=sys.stderr, flush=True)
            worker.said.put(line)
    worker.said.put(None)


def work(jobs: Mapping[str, str], until: Mapping[str, Any] | None) -> None:
    """Be the process of some jobs: get them ready and say so, then measure what is asked for, and say every row."""
    os.setpgrp()
    kinds = {kind: importlib.import_module(kind).jobs() for kind in jobs.values()}
    left = {name: kinds[kind][name] for name, kind in jobs.items()}
    measures: dict[str, Measure] = {}

    def prepare(until: Mapping[str, Any] | None, most: int) -> None:
        for name, seconds in prepared(left, until, measures, most):
            print(json.dumps({"ready": name, "seconds": seconds}), flush=True)
        print(json.dumps({"left": list(left)}), flush=True)

    prepare(until, len(left))
    for name in map(str.strip, sys.stdin):
        if name == MORE:
            prepare(None, 1)
            continue
        try:
            for row in measures.pop(name)():
                print(json.dumps({"job": name, **row}), flush=True)
        except Exception:  # the other jobs of this process are not to be lost with it
            traceback.print_exc(file=sys.stdout)
        print(json.dumps({"done": name}), flush=True)


def prepared(
    left: dict[str, Callable[[], Measure]], until: Mapping[str, Any] | None, measures: dict[str, Measure], most: int
) -> Iterator[tuple[str, float]]:
    """Get the next jobs ready, none that could not be so in time where that is told; the name of each, its seconds."""
    start, longest = time.monotonic(), 0.0
    for name in list(left)[:most]:
        if until and measures and (Path(until["wait"]).exists() or passed(start) + longest > until["seconds"]):
            return
        begun = time.monotonic()
        try:
            measures[name] = left.pop(name)()
        except Exception:
            traceback.print_exc(file=sys.stdout)
            continue
        longest = max(longest, passed(begun))
        yield name, passed(begun)


def passed(since: float) -> float:
    """Seconds since then."""
    return time.monotonic() - since


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("affinear-bench-speed.json"))
    parser.add_argument("--only", nargs="+", default=[""], help="jobs whose names begin so, or so|so, in this order")
    parser.add_argument("--skip", nargs="+", default=[], help="jobs whose names begin so are left out")
    parser.add_argument("--share", nargs="+", default=[], help="jobs whose names begin so, or so|so, share a process")
    parser.add_argument("--ready", type=float, default=300, help="seconds after which a job that is not ready is left")
    parser.add_argument("--crowd", type=int, help="processes that get ready at a time; all unless told otherwise")
    parser.add_argument("--wait", type=Path, help="measure when this file is there, and get ready behind all others")
    parser.add_argument("--seconds", type=float, default=600, help="of measuring, at most")
    parser.add_argument("--kind", nargs="+", default=["speed_jobs"], help="modules of the jobs")
    parser.add_argument("--list", action="store_true", help="print the names of the jobs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(**json.loads(arguments.worker))
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

    def time_it(worker: Worker, name: str, until: float) -> None:
        worker.tell(name)
        while (row := worker.hear(min(until, time.monotonic() + 120))) and row.get("done") != name:
            if "job" not in row:  # the end of one that took too long
                continue
            report["rows"].append(row)
            keep()
            print(short(row), flush=True)
        print(f"{passed(start):6.1f} s  {name} measured", flush=True)

    start = time.monotonic()
    with ended([]) as workers:
        get_ready(shared(chosen, arguments.share), workers, arguments, start)
        said: dict[str, Any] = dict.fromkeys(chosen, "not ready")
        report["jobs"] = said
        until = time.monotonic() + arguments.seconds
        for worker, name in in_turn(workers, list(chosen), until if arguments.wait else time.monotonic()):
            said[name] = worker.ready[name]
            time_it(worker, name, until)
            if time.monotonic() > until:
                break
        for worker in workers:
            said |= worker.ready
    report["seconds"] = passed(start)
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


def get_ready(
    groups: Sequence[Mapping[str, str]], workers: list[Worker], arguments: argparse.Namespace, start: float
) -> None:
    """Start processes, so many at a time, until it is time to measure."""
    waiting, told = list(groups), set[str]()
    while True:
        for worker in workers:
            worker.look()
            for name in worker.ready.keys() - told:
                told.add(name)
                print(f"{passed(start):6.1f} s  {worker.ready[name]}", flush=True)
        busy = sum(worker.is_busy for worker in workers)
        while waiting and (arguments.crowd is None or busy < arguments.crowd):
            workers.append(begin(waiting.pop(0), arguments, start))
            busy += 1
        all_are_done = not (busy or waiting) or passed(start) > arguments.ready
        if arguments.wait.exists() if arguments.wait else all_are_done:
            return
        time.sleep(0.1)


def in_turn(workers: Sequence[Worker], order: Sequence[str], until: float) -> Iterator[tuple[Worker, str]]:
    """Jobs that are ready, in order; busy processes halt meanwhile, and go on when none is left to measure, until then.

    So do those that have put jobs off, one job at a time. Who has nothing left to measure is ended, so that others have
    its memory.
    """
    left = list(order)
    while True:
        for worker in workers:
            worker.look()
        found = [(worker, name) for name in left for worker in workers if name in worker.ready and not worker.is_busy]
        busy = [worker for worker in workers if worker.is_busy]
        if found:
            for worker in busy:
                worker.signal(signal.SIGSTOP)
            worker, name = found[0]
            left.remove(name)
            yield worker, name
            if not (worker.left or worker.ready.keys() & set(left)):
                worker.end()
        elif time.monotonic() < until and (busy or any(worker.left for worker in workers)):
            for worker in busy:
                worker.signal(signal.SIGCONT)
            for worker in workers:
                if worker.left:
                    worker.go_on()
            time.sleep(0.1)
        else:
            return


def shared(jobs: Mapping[str, str], share: Sequence[str]) -> list[dict[str, str]]:
    """Jobs by the process that gets them ready, in the order of the first of each."""
    groups: dict[str, dict[str, str]] = {}
    for name, kind in jobs.items():
        home = name.removeprefix(PROFILE)
        home = next((some for some in share if home.startswith(tuple(some.split("|")))), home)
        groups.setdefault(home, {})[name] = kind
    return list(groups.values())


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

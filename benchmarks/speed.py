"""Every bar of speed in one run on a GPU: networks beside the released one, passes beside cuDNN, kernels beside rivals.

    PYTHONPATH=src:benchmarks python benchmarks/speed.py --out speed.json
    PYTHONPATH=src:benchmarks python benchmarks/speed.py --only widths causal --out speed.json

Compiling takes minutes and most of it is done by one core, so every job gets ready in a process of its own, all at
once, networks before kernels; then they are timed one after the other, alone on the GPU. The report is written after
every row.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from speed_bars import verdicts

THREADS = 2  # of one job's compiler
NETWORKS = "twin_", "mavit_", "nalaformer_"  # how names of jobs begin that take longest to get ready


@dataclass
class Worker:
    """A process that gets one job ready, and then waits to be told to measure."""

    name: str
    process: subprocess.Popen[str]
    said: queue.Queue[str | None] = field(default_factory=queue.Queue[str | None])

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


def patience(name: str, kind: str) -> int:
    """How far a process steps back for others: what takes longest gets ready first, what may be left out last."""
    return 15 if kind == "tune_jobs" else 0 if name.startswith(NETWORKS) else 5


def begin(name: str, kind: str) -> Worker:
    """Start the process of a job."""
    settings = {"TORCHINDUCTOR_COMPILE_THREADS": str(THREADS), "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        ["nice", "-n", str(patience(name, kind)), sys.executable, __file__, "--worker", name, "--kind", kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **settings},
    )  # fmt: skip
    worker = Worker(name, process)
    assert process.stdout is not None
    threading.Thread(target=listen, args=(worker, process.stdout), daemon=True).start()
    return worker


def listen(worker: Worker, stream: IO[str]) -> None:
    """Pass on what a process says; what is not for us goes to the log."""
    for line in stream:
        if not line.startswith("{"):
            print(f"[{worker.name}] {line.rstrip()}", file=sys.stderr, flush=True)
        worker.said.put(line)
    worker.said.put(None)


def work(name: str, kind: str) -> None:
    """Be the process of a job: get ready, say so, wait, measure, and say every row."""
    import importlib

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
    parser.add_argument("--only", nargs="+", default=[""], help="jobs whose names begin so")
    parser.add_argument("--skip", nargs="+", default=[], help="jobs whose names begin so are left out")
    parser.add_argument("--ready", type=float, default=300, help="seconds after which a job that is not ready is left")
    parser.add_argument("--kind", nargs="+", default=["speed_jobs"], help="modules of the jobs")
    parser.add_argument("--list", action="store_true", help="print the names of the jobs")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker, arguments.kind[0])
    import importlib

    jobs = {name: kind for kind in arguments.kind for name in importlib.import_module(kind).jobs()}
    chosen = {
        name: kind
        for name, kind in jobs.items()
        if any(name.startswith(only) for only in arguments.only)
        and not any(name.startswith(skip) for skip in arguments.skip)
    }
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

    start = time.monotonic()
    workers = [begin(name, kind) for name, kind in chosen.items()]
    ready: list[Worker] = []
    for worker in workers:
        answer = worker.hear(start + arguments.ready)
        report["jobs"][worker.name] = answer or "not ready"
        if answer:
            ready.append(worker)
        else:
            worker.process.kill()
        print(f"{time.monotonic() - start:6.1f} s  {worker.name}: {answer or 'not ready'}", flush=True)
    keep()
    for worker in ready:
        worker.tell("go")
        while (row := worker.hear(time.monotonic() + 120)) is not None and "done" not in row:
            report["rows"].append(row)
            keep()
            print(short(row), flush=True)
        worker.process.kill()
        print(f"{time.monotonic() - start:6.1f} s  {worker.name} measured", flush=True)
    report["seconds"] = time.monotonic() - start
    keep()
    print(*report["bars"], sep="\n", flush=True)


def short(row: dict[str, Any]) -> str:
    """One row in one line."""
    left = {key: value for key, value in row.items() if key not in ("job", "kernels")}
    parts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in left.values()]
    return "  ".join(parts)


if __name__ == "__main__":
    main()

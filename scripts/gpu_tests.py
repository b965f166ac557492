"""Test the kernels on a GPU: most tests in several processes at a time, since compiling is what takes long.

    PYTHONPATH=src python3 scripts/gpu_tests.py --report benchmarks/results/gpu-tests.json

The same tests, one after the other: `pytest tests/gpu tests/ops/triton -o filterwarnings=default`.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PYTEST = [
    *(sys.executable, "-m", "pytest", "tests/gpu", "tests/ops/triton", "-q"),
    *("-p", "no:cacheprovider", "-o", "filterwarnings=default"),
]
NOTHING_TO_DO = 5  # what pytest returns where no test is left


def start(folder: Path, name: str, *options: str) -> tuple[subprocess.Popen[bytes], Path]:
    """Start some of the tests, with a report and an output of their own."""
    command = [*PYTEST, *options, "--report", str(folder / f"{name}.json")]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT), folder / name


def finish(started: list[tuple[subprocess.Popen[bytes], Path]]) -> bool:
    """Wait for tests, show what they said, and say whether all went well."""
    codes = [process.wait() for process, _ in started]
    for code, (_, stem) in zip(codes, started, strict=True):
        if code not in (0, NOTHING_TO_DO):
            print(stem.with_suffix(".log").read_text(), flush=True)
    return all(code in (0, NOTHING_TO_DO) for code in codes)


def merge(folder: Path, seconds: float) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """One report from those of the processes."""
    told = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    tests = {name: test for report in told for name, test in report["tests"].items()}
    return told[0]["machine"] | {"command": " ".join(sys.argv), "seconds": round(seconds)}, dict(sorted(tests.items()))


def main() -> int:
    """Run them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="where to write outcomes, as JSON and as text")
    parser.add_argument("--processes", type=int, default=max(min((os.cpu_count() or 2) // 2, 8), 1))
    parser.add_argument("-k", default="", help="which tests, as for pytest")
    arguments = parser.parse_args()
    chosen, began = ["-k", arguments.k] if arguments.k else [], time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder, number = Path(place), arguments.processes
        shards = [
            start(folder, f"shard-{i}", "-m", "not alone", "--shard", f"{i}/{number}", *chosen) for i in range(number)
        ]
        well = finish(shards)
        well = finish([start(folder, "alone", "-m", "alone", *chosen)]) and well
        machine, tests = merge(folder, time.monotonic() - began)
    write_report = runpy.run_path(str(ROOT / "tests/gpu/conftest.py"))["write_report"]
    with tempfile.TemporaryDirectory() as place:
        file = arguments.report or Path(place) / "report.json"
        write_report(file, machine, tests)
        print(file.with_suffix(".txt").read_text())
    return 0 if well and tests else 1


if __name__ == "__main__":
    sys.exit(main())

"""Processes that read samples: whom they listen to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# A trainer with one reader, which takes signals of others and then those of its trainer.
TRAINER = """
import multiprocessing, os, signal, subprocess, sys, time
from affinear.train.loading import in_order

class Samples:
    def __getitem__(self, draw):
        return draw.index

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    loader = in_order(Samples(), 8, 4, workers=1)
    batches = iter(loader)
    reader = batches._workers[0]
    next(batches)
    for name in ("INT", "TERM"):
        subprocess.run(["kill", f"-{name}", str(reader.pid)], check=True)
    time.sleep(0.5)
    print("kept", reader.is_alive(), flush=True)
    reader.terminate()
    reader.join(20)
    print("ended", not reader.is_alive(), flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="who sent a signal is told on Linux alone")
# The latter in the processes of `affinear compare`; it imports everything anew.
@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.exhaustive)])
def test_a_reader_ends_with_its_trainers_signal_and_with_no_others(method: str, tmp_path: Path):
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, script, method], capture_output=True, text=True, env=environment)
    assert done.stdout.split("\n")[:2] == ["kept True", "ended True"], done.stderr

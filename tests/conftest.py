"""Fresh random numbers for each run. Without a GPU, Triton interprets the kernels: it has to know before its import."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import secrets
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Some virtual machines announce matrix instructions for bfloat16 and then stop the program that uses them.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


# What takes long, or throws noise at readers until they trip: `make test-all` runs it, `make test` does not.
EXHAUSTIVE = tuple(Path(__file__).parent / name for name in ("exhaustive", "fuzz"))
COUNTED = ("tries", "failures", "code run", "bytes lost")  # by the loops of tests/fuzz


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all that lies in the folders of exhaustive tests."""
    for item in items:
        if any(folder in item.path.parents for folder in EXHAUSTIVE):
            item.add_marker(pytest.mark.exhaustive)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the counts of fuzz loops, of all and each; here, as whoever shares tests out reads no deeper conftest."""
    reports = [report for found in terminalreporter.stats.values() for report in found if hasattr(report, "when")]
    told = {r.nodeid: value for r in reports for name, value in getattr(r, "user_properties", ()) if name == "fuzz"}
    if not told:
        return
    terminalreporter.section("fuzz")
    for loop, counts in sorted(told.items()):
        terminalreporter.write_line(f"{loop.rpartition('::')[2]}: {_counts(counts)}")
    terminalreporter.write_line(f"all: {_counts([sum(column) for column in zip(*told.values(), strict=True)])}")


def _counts(counts: Any) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in zip(COUNTED, counts, strict=True))


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Fresh numbers in every run. A failing test reports its seed; AFFINEAR_SEED repeats it."""
    number = int(os.environ.get("AFFINEAR_SEED", secrets.randbits(32)))
    torch.manual_seed(number)
    request.node.add_report_section("setup", "seed", f"AFFINEAR_SEED={number}")
    return number


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    module = importlib.import_module("affinear.ops.mechanisms")
    monkeypatch.setattr(module, "_registry", dict(module.mechanisms()))


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """Ctrl-C is heard by tests, and by what they start, in a job of the background as well, which ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def module_at() -> Callable[[Path], Any]:
    """Load a file that lies in no package as a module of its own."""

    def load(path: Path) -> Any:
        name = f"{path.parent.name}_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
        spec.loader.exec_module(module)
        return module

    return load


InRanks = Callable[[int, Callable[[], Any]], list[Any]]


@pytest.fixture(scope="session")
def in_ranks(tmp_path_factory: pytest.TempPathFactory) -> InRanks:
    """Do a work in so many processes, as `torchrun` starts them, and return what each one found, through JSON.

    They are forked: what is imported here is imported there, which is most of the time that new processes would take.
    """

    def run(number: int, work: Callable[[], Any]) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        sizes = {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        children = {_fork(rank, sizes, work, folder / f"{rank}.json"): rank for rank in range(number)}
        while children:
            child, status = os.wait()
            rank = children.pop(child, None)
            if rank is not None and status != 0:
                for other in children:  # which would wait for the one that is gone
                    os.kill(other, signal.SIGKILL)
                    os.waitpid(other, 0)
                pytest.fail(f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}: {_told(folder, rank)}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(number)]

    return run


def _fork(rank: int, sizes: dict[str, int], work: Callable[[], Any], answer: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        warnings.simplefilter("ignore")  # torch's advice, which is an error to pytest
        torch.set_num_threads(1)  # threads of the parent are not there
        os.environ |= {name: str(value) for name, value in (sizes | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "1"}
        answer.write_text(json.dumps(work()))
        code = 0
    except BaseException:
        answer.with_suffix(".txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _told(folder: Path, rank: int) -> str:
    path = folder / f"{rank}.txt"
    return path.read_text() if path.exists() else "nothing was said"

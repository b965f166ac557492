"""What the tests on a GPU share: problems, the one way to judge answers, and the report they leave.

They are not part of `make test`, but of `make test-gpu`. With AFFINEAR_GPU_SMALL=1 and TRITON_INTERPRET=1 they run
without a GPU, on problems of a few tokens: that tests the tests.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import affinear as af
from affinear.bench.machine import describe
from affinear.ops import rotary_1d, rotary_2d
from affinear.ops.rotary import Rotary

SMALL = os.environ.get("AFFINEAR_GPU_SMALL") == "1"
DEVICE = torch.device("cpu" if SMALL else "cuda")
REPORT = "AFFINEAR_GPU_REPORT"
# Nothing to collect where nothing could run.
collect_ignore_glob = [] if SMALL or torch.cuda.is_available() else ["*.py"]


# The command line, and the report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the tests on a GPU."""
    group = parser.getgroup("gpu")
    group.addoption("--report", metavar="FILE", help=f"where to write outcomes, as JSON and text; or set {REPORT}")
    group.addoption("--shard", metavar="I/K", help="run every K-th test from the I-th on, 0 <= I < K")


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, and keep the report if one is wanted."""
    config.addinivalue_line("markers", "alone: needs the GPU to itself, for its memory or its clock")
    file = config.getoption("--report") or os.environ.get(REPORT)
    if file:
        config.pluginmanager.register(Report(Path(file)), "gpu-report")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of one shard."""
    shard = config.getoption("--shard")
    if shard:
        index, number = map(int, shard.split("/"))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % number != index])
        items[:] = items[index::number]


class Report:
    """Every test and its outcome, with the machine, and errors as multiples of the torch backend's.

    Written after every test, so that a run that is cut short has lost one at most.
    """

    def __init__(self, file: Path):
        self.file = file
        self.tests: dict[str, dict[str, Any]] = {}
        self.machine = describe(DEVICE) | {"command": shlex.join(["pytest", *sys.argv[1:]])}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of one phase of a test."""
        test = self.tests.setdefault(report.nodeid, {"outcome": "cut short", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 2)
        if report.passed and report.when == "call":
            test["outcome"] = "passed"
        if report.outcome != "passed":
            test["outcome"] = report.outcome if report.when == "call" or report.skipped else "error"
        if report.failed:
            test["message"] = str(report.longrepr)[-2000:]
        elif report.skipped and isinstance(report.longrepr, tuple):
            test["message"] = report.longrepr[2]
        if report.when == "teardown":
            if report.user_properties:
                test["measured"] = dict(report.user_properties)
            write_report(self.file, self.machine, self.tests)

    def pytest_sessionfinish(self) -> None:
        """A report of no tests is one, too."""
        write_report(self.file, self.machine, self.tests)


def write_report(file: Path, machine: dict[str, Any], tests: dict[str, dict[str, Any]]) -> None:
    """Write a report as JSON, and as a text beside it."""
    outcomes = [test["outcome"] for test in tests.values()]
    counts = {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}
    worst = worst_ratios(tests)
    file.parent.mkdir(parents=True, exist_ok=True)
    told = {"machine": machine, "outcomes": counts, "worst_error_ratios": worst, "tests": tests}
    replaced(file, json.dumps(told, indent=1))
    lines = [f"{name}: {value}" for name, value in machine.items() if value is not None]
    lines += ["", ", ".join(f"{number} {outcome}" for outcome, number in counts.items())]
    lines += ["", "Worst errors, over those of the torch backend in the same dtype:"]
    lines += [f"  {ratio:6.2f}  {name}" for name, ratio in worst.items()]
    lines += ["", "Tests:"]
    lines += [f"  {test['outcome']:8} {test['seconds']:7.2f} s  {name}" for name, test in tests.items()]
    replaced(file.with_suffix(".txt"), "\n".join(lines))


def replaced(file: Path, text: str) -> None:
    """Write a text where another may be, which is there until all of it is written."""
    draft = file.with_suffix(".part")
    draft.write_text(text + "\n")
    draft.rename(file)


def worst_ratios(tests: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The largest error ratio of each test function and result, the worst first."""
    worst: dict[str, float] = {}
    for name, test in tests.items():
        for measured, number in test.get("measured", {}).items():
            kind, _, result = measured.partition(" ")
            if kind == "ratio":
                key = f"{name.partition('[')[0].rpartition('::')[2]} {result}"
                worst[key] = max(worst.get(key, 0.0), number)
    return dict(sorted(worst.items(), key=lambda item: -item[1]))


# Problems and answers


class Answers(NamedTuple):
    """What attention gives, and the gradients of its arguments."""

    out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Problem:
    """Arguments of one call, and the gradient of its answers."""

    mechanism: str
    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    causal: bool = False
    mask: Tensor | None = None
    bounds: Tensor | None = None
    rotary: Rotary | None = None

    def answers(self, backend: str = "triton", dtype: torch.dtype | None = None) -> Answers:
        """Answers and gradients of a backend, in the dtype of the tokens or in another."""
        query, key, value = (x.detach().to(dtype or x.dtype).requires_grad_() for x in self.tokens[:3])
        out = af.attention(
            query, key, value, self.mechanism, causal=self.causal, key_mask=self.mask, cu_seqlens_q=self.bounds,
            cu_seqlens_k=self.bounds, rotary=self.rotary, backend=backend,
        )  # fmt: skip
        return Answers(out.detach(), *torch.autograd.grad(out, (query, key, value), self.grad.to(out.dtype)))

    @property
    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values, and the gradient of the answers."""
        return self.query, self.key, self.value, self.grad

    def map(self, function: Callable[[Tensor], Tensor]) -> Problem:
        """The problem with all its tokens changed."""
        query, key, value, grad = map(function, self.tokens)
        return replace(self, query=query, key=key, value=value, grad=grad)


Make = Callable[..., Problem]
Judge = Callable[..., None]


@pytest.fixture
def size() -> Callable[[int, int], int]:
    """The first number on a GPU, the second without one."""
    return lambda full, small: small if SMALL else full


@pytest.fixture
def make() -> Make:
    """Draw a problem; the values have a mean, as they do in practice. Fresh numbers in every run."""

    def draw(
        mechanism: str = "mala",
        *,
        batch: int = 2,
        tokens: int = 3136,
        heads: int = 4,
        groups: int | None = None,
        width: int = 64,
        values: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        causal: bool = False,
        rotary: int = 0,
    ) -> Problem:
        if SMALL:
            batch, tokens, heads, width = min(batch, 3), min(tokens, 49), min(heads, 2), min(width, 16)
            groups, values = min(groups or heads, heads), min(values or width, width)
            # The interpreter truncates where it should round to bfloat16.
            dtype = torch.float16 if dtype == torch.bfloat16 else dtype
        groups, values = groups or heads, values or width

        def some(heads: int, width: int) -> Tensor:
            return torch.randn(batch, tokens, heads, width, dtype=dtype, device=DEVICE)

        problem = Problem(
            mechanism,
            some(heads, width),
            some(groups, width),
            some(groups, values).add_(0.5),
            some(heads, values),
            causal,
        )
        if not rotary:
            return problem
        side = round(tokens**0.5)
        tables = rotary_2d(side, side, width, device=DEVICE) if rotary == 2 else rotary_1d(tokens, width, device=DEVICE)
        return replace(problem, rotary=tables)

    return draw


@pytest.fixture
def judge(record_property: Callable[[str, object], None]) -> Judge:
    """Hold answers to twice the error of the torch backend in the same dtype; what overflows there is not looked at."""

    def check(problem: Problem, answers: Sequence[Tensor] | None = None, oracle: str = "torch") -> None:
        answers = problem.answers() if answers is None else answers
        rival = problem.answers("torch")
        truth = problem.answers(oracle, torch.float64)
        judged = 0
        for name, ours, theirs, exact in zip(Answers._fields, answers, rival, truth, strict=True):
            assert ours.dtype == problem.query.dtype
            if not theirs.isfinite().all():
                continue
            judged += 1
            error, bound = relative_error(ours, exact), relative_error(theirs, exact)
            record_property(f"ratio {name}", round(error / bound, 3) if bound > 0 else 0.0)
            # Where torch happens to round nothing, one rounding of a float32 is still no mistake.
            assert error <= 2 * bound + torch.finfo(torch.float32).eps, name
        assert judged > 0

    return check


def relative_error(out: Tensor, truth: Tensor) -> float:
    """||out - truth|| / ||truth|| in float64; of a truth that vanishes, ||out||."""
    assert out.shape == truth.shape
    length = truth.double().norm().item()
    return (out.double() - truth.double()).norm().item() / (length or 1.0)


@pytest.fixture
def same_bits() -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
    """Hold two sets of tensors to be equal to the bit."""

    def check(these: Sequence[Tensor], those: Sequence[Tensor]) -> None:
        for i, (this, that) in enumerate(zip(these, those, strict=True)):
            assert torch.equal(this, that), Answers._fields[i] if len(these) == len(Answers._fields) else i

    return check


@pytest.fixture(autouse=True)
def tidy():
    """Hand the memory of one test back before the next."""
    yield
    if not SMALL:
        torch.cuda.empty_cache()

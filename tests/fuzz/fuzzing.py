"""What the fuzz loops share: random damage, hostile values, and a tally of what came of each try."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from guarded import Crossed, Guard

SECONDS = float(os.environ.get("AFFINEAR_FUZZ_SECONDS", "8"))  # of each loop
PATIENCE = 60  # seconds of one try
ROOM = 6 * 2**30  # bytes that a loop may ask for beyond what its process has: more fails, and kills nobody
MOST = 1_500_000  # kB that reading may really take beyond what the process has
LONGEST = 50_000  # letters of what is still a sentence or a list of tensors that do not fit

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    2**31,
    2**63,
    2**80,
    -(2**80),
    0.0,
    0.5,
    -1.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "0",
    "-1",
    "../../../etc/passwd",
    "http://127.0.0.1:9/x",
    "hf-hub:a/b",
    "\x00",
    "\ud800",
    "猫" * 40,
    "x" * 5000,
    "$(touch run)",
    [],
    [0],
    [[]],
    [[[[[1]]]]],
    [1] * 100,
    ["a", 1, None],
    {},
    {"a": 1},
    {"pretrained": True},
)


class Hanging(BaseException):
    """Something does not end; no `except Exception` hides it."""


@contextmanager
def patience() -> Generator[None]:
    """Raise `Hanging` in what takes longer than any try should, where signals can be heard."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        raise Hanging

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def bounded() -> Generator[None]:
    """Within it, whatever asks for gigabytes fails, and whatever takes too much of them is told at the end."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    room = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (room if before[1] < 0 else min(room, before[1]), before[1]))
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - taken
    assert grown < MOST, f"reading took {grown:,} kB"


@dataclass
class Tally:
    """What came of the tries of one loop.

    Attributes:
        guard: Forbids sockets, processes, unpickling and writing while something is read.
        tries: How many there were.
        failures: What each that went wrong was, and how it ended.
        code_run: What crossed the guard.
        bytes_lost: What was not found again, or found changed and not said.
    """

    guard: Guard
    tries: int = 0
    failures: list[str] = field(default_factory=list[str])
    code_run: list[str] = field(default_factory=list[str])
    bytes_lost: list[str] = field(default_factory=list[str])

    def attempt(
        self, what: str, work: Callable[[], Any], *allowed: type[Exception], guarded: bool = True
    ) -> tuple[bool, Any]:
        """Try something: it may give a result, or an allowed error with a sentence; whatever else is a failure.

        Returns:
            Whether there was a result, and the result.
        """
        self.tries += 1
        try:
            with patience():
                if not guarded:
                    return True, work()
                with self.guard.forbidding():
                    return True, work()
        except Hanging:
            self.failures.append(f"{what}: still at it after {PATIENCE} seconds")
        except Crossed as crossed:
            self.code_run.append(f"{what}: {crossed}")
        except allowed as error:
            if not 5 < len(str(error)) < LONGEST:
                self.failures.append(f"{what}: {type(error).__name__} without a sentence: {str(error)[:200]!r}")
        except Exception:
            self.failures.append(f"{what}: {traceback.format_exc()[-1500:]}")
        return False, None

    def counts(self) -> tuple[int, int, int, int]:
        """Tries, failures, code run, bytes lost."""
        return self.tries, len(self.failures), len(self.code_run), len(self.bytes_lost)

    def check(self) -> None:
        """Fail if anything went wrong, or nothing was tried."""
        wrong = [*self.code_run, *self.bytes_lost, *self.failures]
        assert not wrong, f"{len(wrong)} of {self.tries} went wrong, such as:\n" + "\n".join(wrong[:3])
        assert self.tries


def for_a_while(seconds: float = SECONDS, least: int = 20) -> Iterator[int]:
    """Numbers from 0 until the time of a loop is over, and at least so many, however slow the machine is."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end or number < least:
        yield number
        number += 1


def damaged(draw: random.Random, content: bytes) -> bytes:
    """The same bytes with something wrong: flipped, cut, doubled, overwritten, swapped, or others altogether."""
    out = bytearray(content)
    kind = draw.randrange(8)
    place = draw.randrange(len(out)) if out else 0
    head = min(place, draw.choice((8, 64, 512, 4096)))  # headers are where readers can be led astray
    if kind == 0 and out:
        for _ in range(draw.choice((1, 1, 1, 4, 32))):
            bit = draw.randrange(8 * len(out))
            out[bit // 8] ^= 1 << bit % 8
    elif kind == 1:
        del out[place:]
    elif kind == 2:
        out[head:head] = draw.randbytes(draw.choice((1, 8, 100)))
    elif kind == 3:
        length = draw.choice((1, 4, 8, 64))
        out[head : head + length] = draw.choice((b"\x00", b"\xff", b"\x7f", b"9", b"[")) * length
    elif kind == 4:
        del out[head : head + draw.choice((1, 2, 16))]
    elif kind == 5 and out:
        other = draw.randrange(len(out))
        out[head : head + 16], out[other : other + 16] = out[other : other + 16], out[head : head + 16]
    elif kind == 6:
        out = bytearray(draw.randbytes(draw.choice((0, 1, 7, 8, 9, 100, 5000))))
    else:
        for _ in range(draw.choice((1, 2, 8))):
            out[draw.randrange(min(len(out), 600)) if out else 0 :][:1] = b""
            spot = draw.randrange(min(len(out), 600)) if out else 0
            out[spot : spot + 1] = bytes([draw.randrange(256)])
    return bytes(out)


def hostile(draw: random.Random) -> Any:
    """A value that nobody expects."""
    return draw.choice(HOSTILE)


def changed(draw: random.Random, told: Any, depth: int = 0) -> Any:
    """A value of JSON in which one thing, somewhere, is another, missing or too much."""
    if isinstance(told, dict) and told and (depth == 0 or draw.random() < 0.7):
        out: dict[Any, Any] = dict(told)  # pyright: ignore[reportUnknownArgumentType]
        name = draw.choice(list(out))
        kind = draw.randrange(4)
        if kind == 0:
            del out[name]
        elif kind == 1:
            out[draw.choice(("pretrained", "checkpoint_path", "cache_dir", "x", "", "a b", "__class__"))] = hostile(
                draw
            )
        elif kind == 2:
            out[name] = hostile(draw)
        else:
            out[name] = changed(draw, out[name], depth + 1)
        return out
    if isinstance(told, list) and told and draw.random() < 0.7:
        items: list[Any] = list(told)  # pyright: ignore[reportUnknownArgumentType]
        items[draw.randrange(len(items))] = hostile(draw)
        return items
    return hostile(draw)

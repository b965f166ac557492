"""A Conformer over an hour of speech in one piece: time and memory by mechanism, softmax through torch's fused kernels.

    PYTHONPATH=src python benchmarks/speech_hour.py --out speech_hour.json

times the encoder over 1, 5, 15 and 60 minutes of features, forward alone in bfloat16, alternating among the arms so
that a machine that slows down slows all of them; and once a whole hour from samples to logits. What does not fit is
told with what it would have needed. Softmax with relative positions has a score of its own for every pair of tokens.
`--minutes 1,5` is quicker. It needs torch, timm and a GPU; without one there are times alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from affinear.models import making
from affinear.models.speech import Conformer, LogMel
from affinear.models.speech.conformer import tokens_of

ARMS: dict[str, dict[str, Any]] = {
    "mala": {"mechanism": "mala"},
    "linear": {"mechanism": "linear"},
    "nala": {"mechanism": "nala"},
    "inline": {"mechanism": "inline"},
    "none": {"mechanism": "none"},
    "softmax": {"mechanism": "softmax"},
    "softmax_relative": {"mechanism": "softmax", "positions": "relative"},
}
SECOND = 100  # frames
SCORES = 3  # matrices of all pairs that relative positions hold at a time: by distance, by pair, and masked


class Arm:
    """A network of one mechanism.

    Args:
        model: Its size.
        name: Of the arm.
        device: Where it runs.
    """

    def __init__(self, model: str, name: str, device: torch.device) -> None:
        made = making.make(model, ARMS[name])
        assert isinstance(made, Conformer)
        self.name, self.device, self.network = name, device, made.to(device).eval()

    @torch.no_grad()
    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """Logits of features (1, T, F)."""
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.network(features)[0]

    def needs(self, minutes: float) -> float:
        """GiB of scores, where every pair of tokens has one of its own."""
        if self.name != "softmax_relative":
            return 0.0
        return SCORES * self.network.num_heads * tokens_of(int(60 * SECOND * minutes)) ** 2 * 2 / 2**30

    def measure(self, features: torch.Tensor) -> tuple[float, float]:
        """Seconds of one pass, and GiB that it takes beside weights and features."""
        if self.device.type != "cuda":
            begun = time.perf_counter()
            self(features)
            return time.perf_counter() - begun, 0.0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        self(features)
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1000, (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="conformer_medium,conformer_small")
    parser.add_argument("--only", default=",".join(ARMS))
    parser.add_argument("--minutes", default="1,5,15,60")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    room = torch.cuda.mem_get_info()[0] / 2**30 if device.type == "cuda" else 4.0
    rows: list[dict[str, Any]] = []
    for model in given.models.split(","):
        arms = [Arm(model, name, device) for name in given.only.split(",")]
        for minutes in map(float, given.minutes.split(",")):
            rows += _length(model, arms, minutes, given.rounds, room)
            _keep(given.out, {"machine": _machine(device), "rows": rows})
    if device.type == "cuda":
        rows.append(_from_samples(given.models.split(",")[0], device))
        _keep(given.out, {"machine": _machine(device), "rows": rows})


def _length(model: str, arms: list[Arm], minutes: float, rounds: int, room: float) -> list[dict[str, Any]]:
    features = torch.randn(1, int(60 * SECOND * minutes), arms[0].network.in_features, device=arms[0].device)
    told = {arm.name: {"model": model, "arm": arm.name, "minutes": minutes} for arm in arms}
    times: dict[str, list[float]] = {arm.name: [] for arm in arms}
    able = [arm for arm in arms if arm.needs(minutes) < 0.8 * room]
    for arm in arms:
        if arm not in able:
            told[arm.name] |= {"would_need_gib": round(arm.needs(minutes), 1)}
    for number in range(rounds + 1):
        for arm in list(able):
            try:
                seconds, gib = arm.measure(features)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                able.remove(arm)
                told[arm.name] |= {"out_of_memory": True}
                continue
            if number:  # the first pass chooses and builds kernels
                times[arm.name].append(seconds)
                told[arm.name] |= {"gib": round(gib, 3)}
    for arm in able:
        told[arm.name] |= {
            "seconds": statistics.median(times[arm.name]),
            "spread": max(times[arm.name]) / min(times[arm.name]),
        }
    tokens = tokens_of(features.shape[1])
    for row in told.values():
        row["tokens"] = tokens
        print(json.dumps(row), flush=True)
    return list(told.values())


def _from_samples(model: str, device: torch.device) -> dict[str, Any]:
    """An hour from samples to logits, features included, with mala."""
    arm, mel = Arm(model, "mala", device), LogMel().to(device)
    wave = torch.randn(1, 3600 * mel.sample_rate, device=device)
    arm(mel(wave))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    arm(mel(wave))
    torch.cuda.synchronize()
    row = {"model": model, "arm": "mala from samples", "minutes": 60.0, "seconds": time.perf_counter() - begun}
    row["gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)
    print(json.dumps(row), flush=True)
    return row


def _keep(path: Path, content: dict[str, Any]) -> None:
    """Write it at once or not at all: the time may be over any moment."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content, indent=1))
    beside.replace(path)


def _machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {"device": name, "torch": torch.__version__}


if __name__ == "__main__":
    main()

"""Four processes share one GPU: right numbers, and a sequence of 16 million tokens forward and backward in four pieces.

    python benchmarks/mesh_gpu.py --output benchmarks/results/NAME.json

NCCL does not let two ranks have one GPU, so states travel through gloo, by way of the host. What this shows is that the
numbers are right with the kernels, and that the length fits; the time of the exchange is gloo's, not a network's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import affinear as af
from affinear.ops import rotary_1d

RANKS = 4
HEADS, WIDTH = 4, 64
SMALL = (700, 0, 1500, 1896)  # tokens of each rank where everything is compared
BOUND = {"float32": 2e-5, "bfloat16": 2e-2}
# dtype, causal, rotary: each of them with and without the others
CASES = (
    (torch.float32, False, False),
    (torch.float32, True, True),
    (torch.bfloat16, False, True),
    (torch.bfloat16, True, False),
)
SAMPLES = 64  # queries of each rank whose answers are compared in the long sequence


def error(x: Tensor, truth: Tensor) -> float:
    """||x - truth|| / ||truth||."""
    return ((x.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-300)).item()


def compare(rank: int, device: torch.device, dtype: torch.dtype, causal: bool, rotary: bool) -> dict[str, float]:
    """Errors of this rank's answers and gradients against float64 in one process."""
    generator = torch.Generator(device).manual_seed(0)
    total, start = sum(SMALL), sum(SMALL[:rank])
    own = slice(start, start + SMALL[rank])
    draw = [torch.randn(2, total, HEADS, WIDTH, generator=generator, device=device).to(dtype) for _ in range(4)]
    tables = rotary_1d(total, WIDTH, device=device) if rotary else None

    def run(tokens: list[Tensor], piece: slice, mesh: Any) -> list[Tensor]:
        leaves = [x[:, piece].detach().clone().requires_grad_() for x in tokens[:3]]
        rows = None if tables is None else (tables[0][piece], tables[1][piece])
        out = af.attention(leaves[0], leaves[1], leaves[2], causal=causal, rotary=rows, mesh=mesh)
        return [out, *torch.autograd.grad(out, leaves, tokens[3][:, piece])]

    mine = run(draw, own, dist.group.WORLD)
    alone = run([x.double() for x in draw], slice(0, total), None)
    names = ("answer", "gradient of query", "gradient of key", "gradient of value")
    lengths = (y.norm().item() for y in alone)
    pairs = zip(names, mine, alone, lengths, strict=True)
    return {name: ((x.double() - y[:, own]).norm() / length).item() for name, x, y, length in pairs}


def long_sequence(rank: int, device: torch.device, tokens: int, causal: bool) -> dict[str, Any]:
    """Forward and backward of this rank's quarter, twice, and the error of some answers of full attention."""
    generator = torch.Generator(device).manual_seed(rank)
    shape = (1, tokens // RANKS, HEADS, WIDTH)
    draw = [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(4)]
    query, key, value = (x.requires_grad_() for x in draw[:3])
    torch.cuda.reset_peak_memory_stats(device)
    times: list[float] = []
    out = grads = None
    for _ in range(2):
        del out, grads
        torch.cuda.synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        out = af.attention(query, key, value, causal=causal, mesh=dist.group.WORLD)
        grads = torch.autograd.grad(out, (query, key, value), draw[3])
        torch.cuda.synchronize(device)
        dist.barrier()
        times.append(time.perf_counter() - start)
    assert out is not None
    assert grads is not None
    found: dict[str, Any] = {
        "seconds": times,
        "peak_gb": torch.cuda.max_memory_allocated(device) / 1e9,
        "finite": all(bool(x.isfinite().all()) for x in (out, *grads)),
    }
    if not causal:
        some = torch.arange(SAMPLES, device=device) * (shape[1] // SAMPLES)
        found["error"] = error(out.detach()[:, some], exact(query.detach()[:, some], key.detach(), value.detach()))
    return found


def exact(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Answers in float64, from states of pieces that are merged in float64."""
    state = None
    for k, v in zip(key.split(2**18, dim=1), value.split(2**18, dim=1), strict=True):
        piece = af.summarize(k.double(), v.double())
        state = piece if state is None else state + piece
    assert state is not None
    return af.attend(query.double(), state.to("cpu").all_reduce().to(query.device))


def build(device: torch.device, dtype: torch.dtype, causal: bool, rotary: bool) -> None:
    """Have the kernels of one case built: every process builds those of another, and finds the rest."""
    alone = torch.randn(1, 256, HEADS, WIDTH, device=device, dtype=dtype, requires_grad=True)
    tables = rotary_1d(256, WIDTH, device=device) if rotary else None
    out, _ = af.attention(alone, alone, alone, causal=causal, rotary=tables, return_state=True)
    out.sum().backward()


def work(rank: int, folder: str, tokens: int) -> None:
    """What each of the four processes does."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    wait = datetime.timedelta(minutes=3)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=wait)
    report: dict[str, Any] = {"errors": {}}
    build(device, *CASES[rank])
    dist.barrier()
    for dtype, causal, rotary in CASES:
        name = f"{str(dtype).removeprefix('torch.')}, {'causal' if causal else 'full'}{', rotary' * rotary}"
        report["errors"][name] = compare(rank, device, dtype, causal, rotary)
    for causal in (False, True):
        report[f"{tokens} tokens, {'causal' if causal else 'full'}"] = long_sequence(rank, device, tokens, causal)
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def main() -> None:
    """Run, judge, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=2**24, help="length of the long sequence")
    parser.add_argument("--output", type=Path, help="JSON file to write; it must not exist")
    arguments = parser.parse_args()
    if arguments.output and arguments.output.exists():
        parser.error(f"{arguments.output} exists; results are not overwritten, choose another name")
    os.environ["OMP_NUM_THREADS"] = "1"
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (folder, arguments.tokens), RANKS)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(RANKS)]
    worst = {name: max(max(r["errors"][name].values()) for r in ranks) for name in ranks[0]["errors"]}
    right = all(number <= BOUND[name.partition(",")[0]] for name, number in worst.items())
    report = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "ranks": RANKS,
        "worst_errors": worst,
        "within_bounds": right,
        **{name: [r[name] for r in ranks] for name in ranks[0] if name != "errors"},
        "wall_seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps(report, indent=2))
    if arguments.output:
        draft = arguments.output.with_suffix(".draft")
        draft.write_text(json.dumps(report, indent=2) + "\n")
        draft.replace(arguments.output)
    if not right:
        raise SystemExit("the numbers are wrong: see worst_errors")


if __name__ == "__main__":
    main()

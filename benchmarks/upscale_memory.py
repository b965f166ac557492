"""Peak memory and time at 70,000 tokens and more, forward and backward: is it 92.3 % less than softmax?

    PYTHONPATH=src python benchmarks/upscale_memory.py --out upscale-memory.json

NaLaFormer's authors report 92.3 % less peak memory in super-resolution at 70,000 tokens and more. What softmax is
compared with decides: softmax that keeps its weights, as it is written with two matrix products, keeps N^2 numbers per
head; SDPA keeps none. Both are measured, over the same tokens of an image of 270 x 270 pixels, for

- `operator`: attention alone, its inputs and their gradients included;
- `layer`: one layer of the upscaler: norms, projections, convolution, MLP;
- `network`: the whole of `upscaler_light`, x2, with its 24 layers.

Peak memory is what torch had allocated at the highest point, weights and inputs included; without a GPU, what the
process held at its highest point beyond what it held before, which is coarser by some megabytes. What does not fit is
told. `weights_bytes` is what the weights of softmax take by their number alone. `--probe` measures once at a quarter of
the side, `--who` measures some.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from affinear import ops
from affinear.layers import Attention
from affinear.models.upscaler import Layer, make_upscaler

SIDE, HEADS, WIDTH = 270, 2, 32
KEPT, SDPA = "softmax, weights kept", "softmax, SDPA"
MECHANISMS = ("linear", "inline", "mala", "nala")
LEVELS = ("operator", "layer", "network")
CLAIMED = 92.3  # percent


class KeptSoftmax(nn.Module):
    """Softmax in place of an attention's own: two matrix products, and weights that the backward pass finds again."""

    def __init__(self, attn: Attention) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tokens (B, N, C)."""
        query, key, value = self.attn.project(x)
        out = kept(query, key, value).flatten(2)
        assert self.attn.position is not None
        out = self.attn.position(value.flatten(2).unflatten(1, grid), added=out.unflatten(1, grid)).flatten(1, 2)
        return self.attn.proj(out)


def kept(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention of (B, N, H, D) as it is written: its weights are kept for the backward pass."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):  # which would keep the weights in float32, twice as large
        weights = (query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2)).softmax(-1)
        return (weights @ value).transpose(1, 2)


def operator(who: str, side: int, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """A call of the operator and its gradients."""
    size = (1, side * side, HEADS, WIDTH)
    tokens = [torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    grad = torch.randn(size, device=device, dtype=dtype)

    def step() -> None:
        query, key, value = tokens
        out = kept(query, key, value) if who == KEPT else ops.attention(query, key, value, _mechanism(who))
        out.backward(grad)
        for x in tokens:
            x.grad = None

    return step


def layer(who: str, side: int, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """One layer of the upscaler, and its gradients."""
    network = make_upscaler("upscaler_light", {"mechanism": _mechanism(who), "depths": (1,), "drop_path_rate": 0.0})
    one = network.layers[0].blocks[0].to(device)  # pyright: ignore
    assert isinstance(one, Layer)
    _keep_weights(one, who)
    x = torch.randn(1, side, side, HEADS * WIDTH, device=device, requires_grad=True)
    return _stepping(one, x, device, dtype)


def network(who: str, side: int, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    """The whole upscaler, and its gradients."""
    made = make_upscaler("upscaler_light", {"mechanism": _mechanism(who), "drop_path_rate": 0.0}).to(device)
    for module in made.modules():
        if isinstance(module, Layer):
            _keep_weights(module, who)
    return _stepping(made, torch.rand(1, 3, side, side, device=device), device, dtype)


def _mechanism(who: str) -> str:
    return "softmax" if who in (KEPT, SDPA) else who


def _keep_weights(one: Layer, who: str) -> None:
    if who == KEPT:
        assert isinstance(one.attn, Attention)
        one.attn = KeptSoftmax(one.attn)  # pyright: ignore[reportAttributeAccessIssue]


def _stepping(module: nn.Module, x: Tensor, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            out = module(x)
        out.float().mean().backward()
        module.zero_grad()
        x.grad = None

    return step


def measured(make: Callable[[], Callable[[], None]], device: torch.device, turns: int) -> dict[str, Any]:
    """Median milliseconds and peak bytes of a step, or that it does not fit."""
    _cleared(device)
    before = 0 if device.type == "cuda" else _resident("VmRSS")
    try:
        step = make()
        _cleared(device)
        step()  # kernels are made here
        _cleared(device)
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the highest point begins anew
        seconds: list[float] = []
        for _ in range(turns):
            began = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else _resident("VmHWM") - before
        return {"milliseconds": 1000 * statistics.median(seconds), "peak_bytes": peak}
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).partition(". GPU")[0][:200]}
    finally:
        _cleared(device)


def _cleared(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system


def _resident(field: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at the highest point (VmHWM), as Linux tells them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def told(row: dict[str, Any], kept_bytes: float | None) -> str:
    """A row for people, and how much less than softmax that keeps its weights."""
    start = f"{row['level']:<9}{row['who']:<24}"
    if "out_of_memory" in row:
        return f"{start}does not fit: {row['out_of_memory']}"
    less = "" if not kept_bytes else f"{100 * (1 - row['peak_bytes'] / kept_bytes):>8.2f} % less than with weights kept"
    return f"{start}{row['milliseconds']:>10.1f} ms{row['peak_bytes'] / 2**30:>10.3f} GiB{less}"


def main() -> int:
    """Measure everything, print it and write it."""
    given = arguments().parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    side, turns = (given.side // 4, 1) if given.probe else (given.side, given.turns)
    makers = {"operator": operator, "layer": layer, "network": network}
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    about = {"device": name, "torch": torch.__version__, "side": side, "tokens": side**2, "heads": HEADS}
    about |= {"head_dim": WIDTH, "dtype": str(dtype), "claimed_percent": CLAIMED}
    about |= {"weights_bytes": HEADS * side**4 * dtype.itemsize}
    print(f"{side} x {side} = {side**2:,} tokens, {HEADS} heads of {WIDTH}, {dtype}, {name}", flush=True)
    rows: list[dict[str, Any]] = []
    for level in given.levels.split(","):
        kept_bytes: float | None = None
        for who in (KEPT, SDPA, *MECHANISMS) if given.who is None else given.who.split(";"):

            def made(level: str = level, who: str = who) -> Callable[[], None]:
                return makers[level](who, side, device, dtype)

            row: dict[str, Any] = {"level": level, "who": who, **measured(made, device, turns)}
            if who == KEPT:
                kept_bytes = row.get("peak_bytes")
            if kept_bytes and row.get("peak_bytes"):
                row["less_percent"] = 100 * (1 - row["peak_bytes"] / kept_bytes)
            rows.append(row)
            print(told(row, kept_bytes), flush=True)
            beside = given.out.with_suffix(".part")
            beside.write_text(json.dumps({**about, "rows": rows}, indent=1))
            beside.replace(given.out)
    return 0


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="JSON to write")
    parser.add_argument("--side", default=SIDE, type=int, help="pixels of a side; tokens are its square")
    parser.add_argument("--turns", default=5, type=int, help="steps that are timed")
    parser.add_argument("--levels", default=",".join(LEVELS), help="some of operator, layer, network, with commas")
    parser.add_argument("--who", help=f"some of {KEPT}; {SDPA}; {'; '.join(MECHANISMS)}, with semicolons")
    parser.add_argument("--probe", action="store_true", help="once, at a quarter of the side")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

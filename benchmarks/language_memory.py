"""Peak memory of training a language model, counted on torch's meta device: no GPU, and no memory, is needed.

    PYTHONPATH=src:benchmarks python benchmarks/language_memory.py --out language-memory.json

Models and losses are those of `language_speed.py`: 340M parameters in bfloat16, ours beside Llama, forward and backward
with gradient checkpointing on one text of 8,192 to 131,072 tokens. Tensors of the meta device have shapes and no
numbers; `live_bytes.py` counts them as they come and go. `peak_gib` has weights, gradients, what is kept for backward,
what a layer needs while it is computed again, and AdamW's state: two numbers for each weight.

So that they are the tensors of a GPU, what a GPU does in one pass is one operator here, too: our attention is the
operator of the Triton kernels and keeps their states, SDPA is flash attention, an RMSNorm keeps its input and a number
for each row. What a kernel takes for itself while it runs is not counted, nor are workspaces of cuBLAS, 32 MiB each.

Rows of kind "train" are without checkpointing, two texts of 16,384 tokens: `language_speed.py` has measured the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers as hf
from language_speed import Bench, Cell, loss_of
from live_bytes import LiveBytes
from torch import Tensor

from affinear.bench.machine import describe
from affinear.ops.triton import backend as triton_backend

LENGTHS = (8192, 16384, 32768, 65536, 131072)
MODELS = ("mala", "nala", "llama chunked", "llama")
ADAMW = 2  # numbers that it keeps for each weight
ONE_PASS = "one_pass"  # a kind of attention


def cells(probe: bool) -> list[Cell]:
    """Everything that is counted."""
    long = [Cell("memory", who, 1, length) for length in ((64, 128) if probe else LENGTHS) for who in MODELS]
    return [Cell("train", who, 2, 64 if probe else 16384) for who in MODELS] + long


def count(cell: Cell, probe: bool) -> dict[str, Any]:
    """What a cell comes to, in GiB."""
    bench = Bench(torch.device("meta"), probe, 0)
    name, _, way = cell.who.partition(" ")
    model: Any = bench.llama(ONE_PASS) if name == "llama" else bench.ours(name)
    model.train()
    if cell.kind == "memory":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.zeros(cell.batch, cell.length, dtype=torch.long, device="meta")
    weights = sum(weight.nbytes for weight in model.parameters())
    with as_on_a_gpu([*model.parameters(), *model.buffers(), tokens]) as live:
        loss = loss_of(model, tokens, chunked=way == "chunked")
        kept = live.now
        loss.backward()
    sizes = {"weights": weights, "adamw": ADAMW * weights, "kept": kept, "peak": (1 + ADAMW) * weights + live.most}
    return {f"{what}_gib": size / 2**30 for what, size in sizes.items()}


@contextmanager
def as_on_a_gpu(there: Iterable[Tensor]) -> Generator[LiveBytes]:
    """Within, bytes are counted, and the meta device takes the operators that a GPU takes."""
    ours = import_module("affinear.ops.attention")  # the package has a function of that name
    kernels = mock.patch.object(ours, "_engine", return_value=triton_backend)
    with kernels, mock.patch.object(F, "rms_norm", _norm), LiveBytes(there) as live:
        yield live


class _Norm(torch.autograd.Function):
    """RMSNorm in one pass, as far as memory goes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    return _Norm.apply(x, weight)  # pyright: ignore


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal SDPA in one pass; transformers makes no mask for kinds of attention that it does not know."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(query, key, value, 0.0, True, scale=kwargs.get("scaling"))[0].transpose(1, 2), None


hf.AttentionInterface.register(ONE_PASS, _attend)


def main() -> int:
    """Count everything, and write a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    parser.add_argument("--probe", action="store_true", help="a tiny shape, to see that all runs")
    given = parser.parse_args()
    rows = list[dict[str, Any]]()
    for cell in cells(given.probe):
        rows.append({**vars(cell), **count(cell, given.probe)})
        print("{kind} {who}, {batch} x {length}: {peak_gib:.2f} GiB".format(**rows[-1]), flush=True)
    about = "counted on torch's meta device, not measured"
    machine = {**describe(torch.device("cpu")), "transformers": hf.__version__}
    given.out.write_text(json.dumps({"about": about, "machine": machine, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

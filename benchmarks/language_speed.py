"""Language models beside Llama: time and memory of a token, tokens trained per second, memory of long training.

    PYTHONPATH=src python benchmarks/language_speed.py --out language.json --minutes 20
    PYTHONPATH=src python benchmarks/language_speed.py --out rest.json --beside language.json --seconds 1
    PYTHONPATH=src python benchmarks/language_speed.py --out rest.json --wait free --minutes 0.5
    PYTHONPATH=src python benchmarks/language_speed.py --out probe.json --probe  # tiny, a minute, without a GPU too
    until PYTHONPATH=src python benchmarks/language_speed.py --out rest.json --beside language.json; do :; done

Every cell is timed by itself, in bfloat16, with random weights of the 340M shape, and added to --out as it comes; the
same command goes on with the cells that are missing; those of --beside count as there. No cell begins after --minutes.
With --wait all cells are tried first, on few tokens, so that kernels are built while others use the GPU; they are timed
when the file is there, in --minutes from then on.
What does not fit is a row that says so. A GPU that is lost, as by an illegal access to memory, ends the process with 1:
the row says so, and the same command goes on with the next cell; it comes back to that one when nothing else is
missing, once. So the last command above ends by itself.
Rivals: LlamaForCausalLM of the same shape with SDPA, with its growing and its static cache, and as one graph over keys
that stand in place; fla's linear-attention model where it can be imported (PYTHONPATH). What lies behind a decoded
token is random: its size costs, and not what it says.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from affinear.bench.machine import describe
from affinear.bench.timing import capture, run_aside, seconds_of, time_calls
from affinear.models.language import AffinearCache, AffinearForCausalLM, Stepper, chunked_cross_entropy, preset
from affinear.models.language.cache import Past, StateLayer
from affinear.ops import State
from affinear.ops.mechanisms import find

DTYPE = torch.bfloat16
STEP_TOKENS = 32768  # of a training step, whatever the length
FEW = 128  # tokens of the step before the one that is measured
SOME = 4096  # tokens of a text by which kernels are built
TRIES = 2  # of a cell with which the GPU was lost, as whoever else uses the GPU may be the reason
ROOM = 0.92  # of the GPU's memory that a cache may be expected to take
DECODERS = ("mala graph", "llama graph", "mala", "llama", "llama static")
PROBE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    Attributes:
        kind: "decode", "train" or "memory".
        who: The model.
        batch: Sequences.
        length: Tokens before the one that is decoded, or of a sequence to train on.
    """

    kind: str
    who: str
    batch: int
    length: int


def cells(probe: bool) -> Iterator[Cell]:
    """Everything that is measured, what the bars ask for first."""
    lengths = (64, 256) if probe else (4096, 16384, 1024, 131072)
    trained = (64, 128) if probe else (16384, 2048)
    long = (128, 256) if probe else (131072, 65536, 32768)
    for who in DECODERS:
        for length in lengths:
            yield Cell("decode", who, 2 if probe else 64, length)
    for length in trained:
        for who in ("mala", "llama", "nala"):
            yield _training(who, length, probe)
    yield Cell("memory", "mala", 1, long[0])
    for who in DECODERS:
        for length in lengths:
            yield Cell("decode", who, 1, length)
    for length in trained:
        yield _training("llama chunked", length, probe)
    for length in long[1:]:
        yield Cell("memory", "mala", 1, length)
    for length in reversed(trained):  # whose kernels try many sizes first
        yield _training("fla", length, probe)
    for length in reversed(long):
        yield Cell("memory", "llama chunked", 1, length)
    for length in () if probe else trained:  # minutes of compiling each: last
        for who in ("mala compiled", "llama compiled"):
            yield _training(who, length, probe)


def _training(who: str, length: int, probe: bool) -> Cell:
    return Cell("train", who, (256 if probe else STEP_TOKENS) // length, length)


class Bench:
    """Models of one shape on one device.

    Args:
        device: Where.
        probe: Whether to take a tiny shape.
        seconds: About how long to time a cell.
    """

    def __init__(self, device: torch.device, probe: bool, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.shape = PROBE if probe else {}

    def ours(self, mechanism: str) -> AffinearForCausalLM:
        """Our model."""
        config = preset("nala_340m", **{**self.shape, "mechanism": mechanism})
        with self.device:  # weights are drawn where they are used: quicker by seconds
            return AffinearForCausalLM(config).to(DTYPE)  # pyright: ignore

    def llama(self, attention: str = "sdpa") -> Any:
        """Llama of the same shape."""
        ours = preset("nala_340m", **self.shape)
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        sizes: dict[str, Any] = {name: getattr(ours, name) for name in names}
        config = hf.LlamaConfig(**sizes, tie_word_embeddings=True, max_position_embeddings=2**18)
        with self.device:
            return hf.LlamaForCausalLM._from_config(config, attn_implementation=attention).to(DTYPE)  # pyright: ignore

    def fla(self) -> Any:
        """Linear attention of fla, of the same shape; ImportError where there is none."""
        from fla.models import LinearAttentionConfig, LinearAttentionForCausalLM  # pyright: ignore

        ours = preset("nala_340m", **self.shape)
        config = LinearAttentionConfig(
            hidden_size=ours.hidden_size, intermediate_size=ours.intermediate_size, vocab_size=ours.vocab_size,
            num_hidden_layers=ours.num_hidden_layers, num_heads=ours.num_attention_heads, feature_map="elu",
            tie_word_embeddings=True, attn_mode="chunk",
        )  # fmt: skip
        with self.device:
            return LinearAttentionForCausalLM(config).to(DTYPE)

    def measure(self, cell: Cell) -> dict[str, Any]:
        """What a cell came to."""
        return {"decode": self.decode, "train": self.train, "memory": self.memory}[cell.kind](cell)

    @torch.inference_mode()
    def decode(self, cell: Cell) -> dict[str, Any]:
        """Milliseconds per token of every sequence, and bytes held, with a context of so many tokens behind."""
        if cell.who.startswith("llama"):
            self._check_room(cell)
        kind = "unmasked" if cell.who == "llama graph" else "sdpa"
        model = (self.llama(kind) if cell.who.startswith("llama") else self.ours("mala")).eval()
        token = torch.zeros(cell.batch, 1, dtype=torch.long, device=self.device)
        if cell.who.startswith("llama"):
            step = self._llama_step(model, token, cell)
        else:
            cache = filled(model, cell.batch, cell.length)
            step = partial(model, token, past_key_values=cache, logits_to_keep=1)
            if cell.who.endswith("graph"):
                step = partial(Stepper(model, cache), token[:, 0])
        step()  # the first compiles, and fills what is filled lazily
        self._forget_peak()
        times = time_calls([step], self.device, self.seconds)
        return {"ms": times.median, "spread": [times.lower, times.upper], "samples": times.samples, **self._held()}

    def _llama_step(self, model: Any, token: Tensor, cell: Cell) -> Callable[[], Any]:
        """A step of Llama with random keys behind it."""
        config = model.config
        width = config.hidden_size // config.num_attention_heads
        shape = cell.batch, config.num_attention_heads, cell.length, width
        cache: Any = hf.DynamicCache(config=config)
        if cell.who.endswith("static"):
            cache = hf.StaticCache(config=config, max_cache_len=cell.length + 512)
        if cell.who.endswith("graph"):
            cache.layers = [Standing() for _ in range(config.num_hidden_layers)]
        for layer in range(config.num_hidden_layers):
            cache.update(*(torch.randn(shape, device=self.device, dtype=DTYPE) for _ in range(2)), layer)
        position = torch.full((cell.batch, 1), cell.length - 1, device=self.device)
        step = partial(model, token, past_key_values=cache, position_ids=position, logits_to_keep=1)
        return self._captured(step) if cell.who.endswith("graph") else step

    def _captured(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """A step as one graph; plainly without a GPU."""
        if self.device.type != "cuda":
            return step
        run_aside([step, step])
        graph, kept = capture([step])
        return lambda: (graph.replay(), kept)

    def _check_room(self, cell: Cell) -> None:
        """Raise OutOfMemoryError where keys and values cannot fit, and say what they would take."""
        config = preset("nala_340m", **self.shape)
        needed = 2 * 2 * cell.batch * cell.length * config.hidden_size * config.num_hidden_layers
        if self.device.type == "cuda" and needed > ROOM * torch.cuda.get_device_properties(self.device).total_memory:
            raise torch.OutOfMemoryError(f"its keys and values would take {needed / 2**30:.0f} GiB")

    def train(self, cell: Cell) -> dict[str, Any]:
        """Tokens per second of forward, backward and AdamW."""
        step = self._training(cell)
        step()
        self._forget_peak()
        times = time_calls([step], self.device, self.seconds)
        tokens = cell.batch * cell.length
        return {
            "tokens_per_second": 1e3 * tokens / times.median,
            "ms": times.median,
            "samples": times.samples,
            **self._held(),
        }

    def memory(self, cell: Cell) -> dict[str, Any]:
        """Peak bytes of a training step with checkpointing, and how long that one took, the first of its length."""
        step = self._training(cell, checkpointing=True)
        step(FEW)  # makes the optimizer's state
        self._forget_peak()
        seconds = seconds_of(step, self.device)
        return {"ms": 1e3 * seconds, "samples": 1, **self._held()}

    def _training(self, cell: Cell, checkpointing: bool = False) -> Callable[..., Any]:
        """A step of training, on as many tokens of each sequence as it is called with, all if with none."""
        name, _, way = cell.who.partition(" ")
        model: Any = {"llama": self.llama, "fla": self.fla}.get(name, partial(self.ours, name))()
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        tokens = torch.randint(model.config.vocab_size, (cell.batch, cell.length), device=self.device)
        run: Any = torch.compile(model) if way == "compiled" else model

        def step(length: int | None = None) -> None:
            loss_of(run, tokens[:, :length], chunked=way == "chunked").backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return step

    def _forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def _held(self) -> dict[str, Any]:
        """The most memory since `_forget_peak`, weights included."""
        on_gpu = self.device.type == "cuda"
        return {"peak_gib": torch.cuda.max_memory_allocated(self.device) / 2**30 if on_gpu else None}


def loss_of(model: Any, tokens: Tensor, chunked: bool) -> Tensor:
    """A model's own loss of foretelling its tokens, or our chunked one."""
    if not chunked:
        return model(tokens, labels=tokens, use_cache=False).loss
    hidden = model.model(tokens, use_cache=False).last_hidden_state[:, :-1]
    return chunked_cross_entropy(hidden, model.lm_head.weight, tokens[:, 1:])


class Standing(DynamicLayer):
    """Keys and values that lie in place, the new token's over the last: nothing is copied and nothing masked."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """All keys and values, the given ones among them."""
        if self.keys is None or self.values is None:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
        else:
            self.keys[:, :, -1:] = key_states
            self.values[:, :, -1:] = value_states
        return self.keys, self.values


def unmasked(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """SDPA of a token that sees everything; transformers makes no mask for kinds of attention that it does not know."""
    return F.scaled_dot_product_attention(query, key, value, scale=kwargs.get("scaling")).transpose(1, 2), None


hf.AttentionInterface.register("unmasked", unmasked)


def filled(model: AffinearForCausalLM, batch: int, length: int) -> AffinearCache:
    """A cache that says it has seen so many tokens; what it holds costs the same whatever they were."""
    config, device = model.config, model.device
    heads, width = config.key_heads, config.head_width
    features = find(config.mechanism).key_map(torch.zeros(1, 1, 1, width)).shape[-1]
    cache = AffinearCache(config)
    for layer in cache.layers:
        assert isinstance(layer, StateLayer)
        means = torch.rand(3, batch, heads, features, device=device)
        state = State(
            torch.full((batch, heads), length, device=device), means[0],
            torch.rand(batch, heads, width, device=device),
            torch.randn(batch, heads, features, width, device=device) / 100, find(config.mechanism), means[1],
        )  # fmt: skip
        layer.memory = Past(state, None, length)
    return cache


def main() -> int:
    """Measure what is missing, and print it all; 1 if the GPU was lost meanwhile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON, appended to")
    parser.add_argument("--beside", type=Path, help="JSON of an earlier run, whose rows are not measured again")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--wait", type=Path, help="get ready first, and time when this file is there")
    parser.add_argument("--only", default="decode,train,memory", help="kinds, comma-separated")
    parser.add_argument("--who", help="models, comma-separated; all if left out")
    parser.add_argument("--batch", type=int, help="cells of so many sequences alone")
    parser.add_argument("--seconds", type=float, default=3.0, help="about how long to time a cell")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--probe", action="store_true", help="a tiny shape, to see that all runs")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    bench, rows = Bench(device, chosen.probe, 0.2 if chosen.probe else chosen.seconds), Rows(chosen.out, chosen.beside)
    rows.kept["machine"] = {**describe(device), "transformers": hf.__version__}
    kinds, models = chosen.only.split(","), None if chosen.who is None else chosen.who.split(",")
    asked = [cell for cell in cells(chosen.probe) if cell.kind in kinds and (models is None or cell.who in models)]
    missing = rows.missing([cell for cell in asked if chosen.batch in (None, cell.batch)])
    try:
        if chosen.wait is not None:
            get_ready(Bench(device, chosen.probe, 0.01), missing, chosen.wait, rows)
        time_all(bench, missing, chosen.minutes, rows)
    except LostGPU as error:
        print(error, flush=True)
        return 1
    finally:
        print(table(rows.kept["rows"]), flush=True)
    return 0


class LostGPU(Exception):
    """Nothing can be measured by this process any more."""


class Rows:
    """What was measured, in a file that is written anew with every row.

    Args:
        path: Of the file.
        beside: That of an earlier run, whose rows are not measured again.
    """

    def __init__(self, path: Path, beside: Path | None) -> None:
        self.path = path
        self.kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
        self.earlier: list[dict[str, Any]] = [] if beside is None else json.loads(beside.read_text())["rows"]

    def missing(self, asked: Sequence[Cell]) -> list[Cell]:
        """Cells without a row, and behind them those with which the GPU was lost, unless that was `TRIES` times."""
        lost = {cell_of(row): row["lost"] for row in self.kept["rows"] if "lost" in row}
        done = {cell_of(row) for row in (*self.kept["rows"], *self.earlier)}
        again = [cell for cell in asked if lost.get(cell, TRIES) < TRIES]
        return [cell for cell in asked if cell not in done] + again

    def add(self, cell: Cell, found: dict[str, Any]) -> None:
        """Keep the row of a cell in place of one that it may have.

        Raises:
            LostGPU: If the GPU was lost with it.
        """
        before = [row for row in self.kept["rows"] if cell_of(row) == cell]
        row = {**asdict(cell), **found}
        if "lost" in row:
            row["lost"] += sum(one.get("lost", 0) for one in before)
        self.kept["rows"] = [one for one in self.kept["rows"] if one not in before] + [row]
        print(row, flush=True)
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(self.kept, indent=1))
        draft.replace(self.path)
        if "lost" in row:
            raise LostGPU(
                f"The GPU does nothing more for this process; {self.path} has all rows, the same command goes on"
            )


def cell_of(row: dict[str, Any]) -> Cell:
    """What a row is of."""
    return Cell(row["kind"], row["who"], row["batch"], row["length"])


def time_all(bench: Bench, missing: Sequence[Cell], minutes: float, rows: Rows) -> None:
    """Measure cells, and begin none after so many minutes."""
    began = time.monotonic()
    for cell in missing:
        if time.monotonic() - began > 60 * minutes:
            print(f"{minutes:g} minutes are over; the same command goes on", flush=True)
            break
        rows.add(cell, attempt(bench, cell))


def get_ready(bench: Bench, missing: Sequence[Cell], free: Path, rows: Rows) -> None:
    """Build all kernels on few tokens, unless the file comes before, and wait for it.

    Raises:
        LostGPU: If the GPU was lost with a cell, which then has a row.
    """
    for cell in missing:
        if free.exists():
            return
        few = min(cell.length, SOME) if cell.kind != "decode" else cell.length
        found = attempt(bench, replace(cell, batch=min(cell.batch, 2), length=few))
        if "lost" in found:
            rows.add(cell, found)
        print(f"{cell}: ready in {found['took_s']} s {found.get('error', '')}", flush=True)
    print("ready", flush=True)
    while not free.exists():
        time.sleep(0.1)


def attempt(bench: Bench, cell: Cell) -> dict[str, Any]:
    """A cell's numbers, or why there are none."""
    start = time.monotonic()
    try:
        found = bench.measure(cell)
    except torch.OutOfMemoryError as error:
        found = {"error": f"out of memory: {str(error).splitlines()[0][:200]}"}
    except ImportError as error:
        found = {"error": f"cannot be imported: {error}"}
    except Exception as error:  # a rival that fails is a row, not the end
        found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    gc.collect()
    if cell.who.endswith("compiled"):
        torch.compiler.reset()
    if why := lost(bench.device):
        found = {"error": f"the GPU was lost: {why}", "lost": 1}
    return {**found, "took_s": round(time.monotonic() - start, 1)}


def lost(device: torch.device) -> str:
    """Why a GPU does nothing more for this process, as after an illegal access to memory; empty if it does."""
    if device.type == "cuda":
        try:
            torch.cuda.empty_cache()
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            return str(error).splitlines()[0][:200]
    return ""


def table(rows: list[dict[str, Any]]) -> str:
    """All rows, for people."""
    lines = ["| what | who | batch | tokens | ms | tokens/s | peak GiB |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        numbers = [row.get("ms"), row.get("tokens_per_second"), row.get("peak_gib")]
        shown = [row["error"], "", ""] if "error" in row else ["" if x is None else f"{x:.4g}" for x in numbers]
        lines.append(f"| {row['kind']} | {row['who']} | {row['batch']} | {row['length']} | {' | '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())

"""What Whisper keeps when its encoder becomes linear: word errors on speakers never heard, and the encoder's time.

    PYTHONPATH=src python evidence/linearize_whisper.py --data packed --out whisper --device cuda --minutes 9
    PYTHONPATH=src nice python evidence/linearize_whisper.py --data packed --out whisper --judged 9 --batch 1 \
        --steps 60 120 --mechanisms mala --minutes 40

takes what `evidence/packing/pack_teachers.py whisper` packed: Whisper tiny.en, and ten hours of a game's voices in
windows of at most 28 seconds. Five speakers are held out. Forms: `pure` is linear alone, with a learned map and a
convolution; `window` sees the 63 tokens (1.3 s) before and after each by softmax, and the first four, beside it. Rows:
the teacher; that window alone; swapped and not trained; after every layer of the encoder has learned to answer as its
teacher's; after the encoder's output and the words that the frozen decoder makes of it have as well, with all weights
of the encoder free. The bar is 1.15 times the teacher's word errors. Words are compared in lower case without signs;
numbers are not spelled out, which costs every row the same.

Then, by --part speed, how long an encoder takes for 30 seconds and up to an hour in one piece, teacher and student in
turns, and from which length on the linear one is faster. Whisper's encoder has 1,500 positions, sines that were never
trained: for longer sounds the same sines go on. No words are asked of more than 30 seconds: the decoder knows no more.
Without `--data` this part has random weights, as they take as long.

Rows are in `whisper.json` as they come; when the time is over all is kept, and the same command goes on. `--probe`
times a step of each stage.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import affinear
from affinear.bench.timing import in_turns
from affinear.linearizing.distil import Weights, network_loss
from affinear.tasks.speech.metric import Errors, compare
from affinear.tasks.speech.text import plain
from packing.pack_teachers import BANDS, BEGIN, END, FRAMES, PLAIN, STEP, Spelling, read_windows, whisper_network
from running.stages import (
    MECHANISMS,
    Clock,
    Rows,
    Stage,
    layer_loss,
    layers_apart,
    layers_of,
    probed,
    stages_of,
    taught,
)

HELD_OUT = ("syreen", "supox", "yehat", "yehatrebels", "shofixti")  # as in speech.py
FEATURES = "model.encoder.layer_norm"
MOST = 160  # tokens of a window that are listened to
LONGEST_TEXT = 300  # tokens of a window that is learned from; the decoder has room for 448
HOUR = 180_000  # tokens of the encoder, 50 of a second
LENGTHS = (1500, 3000, 6000, 12_000, 24_000, 48_000, 96_000, HOUR)
BAR = 1.15
WINDOW: dict[str, Any] = {"window": 64, "sinks": 4}
FORMS = ("window", "pure")

# ------------------------------------------------------------------------------------------------ data


class Windows:
    """Sounds and what is said in them.

    Args:
        folder: What was packed.
        judged: How many windows of held-out speakers are judged, at most; they are spread over all of them.
        device: Where the sounds are.
    """

    def __init__(self, folder: Path, judged: int, device: torch.device) -> None:
        self.rows, self.steps = read_windows(folder)
        self.device, self.spelling = device, Spelling.read(folder / "tokens.tiktoken")
        held = [i for i, row in enumerate(self.rows) if row["speaker"] in HELD_OUT]
        self.train = [
            i for i, row in enumerate(self.rows) if row["speaker"] not in HELD_OUT and len(row["tokens"]) < 300
        ]
        self.test = held[:: max(1, len(held) // judged)][:judged]

    def sound(self, index: int, speed: float = 1.0, late: int = 0, louder: float = 0.0) -> Tensor:
        """Features (80, 3000) as Whisper takes them; after the end there is silence, which is the floor."""
        row, steps = self.rows[index], self.steps[index].to(self.device).float()
        if speed != 1:
            length = min(FRAMES, round(steps.shape[1] / speed))
            steps = F.interpolate(steps[None], size=length, mode="linear")[0]
        late = min(late, FRAMES - steps.shape[1])
        whole = F.pad(steps, (late, FRAMES - late - steps.shape[1]))
        return row["floor"] + louder + STEP * whole

    def drawn(self, count: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sounds of a step, a little faster or slower, later and louder; tokens; and where a token is asked for."""
        random = torch.Generator().manual_seed(step)
        epoch, first = divmod(step * count, len(self.train))
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(epoch)).tolist()
        chosen = [self.train[order[(first + i) % len(order)]] for i in range(count)]
        draws = torch.rand(count, 3, generator=random).tolist()
        sounds = [
            self.sound(i, 0.9 + 0.2 * a, int(100 * b), 0.2 * (c - 0.5))
            for i, (a, b, c) in zip(chosen, draws, strict=True)
        ]
        return torch.stack(sounds), *self.asked(chosen)

    def asked(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What the decoder is given (B, T), and where it is to say the text's tokens and the end."""
        given = [[BEGIN, PLAIN, *self.rows[i]["tokens"]] for i in indices]
        length = max(map(len, given))
        ids = torch.tensor([[*one, *[END] * (length - len(one))] for one in given], device=self.device)
        place = torch.arange(length, device=self.device)
        counts = torch.tensor([len(one) for one in given], device=self.device)
        return ids, (place >= 1) & (place < counts[:, None])


# ------------------------------------------------------------------------------------------------ judging


@torch.no_grad()
def heard(network: Any, sounds: Tensor) -> list[list[int]]:
    """The tokens that a network makes of sounds: always the likeliest, without times."""
    states = network.model.encoder(sounds).last_hidden_state
    ids = torch.tensor([[BEGIN, PLAIN]] * len(sounds), device=sounds.device)
    found: list[Tensor] = []
    done, cache = torch.zeros(len(sounds), dtype=torch.bool, device=sounds.device), None
    for _ in range(MOST):
        before: dict[str, Any] = {"encoder_hidden_states": states, "past_key_values": cache, "use_cache": True}
        answer = network.model.decoder(input_ids=ids, **before)
        cache = answer.past_key_values
        logits = network.proj_out(answer.last_hidden_state[:, -1])[:, : END + 1]
        ids = logits.argmax(-1, keepdim=True).masked_fill(done[:, None], END)
        done |= ids[:, 0] == END
        if bool(done.all()):
            break
        found.append(ids[:, 0])
    rows = torch.stack(found, dim=1).tolist() if found else [[] for _ in sounds]
    return [[token for token in row if token != END] for row in rows]


def judge(network: nn.Module, windows: Windows, batch: int) -> dict[str, Any]:
    """Word errors on what is held out, by speaker, and the first text."""
    network.eval()
    speakers: dict[str, Errors] = {}
    texts: list[str] = []
    for first in range(0, len(windows.test), batch):
        some = windows.test[first : first + batch]
        tokens = heard(network, torch.stack([windows.sound(i) for i in some]))
        for index, mine in zip(some, tokens, strict=True):
            row = windows.rows[index]
            texts.append(windows.spelling.decode(mine).strip())
            errors = compare(plain(row["text"]), plain(texts[-1]))
            speakers[row["speaker"]] = speakers.get(row["speaker"], Errors()) + errors
    total = sum(speakers.values(), Errors())
    by = {name: round(errors.numbers["wer"], 4) for name, errors in sorted(speakers.items())}
    numbers = {name: round(value, 4) for name, value in total.numbers.items()}
    return {**numbers, "words": total.words, "windows": len(texts), "speakers": by, "heard": texts[0][:200]}


# ------------------------------------------------------------------------------------------------ teaching


def listen(network: Any, sounds: Tensor) -> Any:
    """What the encoder makes of sounds."""
    return network.model.encoder(sounds)


def loss_of(stage: Stage, teacher: nn.Module, student: nn.Module, windows: Windows, batch: int, step: int) -> Tensor:
    """A step's loss."""
    sounds, ids, asked = windows.drawn(batch, step)
    if stage.name == "layers":
        return layer_loss(teacher, student, lambda network: listen(network, sounds))

    def speak(network: nn.Module) -> Tensor:
        return network(input_features=sounds, decoder_input_ids=ids, use_cache=False).logits[asked]

    return network_loss(teacher, student, speak, weights=Weights(), features=FEATURES)


def swap(teacher: nn.Module, mechanism: str, form: str, given: argparse.Namespace) -> nn.Module:
    """The copy with a linear encoder, and what is learned beside the mechanism."""
    learned: dict[str, Any] = {"feature_map": given.feature_map, "gain": True, "convolution": given.convolution}
    return affinear.linearize(teacher, mechanism, **(WINDOW if form == "window" else learned))[0].eval()


def student_of(given: argparse.Namespace, mechanism: str, form: str, teacher: nn.Module, windows: Windows, rows: Rows,
               clock: Clock, *, teach: bool) -> bool:  # fmt: skip
    """The rows of a mechanism in a form; False if the time is over before."""
    student = swap(teacher, mechanism, form, given)
    sounds = torch.stack([windows.sound(i) for i in windows.test[:2]])

    def tell(row: str, **more: Any) -> None:
        key = {"mechanism": mechanism, "form": form, "row": row}
        if rows.find(**key) is None:
            apart = layers_apart(teacher, student, lambda network: listen(network, sounds))
            rows.add(**key, **judge(student, windows, given.judge_batch), layers=apart, **more)

    tell("swapped")
    names = [name for name, _ in student.named_parameters() if name.startswith("model.encoder.")]
    free = [name for name in names if "embed_positions" not in name]
    for stage in stages_of(given.steps, given.lr, given.new_lr) if teach else ():
        told = taught(
            student,
            stage,
            layers_of(student) if stage.name == "layers" else free,
            lambda step, stage=stage: loss_of(stage, teacher, student, windows, given.batch, step),
            given.out / "state" / f"{mechanism}-{form}-{stage.name}.pt",
            clock,
        )
        if told is None:
            return False
        tell(stage.name, **told)
    return True


# ------------------------------------------------------------------------------------------------ time


def sines(tokens: int, width: int) -> Tensor:
    """Whisper's positions (tokens, width), as many as are asked for."""
    half = width // 2
    rate = torch.exp(-math.log(10_000) / (half - 1) * torch.arange(half))
    angle = torch.arange(tokens)[:, None] * rate
    return torch.cat((angle.sin(), angle.cos()), dim=1)


def longer(network: Any, tokens: int) -> Any:
    """A copy of the encoder that takes so many tokens."""
    encoder = copy.deepcopy(network.model.encoder)
    encoder.config = copy.deepcopy(encoder.config)
    old = encoder.embed_positions.weight
    made = nn.Embedding(tokens, old.shape[1], device=old.device, dtype=old.dtype)
    made.weight.data.copy_(sines(tokens, old.shape[1]))
    made.weight.data[: len(old)] = old[:tokens]  # as the file has them, in 16 bits
    encoder.embed_positions = made.requires_grad_(False)
    encoder.config.max_source_positions = encoder.max_source_positions = tokens
    return encoder


def speeds(given: argparse.Namespace, teacher: nn.Module, rows: Rows, clock: Clock, device: torch.device) -> None:
    """Seconds of the encoder by length, teacher and student in turns."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for mechanism, form in itertools.product(given.mechanisms, given.forms):
        student = swap(teacher, mechanism, form, given)
        for tokens in LENGTHS:
            key: dict[str, Any] = {"kind": "speed", "mechanism": mechanism, "form": form, "tokens": tokens}
            if clock.over or tokens > given.longest or rows.find(**key):
                continue
            both = tokens <= given.longest_softmax
            sounds = torch.randn(1, BANDS, 2 * tokens, device=device, dtype=dtype)
            networks = [longer(one, tokens).to(dtype) for one in ((student, teacher) if both else (student,))]
            with torch.no_grad():
                times = in_turns([functools.partial(one, sounds) for one in networks], device, given.turns)
            rows.add(**key, linear=times[0], softmax=times[1] if both else None)


def crossing(rows: Sequence[dict[str, Any]]) -> str:
    """From which length on a student is faster, as far as was measured."""
    both = [row for row in rows if row["softmax"]]
    faster = [row["tokens"] for row in both if row["linear"] < row["softmax"]]
    slower = [row["tokens"] for row in both if row["linear"] >= row["softmax"]]
    if not both:
        return "never measured beside softmax"
    if not slower:
        return f"faster from {min(faster):,} tokens on ({min(faster) / 50:.0f} s), the shortest that was measured"
    after = [tokens for tokens in faster if tokens > max(slower)]
    if not after:
        return f"not faster at any length up to {max(slower):,} tokens ({max(slower) / 50:.0f} s)"
    return f"faster from between {max(slower):,} and {min(after):,} tokens on"


# ------------------------------------------------------------------------------------------------ all


def probe(given: argparse.Namespace, teacher: nn.Module, windows: Windows) -> None:
    """Seconds of a step of each stage and of a judgement, and what all would take."""
    total = 0.0
    for mechanism, form in itertools.product(given.mechanisms, given.forms):
        student = swap(teacher, mechanism, form, given)
        for stage in stages_of(given.steps, given.lr, given.new_lr):
            total += probed(
                f"{mechanism}, {form},",
                stage,
                lambda step, stage=stage, student=student: loss_of(stage, teacher, student, windows, given.batch, step),
                windows.device,
            )
    began = time.monotonic()
    told = judge(teacher, windows, given.judge_batch)
    judged = time.monotonic() - began
    total += judged * (2 + 3 * len(given.mechanisms) * len(given.forms))
    print(f"teacher's WER {100 * told['wer']:.1f} in {judged:.0f} s; in all {total / 60:.1f} min, speeds not counted")


def table(rows: Rows) -> None:
    """What came out."""
    teacher = rows.find(row="teacher")
    print("| encoder | form | row | WER, % | of the teacher's | layers' errors |\n|---|---|---|---|---|---|")
    for row in (row for row in rows.rows if "row" in row):
        times = row["wer"] / teacher["wer"] if teacher else math.nan
        layers = ", ".join(f"{error:.2f}" for error in row.get("layers", ()))
        told = f"| {row['mechanism']} | {row['form']} | {row['row']} "
        print(f"{told}| {100 * row['wer']:.1f} | {times:.2f} | {layers} |")
    timed = [row for row in rows.rows if row.get("kind") == "speed"]
    if timed:
        print("\n| encoder | form | tokens | seconds of sound | ms, linear | ms, softmax |\n|---|---|---|---|---|---|")
    for row in timed:
        other = f"{1e3 * row['softmax']:.1f}" if row["softmax"] else "not measured"
        head = f"| {row['mechanism']} | {row['form']} | {row['tokens']:,} | {row['tokens'] / 50:.0f} "
        print(f"{head}| {1e3 * row['linear']:.1f} | {other} |")
    for mechanism, form in dict.fromkeys((row["mechanism"], row["form"]) for row in timed):
        mine = [row for row in timed if (row["mechanism"], row["form"]) == (mechanism, form)]
        print(f"{mechanism}, {form}: {crossing(mine)}")


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="what pack_teachers.py wrote; time can do without")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", choices=("all", "words", "speed", "table"), default="all")
    parser.add_argument("--minutes", type=float, default=9, help="after which all is kept and it ends")
    parser.add_argument("--judged", type=int, default=200, help="windows of held-out speakers")
    parser.add_argument("--judge-batch", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, nargs=2, default=(500, 2000), help="of both stages")
    parser.add_argument("--lr", type=float, nargs=2, default=(5e-4, 1e-4), help="of the teacher's weights, by stage")
    parser.add_argument("--new-lr", type=float, nargs=2, default=(3e-3, 3e-4), help="of what linearizing added")
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--taught", nargs="+", help="mechanisms that go through the stages; all, if not given")
    parser.add_argument("--feature-map", default="learned", choices=("own", "learned", "hedgehog"))
    parser.add_argument("--convolution", type=int, default=5, help="taps of a convolution of the values; 0 for none")
    parser.add_argument("--longest", type=int, default=HOUR, help="tokens, of --part speed")
    parser.add_argument("--longest-softmax", type=int, default=HOUR, help="tokens, of the teacher's")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--probe", action="store_true", help="time a few steps, and stop")
    return parser


def main() -> int:
    """Do what fits into the time; 1 if something is left to do."""
    parser = arguments()
    given = parser.parse_args()
    if given.data is None and given.part in ("all", "words"):
        parser.error(f"--part {given.part} needs --data")
    clock, device = Clock(given.minutes), torch.device(given.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    names = ("judged", "batch", "steps", "lr", "new_lr", "feature_map", "convolution")
    rows = Rows(given.out / "whisper.json", {name: getattr(given, name) for name in names})
    if given.part == "table":
        table(rows)
        return 0
    teacher = whisper_network(given.data).to(device).requires_grad_(False)
    done = True
    if given.part != "speed":
        assert given.data is not None  # as the parser has seen
        held = teacher.model.encoder.embed_positions.weight.cpu()
        print(f"positions are sines to {float((held - sines(*held.shape)).abs().max()):.0e}", flush=True)
        windows = Windows(given.data, given.judged, device)
        print(f"{len(windows.train)} windows to learn from, {len(windows.test)} to judge by", flush=True)
        if given.probe:
            probe(given, teacher, windows)
            return 0
        if rows.find(row="teacher") is None:
            rows.add(mechanism="softmax", form="own", row="teacher", **judge(teacher, windows, given.judge_batch))
        if "window" in given.forms:
            student_of(given, "none", "window", teacher, windows, rows, clock, teach=False)
        arms = [(form, mechanism) for form in given.forms for mechanism in given.mechanisms]
        taught_arms = [arm for arm in arms if given.taught is None or arm[1] in given.taught]
        for teach, (form, mechanism) in [(False, arm) for arm in arms] + [(True, arm) for arm in taught_arms]:
            done = not clock.over and student_of(given, mechanism, form, teacher, windows, rows, clock, teach=teach)
            if not done:
                break
    if given.part != "words":
        speeds(given, teacher, rows, clock, device)
    table(rows)
    print("all is done" if done and not clock.over else "the time is over; the same command goes on")
    return int(not done or clock.over)


if __name__ == "__main__":
    raise SystemExit(main())

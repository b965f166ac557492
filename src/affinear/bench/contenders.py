"""Who takes part: the library's backends, `torch.compile` of one, and rivals that compute another function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from affinear.bench.cases import TRAINING, Case, Inputs
from affinear.ops import attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Step = Callable[[], tuple[Tensor, ...]]

TRITON, TORCH, COMPILED, SDPA = "affinear triton", "affinear torch", "compiled torch", "SDPA"
FLA, FLASH_BLA = "fla", "flash_bla"


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _heads_first_copy(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Contender:
    """Somebody who is timed.

    Attributes:
        name: As the tables have it.
        attend: Query, key and value to the answer, all in the layout of `prepare`.
        exact: Whether it computes the case's own function and is held to it; else only finiteness is asked for.
        order: Time grows with tokens to this power.
        prepare: From (B, N, H, D) to the layout it wants, outside the clock.
    """

    name: str
    attend: Attention
    exact: bool = True
    order: int = 1
    prepare: Callable[[Tensor], Tensor] = _as_it_is


def ours(case: Case, device: torch.device, backend: str) -> Contender:
    """A backend of this library by name.

    Examples:
        >>> from affinear.bench.cases import Shape
        >>> ours(Case(Shape(1, 1, 8, 4), torch.float32), torch.device("cpu"), "torch").name
        'affinear torch'
    """
    tables = case.tables(device)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, case.mechanism, causal=case.causal, rotary=tables, backend=backend)

    return Contender(f"affinear {backend}", attend)


def library(case: Case, device: torch.device) -> list[Contender]:
    """This library's backends; Triton's takes part only where there is a GPU."""
    backends = ("triton", "torch") if device.type == "cuda" else ("torch",)
    return [ours(case, device, backend) for backend in backends]


def compiled(case: Case, device: torch.device) -> Contender:
    """`torch.compile` of the torch backend."""
    torch.compiler.reset()  # or the functions of earlier cases use up the limit of recompilations
    return Contender(COMPILED, torch.compile(ours(case, device, "torch").attend, dynamic=False, fullgraph=True))


def sdpa(case: Case) -> Contender:
    """Torch's own softmax attention."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.requires_grad and query.dtype == torch.bfloat16 and query.device.type == "cpu":
            # An illegal instruction (torch 2.13) would end the whole run, not only the row.
            raise NotImplementedError("the backward pass needs a processor with bfloat16 instructions")
        return F.scaled_dot_product_attention(query, key, value, is_causal=case.causal)

    return Contender(SDPA, attend, exact=False, order=2, prepare=_heads_first)


def fla() -> Contender:
    """flash-linear-attention's causal chunk operator: no feature map, no normaliser."""
    chunk = import_module("fla.ops.linear_attn").chunk_linear_attn

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return chunk(query, key, value, normalize=False)[0]

    return Contender(FLA, attend, exact=False)


def flash_bla() -> Contender:
    """flash-bidirectional-linear-attention's operator: normalised, no feature map, so its inputs are made positive."""
    fused = import_module("flash_bla.ops.linear_attn.fused").linear_attention

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return fused(query, key, value)

    return Contender(FLASH_BLA, attend, exact=False, prepare=lambda x: _heads_first_copy(x.abs()))


def contenders(case: Case, device: torch.device, *, slow_starters: bool = False) -> list[Contender]:
    """Everybody who can take part in a case; packages that cannot be imported are left out.

    Args:
        case: What is computed.
        device: Where. Without a GPU there is no Triton and none of the packages that need it.
        slow_starters: Whether to ask those in, too, whose first call takes seconds to minutes.

    Examples:
        >>> from affinear.bench.cases import Shape
        >>> [one.name for one in contenders(Case(Shape(1, 1, 8, 4), torch.float32), torch.device("cpu"))]
        ['affinear torch', 'SDPA']
    """
    gpu = device.type == "cuda"
    found = library(case, device)
    if slow_starters:
        found.append(compiled(case, device))
    found.append(sdpa(case))
    if gpu and case.causal:
        found += _importable(fla)
    if gpu and not case.causal and slow_starters:
        found += _importable(flash_bla)
    return found


def missing_packages() -> list[str]:
    """Which rival packages this machine cannot import, for the notes."""
    return [name for name, build in ((FLA, fla), (FLASH_BLA, flash_bla)) if not _importable(build)]


def step(contender: Contender, inputs: Inputs, direction: str) -> Step:
    """One call over one set of inputs; what it returns is all that it made: the answer, and gradients if asked for."""
    tokens = [contender.prepare(x) for x in inputs.tokens]
    if direction == TRAINING:
        return _training_step(contender.attend, tokens, contender.prepare(inputs.grad))

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (contender.attend(*tokens),)

    return forward


def _training_step(attend: Attention, tokens: Sequence[Tensor], grad: Tensor) -> Step:
    leaves = [x.detach().requires_grad_() for x in tokens]

    def training() -> tuple[Tensor, ...]:
        out = attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    return training


def _importable(build: Callable[[], Contender]) -> list[Contender]:
    try:
        return [build()]
    except Exception:  # a package that is there but broken stops the benchmark no more than one that is not
        return []

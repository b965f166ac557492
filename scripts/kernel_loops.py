"""Count the instructions in the loops of the Triton kernels, built for a chip that is not there.

    python scripts/kernel_loops.py sm_90 mala:128:bfloat16:causal --kernel causal_kernel --lines 12

A kernel that waits for its own instructions gets faster as they get fewer, and most of what is too many shows here
before anything is measured: exponentials computed twice, once per layout; sums by shuffles; spilled registers.
Cases are those of `build_kernels.py`. Key heads get as many query heads as --group says.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build_kernels

LABEL = re.compile(r"\s*(\.L_x_\d+):")
SOURCE = re.compile(r'//## File "([^"]*)", line (\d+)')
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?\s*([A-Z0-9_.]+)(.*?);")
SHORT = 60  # instructions of a loop that is not worth a line


@dataclass(frozen=True)
class Instruction:
    """One line of machine code.

    Attributes:
        name: What it does, such as "FADD" or "HGMMA".
        target: The label it may jump to, or None.
        source: File and line of the library that it comes from.
    """

    name: str
    target: str | None
    source: str


def disassemble(cubin: bytes) -> tuple[list[Instruction], dict[str, int]]:
    """All instructions, and where labels point to."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    source = ""
    for line in build_kernels.inspect(cubin, "nvdisasm", "-c", "-g").splitlines():
        if found := LABEL.match(line):
            labels[found[1]] = len(instructions)
        elif found := SOURCE.search(line):
            source = f"{Path(found[1]).name}:{found[2]}"
        elif found := INSTRUCTION.match(line):
            jump = re.search(r"\.L_x_\d+", found[2]) if found[1].startswith("BRA") else None
            instructions.append(Instruction(found[1].split(".")[0], jump[0] if jump else None, source))
    return instructions, labels


def loops(instructions: list[Instruction], labels: dict[str, int]) -> list[list[Instruction]]:
    """The bodies of all loops: what lies between a jump back and its target."""
    spans = [(labels[x.target], i + 1) for i, x in enumerate(instructions) if x.target in labels]
    return [instructions[begin:end] for begin, end in sorted(spans) if end - begin > SHORT]


def describe(build: build_kernels.Build, cubin: bytes, lines: int) -> str:
    """What a kernel needs of its chip, and what its loops are made of."""
    parts = [str(build)]
    for body in loops(*disassemble(cubin)):
        names = Counter(x.name for x in body)
        parts.append(f"  loop of {len(body)}: " + ", ".join(f"{name} {n}" for name, n in names.most_common(12)))
        for source, number in Counter(x.source for x in body).most_common(lines):
            own = Counter(x.name for x in body if x.source == source)
            parts.append(f"    {number:5} {source:28} " + ", ".join(f"{name} {n}" for name, n in own.most_common(5)))
    return "\n".join(parts)


def main() -> None:
    """Build the cases of the command line, and take them apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", choices=[chip for chip in build_kernels.CHIPS if chip.startswith("sm_")])
    parser.add_argument("case", nargs="+", type=build_kernels.Case.parse, help="mechanism:width[:dtype[:options]]")
    parser.add_argument("--kernel", default="", help="part of the names of those to show")
    parser.add_argument("--lines", type=int, default=0, help="source lines to show of every loop, largest first")
    parser.add_argument("--group", type=int, choices=(1, 2, 4), default=1, help="query heads of a key head")
    arguments = parser.parse_args()
    build_kernels.GROUPS = build_kernels.HEADS // arguments.group

    def show(build: build_kernels.Build, built: Any) -> None:
        if arguments.kernel in build.kernel:
            print(describe(build, built.asm["cubin"], arguments.lines), flush=True)

    build_kernels.build_all(build_kernels.CHIPS[arguments.chip], arguments.case, "binary", show)


if __name__ == "__main__":
    main()

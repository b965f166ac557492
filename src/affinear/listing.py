"""The networks in a table, as they were counted once: read from a file of the package, without torch or timm."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

# Networks of tasks that take no images with a class each, by how they are called; a test holds them to their tasks.
ELSEWHERE = {
    "language": (
        "affinear_tiny",
        "affinear_small",
        "affinear_mala_300m",
        "affinear_nala_340m",
        "llama_tiny",
        "llama_small",
        "llama_340m",
        "mamba_small",
        "mamba2_tiny",
        "mamba2_small",
        *("fla_linear_small", "fla_gla_small", "fla_retnet_small", "fla_delta_small"),  # which need fla
    ),
    "ranges": (
        "sequence_small",
        "sequence_lra_listops",
        "sequence_lra_text",
        "sequence_lra_retrieval",
        "sequence_lra_image",
        "sequence_lra_pathfinder",
    ),
    "speech": ("conformer_small", "conformer_medium", "conformer_large"),
    "generate": ("dit_s_2", "dit_b_2", "dit_l_2", "dit_xl_2"),
    "upscale": ("upscaler_light", "swinir_light"),
}
COUNTED = Path(__file__).with_name("networks.json")  # scripts/count_networks.py writes it, a test counts again


@dataclass(frozen=True)
class Entry:
    """One network.

    Attributes:
        name: As `timm.create_model` takes it.
        size: Side of the images that parameters, work and accuracy are for.
        parameters: Trainable numbers.
        macs: Multiply-adds for one image, those of attention included.
        stages: How many blocks of each stage are linear and how many are softmax; of timm's own, how it attends.
        top1: Published accuracy in percent; None if nobody published one.
        paper: Its name and arXiv number.
        ours: Whether it is made here, and not by timm.
    """

    name: str
    size: int
    parameters: int
    macs: int
    stages: str
    top1: float | None
    paper: str
    ours: bool = True


def entries(pattern: str = "*", others: bool = False) -> list[Entry]:
    """The networks that fit a pattern, family by family, the smallest first.

    Args:
        pattern: Such as "mavit*".
        others: Whether to name timm's own networks that the papers compare with as well.

    Example:
        >>> from affinear.listing import entries
        >>> [(entry.name, entry.parameters) for entry in entries("inline_deit_t*")]
        [('inline_deit_tiny', 6477736)]
    """
    found = [Entry(**fields) for fields in json.loads(COUNTED.read_text(encoding="utf-8"))]
    return [entry for entry in found if (entry.ours or others) and fnmatchcase(entry.name, pattern)]


def elsewhere(pattern: str = "*") -> dict[str, list[str]]:
    """Networks of other tasks that fit a pattern, by task.

    Example:
        >>> from affinear.listing import elsewhere
        >>> elsewhere("conformer_s*")
        {'speech': ['conformer_small']}
    """
    found = {task: [name for name in names if fnmatchcase(name, pattern)] for task, names in ELSEWHERE.items()}
    return {task: names for task, names in found.items() if names}


def as_json(rows: Iterable[Entry]) -> str:
    """For machines, and for the file of the package: a network per line."""
    return "[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]\n"


def table(rows: Iterable[Entry]) -> Table:
    """The networks for a terminal."""
    from rich.table import Table

    out = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("name", "pixels", "parameters", "GMACs", "blocks of each stage", "top-1", "paper"):
        right = heading in ("pixels", "parameters", "GMACs", "top-1")
        out.add_column(heading, justify="right" if right else "left", no_wrap=heading == "name")
    for row in rows:
        top1 = "" if row.top1 is None else f"{row.top1:.1f}"
        size, work = f"{row.parameters / 1e6:.2f}M", f"{row.macs / 1e9:.2f}"
        out.add_row(row.name, str(row.size), size, work, row.stages, top1, row.paper)
    return out

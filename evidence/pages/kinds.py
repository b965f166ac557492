"""What pages about kinds of data have in common: what seeds decide, tables of arms beside one of them, speed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from affinear.compare.findings import student
from pages.words import FIRST, shown

Cells = Sequence[Mapping[str, Any]]

SEEDS = 3  # that a comparison should have


def limits(found: Mapping[str, Any]) -> list[str]:
    """What is missing, and what so many seeds leave open."""
    cells: Cells = found["cells"]
    seeds: dict[tuple[Any, ...], set[int]] = {}
    for one in cells:
        seeds.setdefault((one["kind"], one["arm"], one.get("width", 0)), set()).add(one["seed"])
    few = sum(len(have) < SEEDS for have in seeds.values())
    kinds = ", ".join(dict.fromkeys(one["kind"] for one in cells)) or "nothing"
    told = f"{FIRST} {len(cells)} trainings, of {kinds}; what is not named was not tried."
    if few:
        told += f" {few} of {len(seeds)} settings have fewer than {SEEDS} seeds; of those nothing is decided."
    told += (
        " A difference counts as decided if zero lies outside of its 95 % interval over seeds; many are looked at, so "
    )
    return [told + "that one in twenty decisions would be false by chance alone.", ""]


def arms_of(cells: Cells) -> list[str]:
    """Their arms, in the order in which they come."""
    return list(dict.fromkeys(one["arm"] for one in cells))


def values_of(cells: Cells, arm: str, measure: str) -> list[float]:
    """A measure of an arm, one for each seed."""
    return [one["score"][measure] for one in cells if one["arm"] == arm]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation.

    Examples:
        >>> spread([1.0, 2.0, 3.0]), spread([1.5]), spread([])
        ('2.00 ± 1.00', '1.50 (one seed)', '-')
    """
    if len(values) < 2:
        return f"{values[0]:.2f} (one seed)" if values else "-"
    return shown(values, ".2f")


def difference(mine: Mapping[int, float], other: Mapping[int, float]) -> str:
    """The mean difference over the seeds that both have, its 95 % interval, and whether that decides.

    Examples:
        >>> difference({0: 2.0, 1: 3.0, 2: 4.0}, {0: 1.0, 1: 1.9, 2: 3.1})
        '+1.00 (0.75 to 1.25), decided'
        >>> difference({0: 2.0}, {0: 1.0})
        '+1.00, one seed'
    """
    both = [mine[seed] - other[seed] for seed in mine if seed in other]
    if len(both) < 2:
        return f"{both[0]:+.2f}, one seed" if both else "-"
    mean, half = statistics.mean(both), student(len(both)) * statistics.stdev(both) / len(both) ** 0.5
    decided = "decided" if abs(mean) > half and len(both) >= SEEDS else "undecided"
    return f"{mean:+.2f} ({mean - half:.2f} to {mean + half:.2f}), {decided}"


def compared(cells: Cells, measure: str, beside: str, shown: Callable[[float], float], better: str) -> list[str]:
    """A table of arms, each beside one of them."""
    by_seed = {
        arm: {one["seed"]: shown(one["score"][measure]) for one in cells if one["arm"] == arm} for arm in arms_of(cells)
    }
    lines = [
        f"| arm | seeds | {measure}, {better} | against {beside} | parameters | steps |",
        "|---|---|---|---|---|---|",
    ]
    for arm, values in by_seed.items():
        one = next(cell for cell in cells if cell["arm"] == arm)
        against = "" if arm == beside else difference(values, by_seed.get(beside, {}))
        lines.append(
            f"| {arm} | {len(values)} | {spread(list(values.values()))} | {against} | {one['parameters'] / 1e6:.2f}M "
            f"| {one['recipe']['steps']:,} |"
        )
    return lines


def speed(found: Mapping[str, Any], alone: Mapping[str, Any] | None) -> list[str]:
    """Each arm by itself on the machine: as a probe measured it, or else its trainings, if they had the machine."""
    measured = found if alone is None else alone
    rows = trained_alone(found) if alone is None else alone["rows"]
    if not rows:
        return ["How long a step takes was not measured: trainings shared the machine.", ""]
    counted = measured["machine"]["device"] != "CPU"  # nobody counts the memory of a CPU's steps
    where = "GPU" if counted else "CPU"
    lines = [f"## A training step, each arm alone on the {where}", ""]
    lines += ["| kind | arm | ms | GiB | one CUDA graph |", "|---|---|---|---|---|"]
    for row in rows:
        memory = f"{row['gigabytes']:.2f}" if counted else "-"
        graph = "no" if row["no_graph"] else "yes"
        lines.append(f"| {row['kind']} | {row['arm']} | {row['ms']:.2f} | {memory} | {graph} |")
    return [*lines, ""]


def trained_alone(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A step of each kind and arm, the median over cells, where these were trained one at a time and timed."""
    by_itself = found["parallel"] == 1 and not found.get("shared")
    cells: Cells = [one for one in found["cells"] if by_itself and "ms_per_step" in one]
    rows: list[dict[str, Any]] = []
    for kind, arm in dict.fromkeys((one["kind"], one["arm"]) for one in cells):
        mine = [one for one in cells if (one["kind"], one["arm"]) == (kind, arm)]
        rows.append(
            {
                "kind": kind,
                "arm": arm,
                "ms": statistics.median(one["ms_per_step"] for one in mine),
                "gigabytes": max(one["peak_memory"] for one in mine) / 2**30,
                "no_graph": next((one["no_graph"] for one in mine if one["no_graph"]), ""),
            }
        )
    return rows


def origin(found: Mapping[str, Any], script: str) -> list[str]:
    """Where it was trained, and by what."""
    where, times = found["machine"], found["parallel"]
    device = where["device"]
    if device == "CPU":
        device = f"a CPU of {where['cores']} cores, a thread for each training"
    beside = ", beside other programs" if found.get("shared") else ""
    return [f"Trained on {device}, torch {where['torch']}, {times} at a time{beside}, by `evidence/{script}`.", ""]

"""Pages of results out of the cells of language.py and ranges.py: first what they cannot tell.

    PYTHONPATH=src:evidence python evidence/pages/text.py language.json --alone language_alone.json \
        --output results/language
    PYTHONPATH=src:evidence python evidence/pages/text.py ranges.json --alone ranges_alone.json --output results/ranges

The output folder gets README.md and the JSON that it was made of.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from affinear.compare.findings import student
from pages.words import FIRST, shown
from running.files import write

Cells = Sequence[Mapping[str, Any]]

SEEDS = 3  # that a comparison should have
CHANCE = {"image": 10.0, "text": 50.0, "listops": 10.0, "pathfinder": 50.0}
# In percent, after 50,000 steps, in the protocol whose size and recipe this is: Skyformer's table, PolaFormer's README.
PUBLISHED = {
    "image": "softmax 40.57, Performer 41.43, Skyformer 40.77, PolaFormer 42.15",
    "text": "softmax 61.95, Performer 64.19, Skyformer 64.70, PolaFormer 73.06",
    "listops": "softmax 38.37, Performer 38.02, Skyformer 38.69, PolaFormer 37.35",
    "pathfinder": "softmax 65.26, Performer 66.30, Skyformer 70.73, PolaFormer 70.53",
}


def language_page(found: Mapping[str, Any], alone: Mapping[str, Any] | None) -> str:
    """Perplexity, perplexity by position, recall, and speed."""
    cells: Cells = found["cells"]
    text, recall = ([one for one in cells if one["kind"] == kind] for kind in ("text", "recall"))
    lines = ["# Language models, small", "", *_limits(found)]
    lines += [
        "One corpus, PubMed's abstracts, a few million tokens seen more than once; about 15M parameters; one recipe "
        "and one rate, tuned for no arm. A difference in perplexity here says nothing about 340M parameters and 15 "
        "billion tokens. Recall is that of two small layers after few steps, without rotary positions: what is learnt "
        "by then, not what would fit. "
        "`mamba2` stands for the state space models: Mamba itself scans token by token without its own kernels.",
        "",
    ]
    if text:
        lines += ["## Perplexity on documents not seen", ""]
        lines += _compared(text, "perplexity", "softmax", lambda value: value, "lower is better")
        lines += ["", "By how many tokens came before, mean over seeds:", "", *_positions(text), ""]
    if recall:
        widths = sorted({one["width"] for one in recall})
        lines += ["## Associative recall, accuracy in percent by width of a head", ""]
        lines += [f"| arm | {' | '.join(map(str, widths))} |", "|---" * (len(widths) + 1) + "|"]
        for arm in _arms(recall):
            mine = [one for one in recall if one["arm"] == arm]
            parts = [spread([100 * one["score"]["accuracy"] for one in mine if one["width"] == w]) for w in widths]
            lines.append(f"| {arm} | {' | '.join(parts)} |")
        lines.append("")
    return "\n".join(lines + _speed(alone) + _origin(found, "language.py"))


def ranges_page(found: Mapping[str, Any], alone: Mapping[str, Any] | None) -> str:
    """Accuracy by kind of data, beside chance and what was published."""
    cells: Cells = found["cells"]
    lines = ["# Long ranges", "", *_limits(found)]
    lines += [
        "Trainings are a sixth of the published length or shorter, with a higher rate, so that no number stands beside "
        "a published one as its equal. Pathfinder is drawn by our own code; how far its dots are apart tells 60 %, "
        "without following a contour. `none` has no attention: what it reaches needs none.",
        "",
    ]
    for kind in dict.fromkeys(one["kind"] for one in cells):
        mine = [one for one in cells if one["kind"] == kind]
        lines += [f"## {kind}: accuracy in percent, chance {CHANCE[kind]:.0f}", ""]
        lines += _compared(mine, "accuracy", "none", lambda value: 100 * value, "higher is better")
        low = [arm for arm in _arms(mine) if statistics.mean(_values(mine, arm, "accuracy")) < CHANCE[kind] / 100 + 0.1]
        told = f"Less than ten points above chance: {', '.join(low)}." if low else "All are ten points above chance."
        lines += ["", f"{told} Published: {PUBLISHED[kind]}.", ""]
    return "\n".join(lines + _speed(alone) + _origin(found, "ranges.py"))


def _limits(found: Mapping[str, Any]) -> list[str]:
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


def _arms(cells: Cells) -> list[str]:
    return list(dict.fromkeys(one["arm"] for one in cells))


def _values(cells: Cells, arm: str, measure: str) -> list[float]:
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


def _compared(cells: Cells, measure: str, beside: str, shown: Callable[[float], float], better: str) -> list[str]:
    """A table of arms, each beside one of them."""
    by_seed = {
        arm: {one["seed"]: shown(one["score"][measure]) for one in cells if one["arm"] == arm} for arm in _arms(cells)
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


def _positions(cells: Cells) -> list[str]:
    names = list(dict.fromkeys(name for one in cells for name in one["positions"]))
    lines = [f"| arm | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for arm in _arms(cells):
        mine = [one["positions"] for one in cells if one["arm"] == arm]
        parts = [[one[name]["perplexity"] for one in mine if name in one] for name in names]
        lines.append(f"| {arm} | {' | '.join(f'{statistics.mean(p):.2f}' if p else '-' for p in parts)} |")
    return lines


def _speed(alone: Mapping[str, Any] | None) -> list[str]:
    """Each arm by itself on the machine."""
    if alone is None:
        return ["How long a step takes was not measured: trainings shared the GPU.", ""]
    lines = ["## A training step, each arm alone on the GPU", "", "| kind | arm | ms | GiB |", "|---|---|---|---|"]
    lines += [f"| {row['kind']} | {row['arm']} | {row['ms']:.1f} | {row['gigabytes']:.2f} |" for row in alone["rows"]]
    return [*lines, ""]


def _origin(found: Mapping[str, Any], script: str) -> list[str]:
    where, times = found["machine"], found["parallel"]
    return [f"Trained on {where['device']}, torch {where['torch']}, {times} at a time, by `evidence/{script}`.", ""]


PAGES: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any] | None], str]] = {
    "language": language_page,
    "ranges": ranges_page,
}


def main() -> int:
    """Write a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", type=Path, help="language.json or ranges.json")
    parser.add_argument("--alone", type=Path, help="what --probe wrote")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    if given.cells.stem not in PAGES:
        raise SystemExit(f"expected language.json or ranges.json, got {given.cells.name}")
    found = json.loads(given.cells.read_text(encoding="utf-8"))
    alone = None if given.alone is None else json.loads(given.alone.read_text(encoding="utf-8"))
    page = PAGES[given.cells.stem](found, alone)
    given.output.mkdir(parents=True, exist_ok=True)
    for path in (given.cells, given.alone):
        if path is not None and path.resolve().parent != given.output.resolve():
            shutil.copy(path, given.output / path.name)
    write(given.output / "README.md", page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

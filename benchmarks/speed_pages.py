"""Write what reports of `speed.py` say into a page: every bar, and networks beside their twins.

    PYTHONPATH=benchmarks python benchmarks/speed_pages.py docs/kernels.md benchmarks/results/*-speed*-h200.json

Reports come from the oldest to the latest, and of each figure the latest counts; ratios are of one report alone. The
tables stand between comments in the page: `<!-- bars -->`, `<!-- networks -->`, and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from speed_bars import FORWARD, TRAINING, Verdict, verdicts

Report = dict[str, Any]
FIRST, SECOND = (FORWARD, "inference"), (TRAINING, "training")
LARGE = 100  # from here on no digits after the point


def main(page: Path, files: Sequence[Path]) -> None:
    """Put all tables into the page."""
    reports = [json.loads(file.read_text()) for file in files]
    text = page.read_text()
    tables: Mapping[str, Callable[[Sequence[Report]], Iterator[str]]] = {"bars": bars, "networks": networks}
    for name, table in tables.items():
        text = placed(text, name, "\n".join(table(reports)))
    draft = page.with_suffix(".part")
    draft.write_text(text)
    draft.rename(page)


def placed(text: str, name: str, table: str) -> str:
    """The page with a table between its comments, in place of what was there."""
    pattern = re.compile(rf"(<!-- {name} -->).*?(<!-- end -->)", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(
            f"page: expected one place for a table, <!-- {name} --> ... <!-- end -->; write it where it is due"
        )
    return pattern.sub(lambda found: f"{found[1]}\n\n{table}\n\n{found[2]}", text)


def bars(reports: Sequence[Report]) -> Iterator[str]:
    """Every bar with the latest figure there is."""
    yield "| what | wanted | forward or inference | both ways or training | measured |"
    yield "|---|---|---|---|---|"
    lines: dict[str, dict[int, list[tuple[Verdict, str]]]] = {}
    for verdict, date in latest(reports):
        name, place = split(verdict.bar)
        lines.setdefault(name, {}).setdefault(place, []).append((verdict, date))
    for name, places in lines.items():
        found = [one for place in sorted(places) for one in places[place]]
        wanted = ", ".join(dict.fromkeys(f"{places[place][0][0].wanted:g}" for place in sorted(places)))
        dates = " and ".join(sorted({date for _, date in found if date})) or "not yet"
        sign = "at least" if found[0][0].least else "at most"
        yield f"| {name} | {sign} {wanted} | {cell(places.get(0, []))} | {cell(places.get(1, []))} | {dates} |"


def latest(reports: Sequence[Report]) -> list[tuple[Verdict, str]]:
    """Each bar as the last report has it that measured it, and that report's date."""
    found: dict[str, tuple[Verdict, str]] = {}
    for report in reports:
        for verdict in verdicts(report):
            if verdict.reached is not None or verdict.bar not in found:
                found[verdict.bar] = verdict, "" if verdict.reached is None else report["machine"]["date"][:10]
    return list(found.values())


def split(bar: str) -> tuple[str, int]:
    """The name of a line, and the column: 0 for forward and inference, 1 for both ways and training.

    Examples:
        >>> split("rotary over mala, 128,1,3136,64, forward")
        ('rotary over mala, 128, 1, 3136, 64', 0)
        >>> split("cuDNN over depthwise 3 x 3, 128,56,56,64, forward + backward")
        ('cuDNN over depthwise 3 x 3, four stages', 1)
    """
    name, place = bar, 0
    for column, words in enumerate((FIRST, SECOND)):
        for word in words:
            if bar.endswith(f", {word}"):
                name, place = bar.removesuffix(f", {word}"), column
    if name.startswith("cuDNN"):
        name = name.split(",")[0] + ", four stages"
    return re.sub(r"(?<=\d),(?=\d)", ", ", name), place


def cell(found: Sequence[tuple[Verdict, str]]) -> str:
    """Figures of one line and column, from the least to the most; bold where all are reached."""
    reached = sorted(verdict.reached for verdict, _ in found if verdict.reached is not None)
    if not reached:
        return "not measured" if found else ""
    wanted = {f"{verdict.wanted:.3g}" for verdict, _ in found if not verdict.met}
    short = [f"{x:.3g}" for x in (reached[0], reached[-1])]
    # One that is missed by little is not to read as if it were reached.
    figures = " to ".join(
        dict.fromkeys(f"{x:.4g}" if y in wanted else y for x, y in zip((reached[0], reached[-1]), short, strict=True))
    )
    return f"**{figures}**" if all(verdict.met for verdict, _ in found) else figures


def networks(reports: Sequence[Report]) -> Iterator[str]:
    """Networks with images per second, and milliseconds of a batch on the host and on the GPU."""
    yield "| network | way | images | images/s | ms | host ms | GPU ms | launches | measured |"
    yield "|---|---|---|---|---|---|---|---|---|"
    found: dict[tuple[Any, ...], dict[int, list[dict[str, Any]]]] = {}
    for i, report in enumerate(reports):
        for row in report["rows"]:
            if row["what"] in ("network", "pyramid"):
                key = (row.get("direction", "pyramid, inference"), row["way"], row["batch"], row["who"])
                found.setdefault(key, {}).setdefault(i, []).append(row)
    for (direction, way, batch, who), runs in sorted(found.items()):
        i = max(runs, key=lambda i: (any("ms" in row for row in runs[i]), i))  # a profile alone has no times
        figures = (number(runs[i], name) for name in ("images_per_s", "ms", "host_ms", "gpu_ms", "launches"))
        date = reports[i]["machine"]["date"][:10]
        yield f"| `{who}` | {direction}, {way} | {batch} | {' | '.join(figures)} | {date} |"


def number(rows: Sequence[dict[str, Any]], name: str) -> str:
    """The median of a number over the rows that have it."""
    found = [row[name] for row in rows if name in row]
    if not found:
        return ""
    middle = statistics.median(found)
    return f"{middle:,.0f}" if middle >= LARGE else f"{middle:.3g}"


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])

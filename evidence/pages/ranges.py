"""The page of long ranges: accuracy by kind of data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from affinear.tasks.ranges.recipes import RECIPES
from pages.kinds import Cells, arms_of, compared, limits, origin, speed, values_of

CHANCE = {"image": 10.0, "text": 50.0, "listops": 10.0, "pathfinder": 50.0}
BAR = 10.0  # points above chance that every mechanism should be, of kinds that have a bar
BARRED = ("image", "text")
# Other kinds have one level that is easily taken for more than it is.
WITHOUT = {
    "listops": "Chance is low here: who gives the same answer to all lists is right in 17 to 18 % of them, and who "
    "sees nothing but the outermost operator in 36 to 38 % (`evidence/counts.py`). Up to there nothing has to be "
    "computed; the published accuracies lie about there, too.",
    "pathfinder": "Who gives the same answer to all images is right in half of them.",
}
# In percent, after 50,000 steps, in the protocol whose size and recipe this is: Skyformer's table, PolaFormer's README.
PUBLISHED = {
    "image": "softmax 40.57, Performer 41.43, Skyformer 40.77, PolaFormer 42.15",
    "text": "softmax 61.95, Performer 64.19, Skyformer 64.70, PolaFormer 73.06",
    "listops": "softmax 38.37, Performer 38.02, Skyformer 38.69, PolaFormer 37.35",
    "pathfinder": "softmax 65.26, Performer 66.30, Skyformer 70.73, PolaFormer 70.53",
}
LENGTHS = {"image": 1_024, "text": 4_096, "listops": 2_000, "pathfinder": 1_024}  # tokens, where those were published


def ranges_page(found: Mapping[str, Any], alone: Mapping[str, Any] | None) -> str:
    """Accuracy by kind of data, beside chance and what was published."""
    cells: Cells = found["cells"]
    kinds = list(dict.fromkeys(one["kind"] for one in cells))
    lines = ["# Long ranges", "", *limits(found)]
    lines += [
        "Trainings are shorter than published ones, with a higher rate, so that no number stands beside a published "
        "one as its equal. `none` has no attention: what it reaches needs none."
        + " Pathfinder is drawn by our own code; how far its dots are apart tells 60 %, without following a contour."
        * ("pathfinder" in kinds),
        "",
    ]
    for kind in kinds:
        mine = [one for one in cells if one["kind"] == kind]
        lines += [f"## {kind}: accuracy in percent, chance {CHANCE[kind]:.0f}", ""]
        lines += compared(mine, "accuracy", "none", lambda value: 100 * value, "higher is better")
        lines += [
            "",
            bar(mine, kind) if kind in BARRED else WITHOUT[kind],
            "",
            trained(mine, kind) + judged(mine, kind, found.get("judged", {}).get(kind)),
            "",
        ]
    return "\n".join(lines + speed(found, alone) + origin(found, "ranges.py"))


def bar(cells: Cells, kind: str) -> str:
    """Which arms are far enough above chance, and how much the others lack."""
    need = CHANCE[kind] + BAR
    means = {arm: 100 * statistics.mean(values_of(cells, arm, "accuracy")) for arm in arms_of(cells)}
    short = {arm: need - mean for arm, mean in means.items() if mean < need}
    if not short:
        return f"**Bar: {BAR:.0f} points above chance, {need:.0f} %.** All hold it."
    held = [arm for arm in means if arm not in short]
    lacking = ", ".join(f"`{arm}` by {points:.1f} points" for arm, points in short.items())
    holding = ", ".join(f"`{arm}`" for arm in held) or "no arm"
    return f"**Bar: {BAR:.0f} points above chance, {need:.0f} %.** Held by {holding}; missed by {lacking}."


def trained(cells: Cells, kind: str) -> str:
    """How long, beside how long those of the published numbers were."""
    recipe, settings = cells[0]["recipe"], cells[0]["settings"]
    published, seen = RECIPES[kind][0], recipe["steps"] * recipe["batch_size"]
    assert published.steps is not None
    share = seen / (published.steps * published.batch_size)
    length = settings["length"] or LENGTHS[kind]
    return (
        f"Published: {PUBLISHED[kind]}; after {published.steps:,} steps of {published.batch_size} sequences of up to "
        f"{LENGTHS[kind]:,} tokens. Here: {recipe['steps']:,} steps of {recipe['batch_size']} of up to {length:,}, "
        f"{100 * share:.2g} % of as many sequences, at a rate of {recipe['lr']:g} in place of {published.lr:g}."
    )


def judged(cells: Cells, kind: str, count: int | None) -> str:
    """How far an accuracy over so many sequences may be off, whatever the seed, and whose bar or chance that is."""
    if count is None:
        return ""
    shares = {arm: statistics.mean(values_of(cells, arm, "accuracy")) for arm in arms_of(cells)}
    off = {arm: 196 * (share * (1 - share) / count) ** 0.5 for arm, share in shares.items()}
    told = (
        f" Judged after the last step by {count:,} test sequences, which alone leaves every accuracy uncertain by up "
        f"to {max(off.values()):.1f} points (95 %)."
    )
    levels = [(CHANCE[kind], "chance than that")]
    if kind in BARRED:
        levels.insert(0, (CHANCE[kind] + BAR, "the bar than that, so that it is open"))
    for level, means in levels:
        if near := [f"`{arm}`" for arm in shares if abs(100 * shares[arm] - level) < off[arm]]:
            told += f" Nearer to {means}: {', '.join(near)}."
    return told

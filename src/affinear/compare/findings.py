"""What so many seeds can tell and what they cannot, in numbers and in sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..tasks.classify.variants import ABLATION, LAYERS, ROTARY, RULES
from ..train.task import Measure, Task
from .cells import Outcome

# 97.5 % quantiles of Student's t for 1, 2, 3 ... degrees of freedom.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
MANY = 2.0
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

# Which two are worth a sentence, if both are there: within rules of one kind of positions, ...
QUESTIONS = (
    ("mala", "softmax"),
    ("mala", "linear"),
    ("mala", "inline"),
    ("mala", "nala"),
    ("inline", "linear"),
    ("nala", "linear"),
    ("inline", "softmax"),
    ("nala", "softmax"),
    ("softmax_normed", "softmax"),
    ("softmax_normed", "linear"),
    ("linear", "softmax"),
    ("mala", "mala_released"),
)
# ... and among layers.
LAYER_QUESTIONS = (
    ("mala_layer", "mala_layer_softmax"),
    ("mala_layer", "mala_layer_linear"),
    ("mala_layer", "nala_layer"),
    ("mala_layer", "inline_layer"),
    ("inline_layer", "inline_layer_softmax"),
)


@dataclass(frozen=True)
class Summary:
    """A variant over its seeds.

    Attributes:
        variant: Its name.
        values: The task's metric by seed, as it is drawn: in percent where it is a share.
        mean: Of them; None if no seed is there.
        spread: Their standard deviation; None of fewer than two.
        parameters: Trained numbers.
        macs: Multiply-adds for one sample; None where nobody counted them.
        per_second: Units of the task, such as images, of the fastest seed.
        step_seconds: What a training step took, in the fastest stretch of any seed.
        step_memory: Bytes.
        norm_correlation: Mean over seeds; None where it does not apply.
        negative_share: Mean over seeds.
        row_sum_error: The largest of all seeds.
        errors: Of cells that failed, by seed.
    """

    variant: str
    values: dict[int, float]
    mean: float | None
    spread: float | None
    parameters: int | None
    macs: int | None
    per_second: float | None
    step_seconds: float | None
    step_memory: int | None
    norm_correlation: float | None
    negative_share: float | None
    row_sum_error: float | None
    errors: dict[int, str]


@dataclass(frozen=True)
class Finding:
    """Two variants, seed against seed.

    Attributes:
        first: Name of one.
        second: Name of the other.
        difference: Mean of first less second over common seeds, in points where the metric is in percent.
        spread: Standard deviation of that difference over seeds; None of one seed.
        room: How far the true difference may lie on either side, with 95 % confidence; None of one seed.
        seeds: Common seeds.
        decided: Whether the room leaves out zero.
        sentence: The same in words.
    """

    first: str
    second: str
    difference: float
    spread: float | None
    room: float | None
    seeds: int
    decided: bool
    sentence: str


@dataclass(frozen=True)
class Conclusions:
    """What can be said about a comparison.

    Attributes:
        summaries: Each variant over its seeds.
        findings: Pairs of variants, seed against seed.
        limits: What cannot be said at all, in sentences.
    """

    summaries: list[Summary]
    findings: list[Finding]
    limits: list[str]


def conclude(
    outcomes: Iterable[Outcome], variants: Sequence[str], task: Task[Any, Any], test_samples: int
) -> Conclusions:
    """What can be said about these cells.

    Args:
        outcomes: Of the cells that are through.
        variants: In the order of the table.
        task: Whose metric was measured.
        test_samples: How many it was taken over.
    """
    summaries = summarise(outcomes, variants, task.metric)
    found = findings(summaries, task.metric, test_samples)
    return Conclusions(summaries, found, limits(summaries, found, task, test_samples))


def summarise(outcomes: Iterable[Outcome], variants: Sequence[str], metric: Measure) -> list[Summary]:
    """Each variant over its seeds, in this order."""
    every = list(outcomes)
    return [_summary(name, [outcome for outcome in every if outcome.variant == name], metric) for name in variants]


def _summary(name: str, outcomes: list[Outcome], metric: Measure) -> Summary:
    good = sorted((outcome for outcome in outcomes if not outcome.error), key=lambda outcome: outcome.seed)
    values = {outcome.seed: metric.scale * outcome.value for outcome in good}
    attention = [outcome.attention for outcome in good]
    errors = [one.row_sum_error for one in attention if one.row_sum_error is not None]
    return Summary(
        variant=name,
        values=values,
        mean=_mean(values.values()),
        spread=statistics.stdev(values.values()) if len(values) > 1 else None,
        parameters=good[0].parameters if good else None,
        macs=good[0].macs or None if good else None,
        per_second=max(outcome.per_second for outcome in good) if good else None,
        step_seconds=min((_step_seconds(outcome) for outcome in good), default=None),
        step_memory=good[0].step_memory if good else None,
        norm_correlation=_mean(one.norm_correlation for one in attention),
        negative_share=_mean(one.negative_share for one in attention),
        row_sum_error=max(errors) if errors else None,
        errors={outcome.seed: outcome.error for outcome in outcomes if outcome.error},
    )


def _step_seconds(outcome: Outcome) -> float:
    """What a step took in the fastest stretch: whatever else the machine does can only slow it down."""
    ends = [0, *(record.step for record in outcome.curve)]
    steps = [after - before for before, after in pairwise(ends)]
    return min((record.seconds / n for record, n in zip(outcome.curve, steps, strict=True) if n), default=math.nan)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def questions(variants: Sequence[str]) -> list[tuple[str, str]]:
    """Which pairs of these variants to say something about; all against the first where none is known."""
    present, found = set(variants), list[tuple[str, str]]()
    for end in ("", ROTARY):
        found += [(one + end, other + end) for one, other in QUESTIONS]
    found += LAYER_QUESTIONS
    found += [("mala", other) for other in ABLATION if other not in RULES]
    found += [(name + ROTARY, name) for name in variants if not name.endswith(ROTARY) and name not in LAYERS]
    chosen = [pair for pair in found if present.issuperset(pair)]
    return chosen or [(name, variants[0]) for name in variants[1:]]


def findings(summaries: Sequence[Summary], metric: Measure, test_samples: int) -> list[Finding]:
    """What can be said about each pair.

    Args:
        summaries: Of all variants.
        metric: What was measured.
        test_samples: How many it was taken over.

    Example:
        >>> from affinear.compare.cells import Outcome
        >>> from affinear.compare.findings import findings, summarise
        >>> top1 = Measure("top1", "top-1", share=True)
        >>> cells = [Outcome(name, seed, value=value) for name, seed, value in
        ...          (("mala", 0, 0.95), ("mala", 1, 0.94), ("linear", 0, 0.943), ("linear", 1, 0.945))]
        >>> findings(summarise(cells, ["mala", "linear"], top1), top1, 10000)[0].sentence
        'The difference of 0.1 points between mala and linear is smaller than its spread from seed to seed (0.8): ...'
    """
    by_name = {summary.variant: summary for summary in summaries}
    pairs = questions([summary.variant for summary in summaries])
    told = [_finding(by_name[one], by_name[other], metric, test_samples) for one, other in pairs]
    return [finding for finding in told if finding is not None]


def _finding(first: Summary, second: Summary, metric: Measure, test_samples: int) -> Finding | None:
    common = sorted(first.values.keys() & second.values.keys())
    if not common:
        return None
    differences = [first.values[seed] - second.values[seed] for seed in common]
    difference, count = statistics.fmean(differences), len(common)
    spread = statistics.stdev(differences) if count > 1 else None
    room = None
    if spread is not None:
        room = student(count) * spread / math.sqrt(count)
        if metric.share:  # then it is known how much the choice of test samples alone may do
            share = statistics.fmean([first.values[seed] / metric.scale for seed in common])
            room = math.hypot(room, of_test_samples(share, test_samples))
    decided = room is not None and abs(difference) > room
    sentence = _sentence(first.variant, second.variant, difference, spread, room, count, metric)
    return Finding(first.variant, second.variant, difference, spread, room, count, decided, sentence)


def student(count: int) -> float:
    """The quantile of Student's t for the mean of so many differences."""
    return STUDENT[count - 2] if count - 2 < len(STUDENT) else MANY


def of_test_samples(share: float, samples: int) -> float:
    """How far a share may be off because the test samples are these and no others: 95 %, in points."""
    return 196 * math.sqrt(max(share * (1 - share), 1 / samples) / samples)


def _sentence(
    first: str, second: str, difference: float, spread: float | None, room: float | None, count: int, metric: Measure
) -> str:
    leads = (difference >= 0) == metric.higher_is_better
    ahead, behind = (first, second) if leads else (second, first)
    size, seeds, digits = abs(difference), counted(count, "seed"), digits_of(metric)
    smallest, points = 0.5 * 10.0**-digits, f" {metric.points}" if metric.scale == 100 else f" {metric.title}"
    if size < smallest:
        known = "" if spread is None else f", spread {spread:.{digits}f}"
        return f"{first} and {second} are less than {smallest:g}{points} apart{known}: {seeds} cannot tell them apart."
    if spread is None or room is None:
        return (
            f"{ahead} is ahead of {behind} by {size:.{digits}f}{points} with one seed: the spread from seed to seed is "
            "not known, and nothing is decided."
        )
    reach = f"{size - room:.{digits}f} to {size + room:.{digits}f}"
    if size > room:
        return f"{ahead} is better than {behind} by {size:.{digits}f}{points}; {seeds} leave room for {reach}."
    if size <= spread:
        return (
            f"The difference of {size:.{digits}f}{points} between {first} and {second} is smaller than its spread from "
            f"seed to seed ({spread:.{digits}f}): {seeds} cannot decide."
        )
    return (
        f"{ahead} is ahead of {behind} by {size:.{digits}f}{points}, which is more than the spread from seed to seed "
        f"({spread:.{digits}f}), but {seeds} leave room for {reach}: not decided."
    )


def digits_of(metric: Measure) -> int:
    """Digits after the point of a drawn value.

    Example:
        >>> digits_of(Measure("top1", "top-1")), digits_of(Measure("loss", "loss", False, ".3f"))
        (1, 3)
    """
    found = "".join(sign for sign in metric.form.partition(".")[2] if sign.isdecimal())
    return int(found or 1)


def counted(count: int, what: str) -> str:
    """A number of things, small ones as a word.

    Example:
        >>> counted(2, "seed"), counted(1, "seed"), counted(12, "seed")
        ('two seeds', 'one seed', '12 seeds')
    """
    number = NUMBERS[count] if count < len(NUMBERS) else str(count)
    return f"{number} {what}{'' if count == 1 else 's'}"


def limits(
    summaries: Sequence[Summary], found: Sequence[Finding], task: Task[Any, Any], test_samples: int
) -> list[str]:
    """What nobody should conclude from a comparison of this size."""
    seeds = max((len(summary.values) for summary in summaries), default=0)
    means = [summary.mean / task.metric.scale for summary in summaries if summary.mean is not None]
    told = list[str]()
    if not means:
        told.append("No cell was trained, so there is nothing to conclude.")
    elif task.metric.share:
        one = task.samples.removesuffix("s")
        told.append(
            f"One test {one} is {100 / test_samples:.2g} points. With {test_samples} of them an accuracy is known to "
            f"about ±{of_test_samples(statistics.fmean(means), test_samples):.1f} points, whatever the seeds."
        )
    else:
        told.append(
            f"The test set has {test_samples} samples. How far {task.metric.title} would be off on others is not in "
            "the spread from seed to seed."
        )
    if seeds == 1:
        told.append("One seed has no spread: every difference here may be luck. Run again with --seeds 3 or more.")
    elif seeds == 2:
        told.append(
            "Two seeds tell large differences from none. Their spread is itself known to a factor of several only, so "
            "the room they leave is wide: --seeds 5 makes it about a seventh as wide."
        )
    decided = sum(finding.decided for finding in found)
    if len(found) > 1 and seeds > 1:
        told.append(
            f"{decided} of {len(found)} differences are decided. Each is judged at 95 %, so about one in twenty that "
            "do not exist would still look decided."
        )
    told.append(
        "All this holds for this size of network, this data and this length of training. Another size, more "
        "tokens or a longer schedule may order the variants differently."
    )
    told += [
        f"{summary.variant}, seed {seed} failed: {error}"
        for summary in summaries
        for seed, error in summary.errors.items()
    ]
    return told

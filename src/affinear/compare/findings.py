"""What so many seeds can tell and what they cannot, in numbers and in sentences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..tasks.classify.variants import ABLATION, LAYERS, ROTARY, RULES
from .cells import Outcome

# 97.5 % quantiles of Student's t for 1, 2, 3 ... degrees of freedom.
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
MANY = 2.0
SMALLEST = 0.05  # points; what is less would be printed as none
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
        top1: Test accuracy in percent by seed.
        mean: Of them; None if no seed is there.
        spread: Their standard deviation; None of fewer than two.
        parameters: Trained numbers.
        images_per_second: Of the fastest seed.
        step_memory: Bytes.
        norm_correlation: Mean over seeds; None where it does not apply.
        negative_share: Mean over seeds.
        row_sum_error: The largest of all seeds.
        errors: Of cells that failed, by seed.
    """

    variant: str
    top1: dict[int, float]
    mean: float | None
    spread: float | None
    parameters: int | None
    images_per_second: float | None
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
        difference: Mean of first less second over common seeds, in points.
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


def conclude(outcomes: Iterable[Outcome], variants: Sequence[str], test_images: int) -> Conclusions:
    """What can be said about these cells.

    Args:
        outcomes: Of the cells that are through.
        variants: In the order of the table.
        test_images: How many the accuracies are taken over.
    """
    summaries = summarise(outcomes, variants)
    found = findings(summaries, test_images)
    return Conclusions(summaries, found, limits(summaries, found, test_images))


def summarise(outcomes: Iterable[Outcome], variants: Sequence[str]) -> list[Summary]:
    """Each variant over its seeds, in this order."""
    every = list(outcomes)
    return [_summary(name, [outcome for outcome in every if outcome.variant == name]) for name in variants]


def _summary(name: str, outcomes: list[Outcome]) -> Summary:
    good = sorted((outcome for outcome in outcomes if not outcome.error), key=lambda outcome: outcome.seed)
    top1 = {outcome.seed: 100 * outcome.top1 for outcome in good}
    attention = [outcome.attention for outcome in good]
    errors = [one.row_sum_error for one in attention if one.row_sum_error is not None]
    return Summary(
        variant=name,
        top1=top1,
        mean=_mean(top1.values()),
        spread=statistics.stdev(top1.values()) if len(top1) > 1 else None,
        parameters=good[0].parameters if good else None,
        images_per_second=max(outcome.images_per_second for outcome in good) if good else None,
        step_memory=good[0].step_memory if good else None,
        norm_correlation=_mean(one.norm_correlation for one in attention),
        negative_share=_mean(one.negative_share for one in attention),
        row_sum_error=max(errors) if errors else None,
        errors={outcome.seed: outcome.error for outcome in outcomes if outcome.error},
    )


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


def findings(summaries: Sequence[Summary], test_images: int) -> list[Finding]:
    """What can be said about each pair.

    Args:
        summaries: Of all variants.
        test_images: How many the accuracies are taken over.

    Example:
        >>> from affinear.compare.cells import Outcome
        >>> from affinear.compare.findings import findings, summarise
        >>> cells = [Outcome(name, seed, top1=top1) for name, seed, top1 in
        ...          (("mala", 0, 0.95), ("mala", 1, 0.94), ("linear", 0, 0.943), ("linear", 1, 0.945))]
        >>> findings(summarise(cells, ["mala", "linear"]), 10000)[0].sentence
        'The difference of 0.1 points between mala and linear is smaller than its spread from seed to seed (0.8): ...'
    """
    by_name = {summary.variant: summary for summary in summaries}
    pairs = questions([summary.variant for summary in summaries])
    told = [_finding(by_name[one], by_name[other], test_images) for one, other in pairs]
    return [finding for finding in told if finding is not None]


def _finding(first: Summary, second: Summary, test_images: int) -> Finding | None:
    common = sorted(first.top1.keys() & second.top1.keys())
    if not common:
        return None
    differences = [first.top1[seed] - second.top1[seed] for seed in common]
    difference, count = statistics.fmean(differences), len(common)
    spread = statistics.stdev(differences) if count > 1 else None
    room = None
    if spread is not None:
        share = statistics.fmean([first.top1[seed] / 100 for seed in common])
        room = math.hypot(student(count) * spread / math.sqrt(count), of_test_images(share, test_images))
    decided = room is not None and abs(difference) > room
    sentence = _sentence(first.variant, second.variant, difference, spread, room, count)
    return Finding(first.variant, second.variant, difference, spread, room, count, decided, sentence)


def student(count: int) -> float:
    """The quantile of Student's t for the mean of so many differences."""
    return STUDENT[count - 2] if count - 2 < len(STUDENT) else MANY


def of_test_images(share: float, images: int) -> float:
    """How far an accuracy may be off because the test images are these and no others: 95 %, in points."""
    return 196 * math.sqrt(max(share * (1 - share), 1 / images) / images)


def _sentence(first: str, second: str, difference: float, spread: float | None, room: float | None, count: int) -> str:
    ahead, behind = (first, second) if difference >= 0 else (second, first)
    size, seeds = abs(difference), counted(count, "seed")
    if size < SMALLEST:
        known = "" if spread is None else f", spread {spread:.1f}"
        return f"{first} and {second} are less than {SMALLEST} points apart{known}: {seeds} cannot tell them apart."
    if spread is None or room is None:
        return (
            f"{ahead} is ahead of {behind} by {size:.1f} points with one seed: the spread from seed to seed is not "
            "known, and nothing is decided."
        )
    if size > room:
        low, high = size - room, size + room
        return f"{ahead} is better than {behind} by {size:.1f} points; {seeds} leave room for {low:.1f} to {high:.1f}."
    if size <= spread:
        return (
            f"The difference of {size:.1f} points between {first} and {second} is smaller than its spread from seed to "
            f"seed ({spread:.1f}): {seeds} cannot decide."
        )
    return (
        f"{ahead} is ahead of {behind} by {size:.1f} points, which is more than the spread from seed to seed "
        f"({spread:.1f}), but {seeds} leave room for {size - room:.1f} to {size + room:.1f}: not decided."
    )


def counted(count: int, what: str) -> str:
    """A number of things, small ones as a word.

    Example:
        >>> counted(2, "seed"), counted(1, "seed"), counted(12, "seed")
        ('two seeds', 'one seed', '12 seeds')
    """
    number = NUMBERS[count] if count < len(NUMBERS) else str(count)
    return f"{number} {what}{'' if count == 1 else 's'}"


def limits(summaries: Sequence[Summary], found: Sequence[Finding], test_images: int) -> list[str]:
    """What nobody should conclude from a comparison of this size."""
    seeds = max((len(summary.top1) for summary in summaries), default=0)
    means = [summary.mean / 100 for summary in summaries if summary.mean is not None]
    told = [
        f"One test image is {100 / test_images:.2g} points. With {test_images} of them an accuracy is known to about "
        f"±{of_test_images(statistics.fmean(means), test_images):.1f} points, whatever the seeds."
        if means
        else "No cell was trained, so there is nothing to conclude."
    ]
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
        "All this holds for this network, these images and this length of training. Another size of network, more "
        "tokens or a longer schedule may order the variants differently."
    )
    told += [
        f"{summary.variant}, seed {seed} failed: {error}"
        for summary in summaries
        for seed, error in summary.errors.items()
    ]
    return told

"""Words that pages of results have in common: what they begin with, means and tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

FIRST = "**What cannot be concluded.**"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown.

    Examples:
        >>> print(table(("arm", "seeds"), [("mala", "3")]))
        | arm | seeds |
        |---|---|
        | mala | 3 |
    """
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def shown(values: Sequence[float], form: str = ".1f") -> str:
    """A mean, and over several seeds their standard deviation; nothing for no values.

    Examples:
        >>> shown([1.0, 3.0]), shown([2.0]), shown([])
        ('2.0 ± 1.4', '2.0', '')
    """
    if not values:
        return ""
    deviation = f" ± {statistics.stdev(values):{form}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{deviation}"


def percent(shares: Sequence[float | None]) -> str:
    """The same of shares, in percent; what was not measured is left out.

    Examples:
        >>> percent([0.25, None, 0.75])
        '50.0 ± 35.4'
    """
    return shown([100 * share for share in shares if share is not None])

"""Which class is taken for which: as a table where it can be read, as the worst pairs where it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

SMALL = 12  # classes of a table in a terminal
LARGE = 30  # and on a page
WORST = 10  # pairs that are named where there are more classes
LONGEST = 14  # letters of a name above a column

Matrix = Sequence[Sequence[int]]


def pairs(names: Sequence[str], taken: Matrix) -> list[tuple[int, str, str]]:
    """How often one class was taken for another, the most often first.

    Args:
        names: Of the classes.
        taken: Rows are what samples are, columns what they were taken for.

    Example:
        >>> from affinear.train.confused import pairs
        >>> pairs(["cat", "dog"], [[5, 2], [0, 7]])
        [(2, 'cat', 'dog')]
    """
    found = [
        (count, names[row], names[column])
        for row, counts in enumerate(taken)
        for column, count in enumerate(counts)
        if count and row != column
    ]
    return sorted(found, key=lambda pair: -pair[0])


def lines(names: Sequence[str], taken: Matrix) -> list[str]:
    r"""For a terminal; nothing where nobody counted.

    Example:
        >>> from affinear.train.confused import lines
        >>> print("\n".join(lines(["cat", "dog"], [[5, 2], [0, 7]])))
        Rows are what they are, columns what they were taken for:
             cat  dog
        cat    5    2
        dog    .    7
    """
    if not taken:
        return []
    if len(names) > SMALL:
        told = [f"{one} for {other} ({count})" for count, one, other in pairs(names, taken)[:WORST]]
        return [f"Most often taken for another: {', '.join(told)}."] if told else []
    heads = [name[:LONGEST] for name in names]
    left = max(map(len, heads))
    width = max(3, *(len(head) for head in heads), *(len(str(count)) for row in taken for count in row))
    rows = [
        f"{head:<{left}}  " + "  ".join(f"{count or '.':>{width}}" for count in row)
        for head, row in zip(heads, taken, strict=True)
    ]
    top = " " * left + "  " + "  ".join(f"{head:>{width}}" for head in heads)
    return ["Rows are what they are, columns what they were taken for:", top, *rows]


def html(names: Sequence[str], taken: Matrix) -> str:
    """For a page: a table, the darker the larger the share of its row, or a list of pairs."""
    if len(names) > LARGE:
        told = [f"<li>{escape(one)} for {escape(other)}: {count}</li>" for count, one, other in pairs(names, taken)]
        return f"<ul>{''.join(told[:WORST])}</ul>" if told else "<p>None was taken for another.</p>"
    heads = "".join(f'<th title="{escape(name)}">{escape(name[:LONGEST])}</th>' for name in names)
    rows = "".join(
        f"<tr><th>{escape(name)}</th>{''.join(_cell(count, sum(row)) for count in row)}</tr>"
        for name, row in zip(names, taken, strict=True)
    )
    return f'<div class="wide"><table><thead><tr><th></th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(count: int, total: int) -> str:
    share = count / total if total else 0.0
    return f'<td style="background: rgb(99 102 241 / {0.75 * share:.2f})">{count or ""}</td>'

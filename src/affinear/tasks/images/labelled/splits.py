"""Which splits of a data set to learn from and to test on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

TRAIN = ("train", "training")
TEST = ("validation", "val", "valid", "test", "testing")  # test last: often published without its labels


def pick(names: Sequence[str], folder: Path) -> tuple[str, str]:
    """The names of the training and the test split.

    Args:
        names: Those that the data set has.
        folder: Where it is, for the message.

    Raises:
        ValueError: If one of them is not there.

    Examples:
        >>> pick(["test", "train", "val"], Path("pets"))
        ('train', 'val')
    """
    train, test = (next((one for one in wanted if one in names), None) for wanted in (TRAIN, TEST))
    if train is None or test is None:
        raise ValueError(
            f"{folder}: expected a split called {' or '.join(TRAIN)} and one called {', '.join(TEST[:-1])} or "
            f"{TEST[-1]}, got {', '.join(sorted(names)) or 'none'}"
        )
    return train, test

"""What a data set that is generated can be told: listops:train=1000,seed=3."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

LARGEST = 2**31


def options(spec: str, usual: Mapping[str, int]) -> dict[str, int]:
    """Whole numbers by name, out of what stands behind the colon of `--data`.

    Args:
        spec: A name, and perhaps a colon and name=number with commas.
        usual: All names, and what each is if it is not given.

    Raises:
        ValueError: If a name is not known or a value is no whole number.

    Examples:
        >>> options("listops:seed=3", {"train": 96000, "seed": 0})
        {'train': 96000, 'seed': 3}
        >>> options("listops:sed=3", {"train": 96000, "seed": 0})
        Traceback (most recent call last):
        ValueError: data: listops takes no 'sed'; did you mean 'seed'?
    """
    name, _, rest = spec.partition(":")
    found = dict(usual)
    for part in filter(None, rest.split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if key not in usual:
            near = get_close_matches(key, usual, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(usual)}"
            raise ValueError(f"data: {name} takes no {key!r}; {hint}")
        if not value.isdecimal() or int(value) > LARGEST:
            raise ValueError(f"data: {name}: {key}: expected a whole number, such as {usual[key]}, got {value[:40]!r}")
        found[key] = int(value)
    return found

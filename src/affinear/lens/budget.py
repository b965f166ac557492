"""How much work an image may cause, known from its header, before a pixel of it is decoded."""

from __future__ import annotations

LONGEST = 2**15  # pixels of a side
MOST_PIXELS = 2**27  # of an image: 134 million
LEANEST = 64  # how many times longer than wide, or wider than long; resizing to a short side multiplies by it


def check_size(width: int, height: int) -> None:
    """Raise ValueError if an image of this size is not to be decoded.

    Examples:
        >>> check_size(4000, 3000)
        >>> check_size(100_000, 1)
        Traceback (most recent call last):
        ValueError: 100000 x 1 pixels, expected sides of at most 32768, at most 134,217,728 pixels and ... 64 times ...
    """
    short, long = sorted((width, height))
    if short < 1 or long > LONGEST or width * height > MOST_PIXELS or long > LEANEST * short:
        raise ValueError(
            f"{width} x {height} pixels, expected sides of at most {LONGEST}, at most {MOST_PIXELS:,} pixels and one "
            f"side at most {LEANEST} times the other; crop it or make it smaller"
        )

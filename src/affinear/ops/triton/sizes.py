"""Sizes of blocks and grids. Triton's functions for them are for kernels: on the host each call takes microseconds."""

from __future__ import annotations


def cdiv(number: int, size: int) -> int:
    """How many parts of a size hold a number of things.

    Examples:
        >>> cdiv(64, 32), cdiv(65, 32), cdiv(0, 32)
        (2, 3, 0)
    """
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is no less.

    Examples:
        >>> [next_power_of_2(number) for number in (1, 2, 3, 64, 96)]
        [1, 2, 4, 64, 128]
    """
    return 1 << (number - 1).bit_length()

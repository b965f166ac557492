"""Which blocks of a network are linear and which are softmax, in the letters the papers' code uses."""

from __future__ import annotations

from collections.abc import Sequence

LINEAR, SOFTMAX, MIXED = "lI", "vS", "M"


def linear_blocks(stage_types: str, depths: Sequence[int]) -> list[list[bool]]:
    """Whether each block of each stage is linear.

    Args:
        stage_types: One letter per stage: l or I for linear, v or S for softmax, M for a stage whose first blocks are
            linear, as many as the number after the letters says.
        depths: Blocks of each stage.

    Example:
        >>> from affinear.models._stages import linear_blocks
        >>> linear_blocks("IMS1", (1, 2, 1))
        [[True], [True, False], [False]]
    """
    letters, number = stage_types[: len(depths)], stage_types[len(depths) :]
    counted = number.isdecimal() if MIXED in letters else not number
    if len(letters) != len(depths) or set(letters) - set(LINEAR + SOFTMAX + MIXED) or not counted:
        raise ValueError(
            f"stage_types: expected {len(depths)} letters, l or I for linear, v or S for softmax, M for mixed, and, "
            f"if one is M, how many of its blocks are linear, such as 'llvv' or 'IIMS2', got {stage_types!r}"
        )

    def count(kind: str, depth: int) -> int:
        return int(number) if kind == MIXED else depth if kind in LINEAR else 0

    return [[i < count(kind, depth) for i in range(depth)] for kind, depth in zip(letters, depths, strict=True)]

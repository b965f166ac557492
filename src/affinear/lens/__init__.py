"""Seeing what an attention does: numbers over weight rows here, pictures of them in `affinear.lens.figures`."""

from affinear.lens.rows import (
    Loudness,
    RowNumbers,
    entropy,
    largest_weight,
    loudness,
    measure,
    negative_mass,
    row_sum,
)

__all__ = [
    "Loudness",
    "RowNumbers",
    "entropy",
    "largest_weight",
    "loudness",
    "measure",
    "negative_mass",
    "row_sum",
]

"""The images that are always at hand: scikit-learn's digits, 8 x 8 and grey."""

from __future__ import annotations

from typing import Any

import numpy as np

from .images import Images, in_memory

TEST_EVERY = 5


def digits() -> Images:
    """The 1797 digits, one in five of each class held out; always the same ones.

    Raises:
        ValueError: If scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError("digits: they come with scikit-learn; run pip install 'affinear[train]'") from error
    found: Any = load_digits()
    shades, labels = np.asarray(found["images"]), np.asarray(found["target"], np.int64)
    pixels = np.rint(shades * (255 / 16)).astype(np.uint8)[:, None]
    held_out = np.zeros(len(labels), bool)
    for label in range(10):
        held_out[np.flatnonzero(labels == label)[TEST_EVERY // 2 :: TEST_EVERY]] = True
    names = tuple(str(label) for label in range(10))
    return in_memory("digits", (pixels[~held_out], labels[~held_out]), (pixels[held_out], labels[held_out]), names)

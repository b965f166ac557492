"""The digits of scikit-learn."""

from collections import Counter

import numpy as np
from sklearn.datasets import load_digits

from affinear.tasks.classify.data import ArraySource, open_data


def test_all_digits_are_there_one_in_five_of_each_held_out():
    images = open_data("digits")
    assert (images.name, images.size, images.channels) == ("digits", (8, 8), 1)
    assert images.class_names == tuple("0123456789")
    train, test = images.train, images.test
    assert isinstance(train, ArraySource)
    assert isinstance(test, ArraySource)
    assert len(train) + len(test) == 1797
    whole = Counter(load_digits()["target"].tolist())  # pyright: ignore
    held = Counter(test.labels.tolist())
    assert all(abs(held[label] - whole[label] / 5) < 1 for label in range(10))
    both = np.concatenate([train.pixels, test.pixels]).reshape(1797, -1)
    original = np.rint(load_digits()["data"] * 255 / 16)  # pyright: ignore
    assert Counter(map(bytes, both)) == Counter(map(bytes, original.astype(np.uint8)))


def test_the_halves_are_always_the_same():
    first, second = open_data("digits").test, open_data("digits").test
    assert isinstance(first, ArraySource)
    assert isinstance(second, ArraySource)
    np.testing.assert_array_equal(first.pixels, second.pixels)

"""From a `--data` argument to batches: open a data set, draw from it, vary its images, and pass over corrupt ones."""

from ...train.corrupt import Skipped, TooManyCorrupt
from ...train.draws import Draw
from ..images.augment import Augment
from ..images.batching import Batching, Normalize, as_tensor
from ..images.labelled.images import ArraySource, Images, Source
from ..images.labelled.opening import open_data
from ..images.reading import CorruptImage, open_image
from .loading import ready, test_loader, train_loader
from .samples import NO_IMAGE

__all__ = [
    "NO_IMAGE",
    "ArraySource",
    "Augment",
    "Batching",
    "CorruptImage",
    "Draw",
    "Images",
    "Normalize",
    "Skipped",
    "Source",
    "TooManyCorrupt",
    "as_tensor",
    "open_data",
    "open_image",
    "ready",
    "test_loader",
    "train_loader",
]

"""transformers without its bars, which would break into what a run tells."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def without_bars() -> Generator[None]:
    """Let transformers read and write weights without bars; afterwards they are shown as they were before."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    with warnings.catch_warnings():
        # It warns that an environment variable keeps the bars of downloads, of which there are none.
        warnings.simplefilter("ignore")
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()

"""What is said when a request cannot be answered."""

from __future__ import annotations


class Refusal(ValueError):
    """One sentence for the page, and the HTTP status that goes with it.

    Args:
        sentence: What was expected, what came, and what to do.
        status: 400 where the request is at fault.
    """

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status

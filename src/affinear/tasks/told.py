"""Text and JSON that others wrote: what it says, or a sentence about the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def text_of(path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: If it is no regular file, cannot be read, or is no UTF-8.
    """
    if not path.is_file():  # a pipe would never end
        raise ValueError(f"{path}: expected a file, got {'something else' if path.exists() else 'nothing'}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected text in UTF-8, got the byte {error.object[error.start]:#04x} at {error.start}"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None


def json_of(content: str | bytes, where: str) -> Any:
    """What JSON says.

    Args:
        content: The JSON.
        where: What to call it if it cannot be read.

    Raises:
        ValueError: If it is no JSON, nested too deep, or has a number of thousands of digits.

    Examples:
        >>> json_of('{"a": [1]}', "a.json")
        {'a': [1]}
        >>> json_of("[" * 100_000, "a.json")
        Traceback (most recent call last):
        ValueError: a.json: expected JSON, got what cannot be read as such (it is nested too deep)
    """
    try:
        return json.loads(content)
    except RecursionError:
        why = "it is nested too deep"
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        why = str(error)[:120]
    except ValueError:  # Python's own advice would be to lift its limit
        why = "it has a number of thousands of digits"
    raise ValueError(f"{where}: expected JSON, got what cannot be read as such ({why})")

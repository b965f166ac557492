"""Python of the user's own that the command line runs where it is told to: `--plugin my_file.py`, or an entry point."""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Iterable
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

GROUP = "affinear.plugins"


def load(names: Iterable[str]) -> None:
    r"""Run plugins, each once: what they register, such as mechanisms and networks, is then known by its name.

    Nothing but its user names a plugin. A file of weights or of a run never does, and an installed package is not
    asked unless its entry point is named here.

    Args:
        names: Files that end in .py, or entry points of the group "affinear.plugins" that an installed package has.

    Raises:
        ValueError: If there is no such plugin, or it fails; what it said is in the sentence.

    Example:
        >>> import tempfile, affinear as af
        >>> from affinear.plugins import load
        >>> text = "import dataclasses, affinear as af\n"
        >>> text += "af.register(dataclasses.replace(af.mechanisms()['mala'], name='of_a_plugin'))"
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "mine.py").write_text(text)
        ...     load([f"{folder}/mine.py"])
        >>> "of_a_plugin" in af.mechanisms()
        True
    """
    for name in names:
        if name.endswith(".py"):
            _run(Path(name).expanduser())
        else:
            _load_entry_point(name)


def _run(path: Path) -> None:
    if not path.is_file():
        raise ValueError(
            f"plugin: {path}: expected a file of Python, found {'a folder' if path.is_dir() else 'nothing'}"
        )
    module = f"affinear_plugin_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    if module in sys.modules:
        return
    spec = spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[module] = made = module_from_spec(spec)  # before it runs, as dataclasses in it ask for their module
    try:
        spec.loader.exec_module(made)
    except Exception as error:
        del sys.modules[module]
        raise ValueError(f"plugin: {path}: {_told(error, path)}") from error


def _told(error: Exception, path: Path) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _load_entry_point(name: str) -> None:
    known = {point.name: point for point in entry_points(group=GROUP)}
    if name not in known:
        listed = f"known are {', '.join(known)}" if known else "no installed package has one"
        raise ValueError(
            f"plugin: expected a file that ends in .py, or an entry point of {GROUP}, got {name!r}; {listed}"
        )
    try:
        known[name].load()
    except Exception as error:
        raise ValueError(f"plugin: {name}: {type(error).__name__}: {error}") from error

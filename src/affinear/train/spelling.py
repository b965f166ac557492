"""Settings and arguments as the command line spells them: name=value."""

from __future__ import annotations

from typing import Any

from .settings import Settings, check_fields, parse_value


def parse(given: list[str], *kinds: type[Settings]) -> dict[str, Any]:
    """Changes as the command line spells them: field=value, read as the kind of settings that has the field says.

    Args:
        given: Each field=value.
        kinds: Where to look for the fields.

    Raises:
        ValueError: If a field is in none of them; those that come near are named.
    """
    checks = {name: check for kind in kinds for name, check in kind.checks.items()}
    found: dict[str, Any] = {}
    for setting in given:
        name, text = named_value(setting, "--set: expected field=value, such as epochs=20")
        check_fields([name], checks, " and ".join(kind.kind for kind in kinds))
        try:
            found[name] = checks[name].read(text.strip())
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return found


def parse_model_args(given: list[str]) -> dict[str, Any]:
    """What a network is made with as the command line spells it: name=value.

    Examples:
        >>> parse_model_args(["depth=6", "mechanism=mala"])
        {'depth': 6, 'mechanism': 'mala'}
    """
    pairs = (named_value(text, "--model-arg: expected name=value, such as depth=6") for text in given)
    return {name: parse_value(value.strip()) for name, value in pairs}


def named_value(text: str, expected: str) -> tuple[str, str]:
    """Name and value of what the command line spells name=value, or a ValueError that begins with what was expected.

    Examples:
        >>> named_value("clip-grad=1.0", "")
        ('clip_grad', '1.0')
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"{expected}, got {text!r}")
    return name.strip().replace("-", "_"), value

"""Typed reads from a config.json; each error names the file, the field and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_NUMBER = 2**31 - 1


class Fields:
    """The fields of one config, which ``place`` names in errors."""

    def __init__(self, values: Mapping[str, Any], place: str) -> None:
        self.values = values
        self.place = place

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def number(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least ``least``; ``default`` where the field is missing or null."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing", "take the config.json that lies beside the weights")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_NUMBER:
            raise self.error(
                name, f"is {shorten(value)}", f"it must be a whole number in {least}..{MAX_NUMBER}"
            )
        return value

    def text(self, name: str) -> str | None:
        """A string, or None where the field is missing or null."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, f"is {shorten(value)}", "it must be a string")
        return value

    def items(self, name: str, length: int) -> list[Any]:
        """The first ``length`` entries of a list or string: published lists go on with the MTP layers."""
        value = self.values.get(name)
        if not isinstance(value, (list, str)) or len(value) < length:
            raise self.error(
                name, f"is {shorten(value)}", f"it must hold an entry for each of {length} layers"
            )
        return list(value[:length])

    def error(self, name: str, state: str, fix: str) -> ValueError:
        return ValueError(f"{self.place}: {name} {state}: {fix}")


def shorten(value: object, most: int = 40) -> str:
    """``value`` as text of at most ``most`` characters."""
    if isinstance(value, (list, dict, str)) and len(value) > most:
        return f"a {type(value).__name__} of {len(value)} entries"
    if isinstance(value, int) and abs(value) >= 10**most:
        return "a very large number"
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."

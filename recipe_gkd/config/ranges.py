"""Ranges of the numeric keys, read from the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from recipe_gkd.config.load import known_keys
from recipe_gkd.config.schema import Config


@dataclass(frozen=True)
class Range:
    """Values that a numeric key can have.

    Attributes:
        low: Lower bound, None if there is none.
        high: Upper bound, None if there is none.
        open_low: True if ``low`` itself is excluded.
        open_high: True if ``high`` itself is excluded.
    """

    low: float | None
    high: float | None
    open_low: bool
    open_high: bool

    def __str__(self) -> str:
        low, high = (f"{value:,}".removesuffix(".0") for value in (self.low, self.high))
        return f"{'above ' * self.open_low}{low} to {'below ' * self.open_high}{high}"


def numeric_range(name: str) -> Range | None:
    """Return the range of the key ``name``; None if it is not a number or a tuple of numbers."""
    hint: Any = Config
    for part in name.split("."):
        hint = get_type_hints(hint, include_extras=True)[part]
    kinds = [hint, *get_args(hint)] + [inner for outer in get_args(hint) for inner in get_args(outer)]
    if not {int, float} & {kind for kind in kinds if isinstance(kind, type)}:
        return None
    info: Any = known_keys()[name].default
    limits = [*info.metadata, *(limit for kind in kinds for limit in getattr(kind, "metadata", ()))] if info else []
    limits = [inner for limit in limits for inner in getattr(limit, "metadata", None) or [limit]]
    found = {
        kind: getattr(limit, kind) for limit in limits for kind in ("ge", "gt", "le", "lt") if hasattr(limit, kind)
    }
    return Range(found.get("gt", found.get("ge")), found.get("lt", found.get("le")), "gt" in found, "lt" in found)

"""Ranges of the numeric keys, read from the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from recipe_gkd.config.key_types import known_keys, type_of
from recipe_gkd.errors import ConfigError


@dataclass(frozen=True)
class Range:
    """Range of values of a numeric key.

    Attributes:
        low: Lower bound.
        high: Upper bound.
        open_low: True if ``low`` itself is excluded.
        open_high: True if ``high`` itself is excluded.
        integer: True if the key takes only integers.
    """

    low: float
    high: float
    open_low: bool
    open_high: bool
    integer: bool

    def __str__(self) -> str:
        low, high = (f"{value:,}".removesuffix(".0") for value in (self.low, self.high))
        return f"{'above ' * self.open_low}{low} to {'below ' * self.open_high}{high}"


def numeric_range(name: str) -> Range | None:
    """Return the range of the key ``name``; None if it is not a number or a tuple of numbers.

    Raises:
        ConfigError: The key has no lower or no upper bound in the schema.
    """
    hint = type_of(name)
    kinds = [hint, *get_args(hint)] + [inner for outer in get_args(hint) for inner in get_args(outer)]
    numbers = {int, float} & {kind for kind in kinds if isinstance(kind, type)}
    if not numbers:
        return None
    info: Any = known_keys()[name].default
    limits = [*info.metadata, *(limit for kind in kinds for limit in getattr(kind, "metadata", ()))] if info else []
    limits = [inner for limit in limits for inner in getattr(limit, "metadata", None) or [limit]]
    found = {
        kind: getattr(limit, kind) for limit in limits for kind in ("ge", "gt", "le", "lt") if hasattr(limit, kind)
    }
    low, high = found.get("gt", found.get("ge")), found.get("lt", found.get("le"))
    if low is None or high is None:
        raise ConfigError(f"{name} lacks a bound in the schema", keys=(name,))
    return Range(low, high, "gt" in found, "lt" in found, integer=numbers == {int})

"""Values at both bounds of a numeric key."""

from __future__ import annotations

import math

from recipe_gkd.config.ranges import Range


def ends_of(found: Range) -> tuple[float, float]:
    """Return the smallest and the largest value of a range."""

    def after(value: float, to: float) -> float:
        return value + math.copysign(1, to) if found.integer else math.nextafter(value, to)

    low = after(found.low, math.inf) if found.open_low else found.low
    high = after(found.high, -math.inf) if found.open_high else found.high
    return (int(low), int(high)) if found.integer else (low, high)

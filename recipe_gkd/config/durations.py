"""Durations as batch systems write them: ``HH:MM:SS``, and ``D-HH:MM:SS`` with days."""

from __future__ import annotations

import re
from typing import Any

from recipe_gkd.errors import ConfigError

_DURATION = re.compile(r"(?:(?P<days>\d{1,3})-)?(?P<hours>\d{1,4}):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)")


def duration_s(text: str) -> int:
    """Return the seconds of a duration.

    Raises:
        ConfigError: ``text`` has another form, or is zero.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"got {text!r}, expected HH:MM:SS or D-HH:MM:SS, such as 03:50:00 or 1-23:50:00")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    total_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if total_s == 0:
        raise ConfigError("got 0, expected a time above 0", remedy="use null for no limit")
    return total_s


def to_clock(value: Any) -> Any:
    """Return a number of seconds as ``HH:MM:SS``, because YAML reads ``3:50:00`` as 13800. Other values are kept."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    minutes, seconds = divmod(value, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"

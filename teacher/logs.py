"""How a process of the service logs: lines for people or JSON lines for machines, and nothing too often."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]


def set_up_logging(level: str, log_format: LogFormat) -> None:
    """All loggers of this process, to stderr.

    A record's `extra={"fields": {...}}` are keys of their own in JSON, and follow the message in text.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLine() if log_format == "json" else _TextLine())
    logging.basicConfig(level=level, handlers=[handler], force=True)


class _TextLine(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        return super().formatMessage(record) + "".join(f" {name}={value}" for name, value in fields.items())


class _JsonLine(logging.Formatter):
    """One object a line: ts (ISO 8601, UTC), level, logger, message, the record's fields, and exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _fields(record).items():
            line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


class Seldom:
    """For what a stranger can cause again and again: says when to mention it. For one thread; its memory is bounded."""

    def __init__(self, interval_s: float = 60.0, max_keys: int = 1000) -> None:
        self._interval_s, self._max_keys = interval_s, max_keys
        self._seen: dict[str, tuple[float, int]] = {}  # key -> last mentioned, not mentioned since

    def count(self, key: str, now: float | None = None) -> int:
        """It happened. 0: do not mention it; else how often it did since it was last mentioned, this time included."""
        now = time.monotonic() if now is None else now
        if key not in self._seen and len(self._seen) >= self._max_keys:
            self._seen = {k: seen for k, seen in self._seen.items() if now - seen[0] < self._interval_s}
            if len(self._seen) >= self._max_keys:
                key = ""  # all others together
        mentioned, silent = self._seen.get(key, (-float("inf"), 0))
        if now - mentioned < self._interval_s:
            self._seen[key] = (mentioned, silent + 1)
            return 0
        self._seen[key] = (now, 0)
        return silent + 1

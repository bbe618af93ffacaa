"""Logging of the service's processes: text or JSON lines, and a rate limit for repeated messages."""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]


def set_up_logging(level: str, log_format: LogFormat) -> None:
    """Send all log records of this process to stderr.

    The entries of a record's ``extra={"fields": {...}}`` become keys of the JSON object, or follow the text message.

    Args:
        level: Lowest level that is logged, such as ``"INFO"``.
        log_format: ``"text"`` or ``"json"``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        return super().formatMessage(record) + "".join(f" {name}={value}" for name, value in fields.items())


class _JsonFormatter(logging.Formatter):
    """Formatter that writes one JSON object per line.

    Keys: ts (ISO 8601, UTC), level, logger, message, the record's fields, and exception if there is one.
    """

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


class LogRateLimiter:
    """Rate limit for log messages that a remote peer can cause repeatedly. Its memory is bounded; one thread only.

    Example::

        limiter = LogRateLimiter(interval_s=60.0)
        if n := limiter.count(address):
            logger.warning("refused %s (%d times)", address, n)

    Args:
        interval_s: Time between two logged events of a key, in seconds.
        max_keys: Keys that are tracked individually. Further keys share one entry.
    """

    def __init__(self, interval_s: float = 60.0, max_keys: int = 1000) -> None:
        self._interval_s, self._max_keys = interval_s, max_keys
        self._seen: dict[str, tuple[float, int]] = {}  # key -> time of the last log message, events since then

    def count(self, key: str, now: float | None = None) -> int:
        """Count one event.

        Args:
            key: Kind of event.
            now: Current time in seconds, by default ``time.monotonic()``.

        Returns:
            Number of events to report now, this one included; 0 if nothing is to be logged.
        """
        now = time.monotonic() if now is None else now
        if key not in self._seen and len(self._seen) >= self._max_keys:
            self._seen = {k: seen for k, seen in self._seen.items() if now - seen[0] < self._interval_s}
            if len(self._seen) >= self._max_keys:
                key = ""
        logged_at, n_suppressed = self._seen.get(key, (-float("inf"), 0))
        if now - logged_at < self._interval_s:
            self._seen[key] = (logged_at, n_suppressed + 1)
            return 0
        self._seen[key] = (now, 0)
        return n_suppressed + 1

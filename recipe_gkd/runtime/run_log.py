"""Log of a run: everything goes to a file, and what a user needs during the run to the console."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger("recipe_gkd")

_FILE_ONLY = "file_only"
FILE_ONLY = {_FILE_ONLY: True}
"""Argument ``extra`` of a log call whose record the console does not show, such as one with a traceback."""
EVENT = "run_event"
"""Attribute of a log record that is an event of the run (see :mod:`recipe_gkd.metrics.run_events`)."""

RESUMED, FROM_MODEL_FOLDER = "resumed from", "the weights come from the model folder"
"""First words of the line with which the training of each start begins, also after a restart of the actor ranks."""


def as_event(name: str, **values: object) -> dict[str, Any]:
    """Return the argument ``extra`` of a log call that is also written to the events of the run.

    Args:
        name: Name of the event.
        values: Its values. None: the first line of the message.
    """
    return {EVENT: {"event": name, **values}}


class _ConsoleHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to the current ``sys.stderr``, which a progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        self.stream = sys.stderr
        super().emit(record)


def start_logging(path: Path) -> None:
    """Log everything to ``path``, and what a user needs during the run to the console."""
    console, file = _ConsoleHandler(), logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    console.addFilter(lambda record: not hasattr(record, _FILE_ONLY))
    logging.raiseExceptions = False  # a full disk must not print a traceback for each line
    logging.basicConfig(
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        level=logging.WARNING,
        handlers=[console, file],
        force=True,
    )
    log.setLevel(logging.INFO)


def log_to_file(message: str, error: BaseException | None) -> str | None:
    """Log an error with its traceback to the file only.

    Returns:
        Path of the file. None if there is none, so that nothing was logged.
    """
    files = [handler.baseFilename for handler in logging.getLogger().handlers if hasattr(handler, "baseFilename")]
    if not files:
        return None
    log.error("%s", message, exc_info=error, extra=FILE_ONLY)
    return str(files[0])


def log_background_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log errors of abandoned tasks to the file only, so that the console shows the error of the run."""
    log.error("%s", context.get("message"), exc_info=context.get("exception"), extra=FILE_ONLY)

"""Events of a run in ``events.jsonl``: its starts and ends, loaded checkpoints, and replaced workers."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from recipe_gkd.checkpoints.run_folder import EVENTS
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.metrics.loggers.line_file import LineFile
from recipe_gkd.runtime.run_log import EVENT
from recipe_gkd.runtime.signals import Terminated
from teacher.common.display_text import shorten

START, END = "start", "end"
MAX_TEXT = 500
"""Maximum number of characters of a message."""


class RunEvents(logging.Handler):
    """Writer of the events between the start and the end of a run. A failure of the disk never ends the run.

    Lifecycle::

        with RunEvents(folder) as events:       # writes the start
            events.stopped_by = train()         # log calls with extra=as_event(...) are written meanwhile
                                                # writes the end, with the error if there is one

    A line has ``event``, ``time`` (ISO 8601) and, by event:

    - ``start``: ``host``, ``pid``.
    - ``load``: ``step`` of the loaded checkpoint. 0: the weights of the model folder.
    - ``rollout_restart``, ``actor_restart``, ``scoring_restart``: ``message``.
    - ``end``: ``status`` (``complete``, ``stopped`` or ``failed``), and ``reason`` except for the first. A run that was
      killed has no end.

    Attributes:
        stopped_by: Cause of an end before the last step, such as ``"SIGTERM"``. None if the training is complete.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._path = folder / EVENTS
        self.stopped_by: str | None = None
        self.addFilter(lambda record: hasattr(record, EVENT))

    def __enter__(self) -> RunEvents:
        self._file = LineFile(self._path, lambda _: True)
        self._append(time.time(), {"event": START, "host": socket.gethostname(), "pid": os.getpid()})
        logging.getLogger("recipe_gkd").addHandler(self)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        logging.getLogger("recipe_gkd").removeHandler(self)
        self._append(time.time(), {"event": END, **_outcome(error, self.stopped_by)})
        self._file.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write the event of a log record, with the first line of its message if it has no other values."""
        try:
            event: dict[str, Any] = getattr(record, EVENT)
            self._append(record.created, event if len(event) > 1 else event | {"message": _first_line(record)})
        except Exception:  # noqa: BLE001 - as in all handlers: a record must not end the run
            self.handleError(record)

    def _append(self, seconds: float, event: dict[str, Any]) -> None:
        time_text = datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
        self._file.append(json.dumps({"time": time_text, **event}).encode())


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a run folder, oldest first. Lines that cannot be read are left out."""
    events = []
    try:
        lines = (folder / EVENTS).read_bytes().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            event = dict(json.loads(line))
            datetime.fromisoformat(event["time"])
            events.append(event | {"event": str(event["event"])})
        except (ValueError, KeyError, TypeError):
            continue
    return events


def _outcome(error: BaseException | None, stopped_by: str | None) -> dict[str, str]:
    if isinstance(error, Exception):
        return {"status": "failed", "reason": _shorten(as_known_error(error, "outside the training").summary)}
    if isinstance(error, Terminated):
        return {"status": "stopped", "reason": f"at once, by signal {error.number}"}
    if error is not None:
        return {"status": "stopped", "reason": f"at once, by {type(error).__name__}"}
    return {"status": "complete"} if stopped_by is None else {"status": "stopped", "reason": stopped_by}


def _first_line(record: logging.LogRecord) -> str:
    return _shorten(record.getMessage())


def _shorten(message: str) -> str:
    line = message.strip().partition("\n")[0]
    return line if len(line) <= MAX_TEXT else shorten(line, MAX_TEXT - 3)

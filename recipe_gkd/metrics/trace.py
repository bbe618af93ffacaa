"""A trace file for https://ui.perfetto.dev and chrome://tracing: every span of every worker, as it happens.

Chrome's trace event format, as a JSON array with an event a line. Each pool is a process, each worker a thread. The
closing bracket is optional in this format, so the file of a run that was killed can be read as well, and shows what
was under way then. About 200 bytes a span.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipe_gkd.errors import ConfigError

log = logging.getLogger(__name__)

OPEN = float("inf")
POOLS = ("trainer", "rollout", "teacher", "actor")
"""From top to bottom; others below."""


@dataclass
class _Worker:
    """A track: drawn as one row, or as several where its spans overlap, since a row of the viewers must nest."""

    pid: int
    name: str
    order: int
    free_at: list[float] = field(default_factory=list)
    """Of each row: when its last span ended."""
    threads: list[int] = field(default_factory=list)
    """Of each row: the thread's number in the file."""


class TraceFile:
    """Writes what a :class:`~recipe_gkd.metrics.timeline.Timeline` tells it; times count from its first event.

    A file that is there already, of a run that this one resumes perhaps, is kept as ``NAME.previous.json``. A disk
    that is full ends the trace with a warning, not the run.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(path).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_file():
                path.replace(path.with_suffix(f".previous{path.suffix}"))
            self._file = path.open("w", buffering=1)
        except OSError as error:
            raise ConfigError(f"trainer.trace_file={path} cannot be written: {error}; choose another place") from error
        self._workers: dict[str, _Worker] = {}
        self._pools: dict[str, int] = {}
        self._n_threads = 0
        self._started: float | None = None
        self._write("[\n")

    def begin(self, track: str, name: str, since: float, args: dict[str, Any]) -> tuple[_Worker, int]:
        worker = self._worker(track)
        row = self._take_row(worker, since, OPEN)
        self._event("B", worker.pid, worker.threads[row], ts=self._ts(since), name=_title(name, args), args=args)
        return worker, row

    def end(self, span: tuple[_Worker, int], until: float) -> None:
        worker, row = span
        worker.free_at[row] = until
        self._event("E", worker.pid, worker.threads[row], ts=self._ts(until))

    def record(self, track: str, name: str, since: float, until: float, args: dict[str, Any]) -> None:
        worker = self._worker(track)
        thread = worker.threads[self._take_row(worker, since, until)]
        ts = self._ts(since)
        length = round(self._ts(until) - ts, 3)
        self._event("X", worker.pid, thread, ts=ts, dur=length, name=_title(name, args), args=args)

    def count(self, track: str, name: str, at: float, value: float) -> None:
        self._event("C", self._worker(track).pid, 0, ts=self._ts(at), name=name, args={name: value})

    def close(self) -> None:
        """Make it JSON to the letter. What comes later, from tasks that are being cancelled, is not written."""
        self._write('{"ph":"M","name":"trace_end","pid":0}\n]\n')
        self._shut()

    def _take_row(self, worker: _Worker, since: float, until: float) -> int:
        for row, free_at in enumerate(worker.free_at):
            if free_at <= since:
                worker.free_at[row] = until
                return row
        row = len(worker.free_at)
        self._n_threads += 1
        worker.free_at.append(until)
        worker.threads.append(self._n_threads)
        label = worker.name if not row else f"{worker.name} ({row + 1})"
        self._describe("thread", worker.pid, self._n_threads, label, worker.order * 100 + row)
        return row

    def _worker(self, track: str) -> _Worker:
        if track not in self._workers:
            pool, _, number = track.partition(" ")
            if pool not in self._pools:
                pid = self._pools[pool] = len(self._pools) + 1
                self._describe("process", pid, 0, pool, POOLS.index(pool) if pool in POOLS else len(POOLS) + pid)
            self._workers[track] = _Worker(self._pools[pool], track, int(number) if number.isdigit() else 0)
        return self._workers[track]

    def _describe(self, kind: str, pid: int, thread: int, name: str, order: int) -> None:
        self._event("M", pid, thread, name=f"{kind}_name", args={"name": name})
        self._event("M", pid, thread, name=f"{kind}_sort_index", args={"sort_index": order})

    def _ts(self, at: float) -> float:
        """Microseconds since the first event."""
        if self._started is None:
            self._started = at
        return round((at - self._started) * 1e6, 3)

    def _event(self, phase: str, pid: int, thread: int, **more: Any) -> None:
        event = {"ph": phase, "pid": pid, "tid": thread, **more}
        self._write(json.dumps(event, separators=(",", ":"), default=str) + ",\n")

    def _write(self, text: str) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(text)
        except OSError as error:
            log.warning("the trace ends here, %s cannot be written any more: %s", self._file.name, error)
            self._shut()

    def _shut(self) -> None:
        with suppress(OSError):  # what could not be written, once more
            self._file.close()


def _title(name: str, args: dict[str, Any]) -> str:
    return f"{name} {args['step']}" if "step" in args else name

"""Trace file with the spans of all workers, for https://ui.perfetto.dev and chrome://tracing.

The format is Chrome's trace event format: a JSON array with one event per line. Each pool is a process and each worker
a thread. Events are written when they happen, and the closing bracket is optional in this format, so the file of a
killed run is valid and shows the spans that were open. A span needs about 200 bytes.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from recipe_gkd.runtime.previous_files import keep_previous

log = logging.getLogger(__name__)

OPEN = float("inf")  # end of a span that is still open
POOLS = ("trainer", "rollout", "teacher", "actor")  # from top to bottom; other pools are below


@dataclass
class _Worker:
    """Track in the file. Overlapping spans are drawn in several rows, because the viewers require nested spans per row.

    Attributes:
        pid: Number of the pool in the file.
        name: Name of the track.
        order: Position within the pool.
        free_at: End of the last span of each row.
        threads: Thread number of each row in the file.
    """

    pid: int
    name: str
    order: int
    free_at: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)


class TraceFile:
    """Sink of a :class:`~recipe_gkd.metrics.timeline.Timeline` that writes a trace file.

    Times in the file start at its first event. An existing file is renamed to ``NAME.previous.json``, or
    ``NAME.previous2.json`` and so on if there are earlier ones. If the disk is full, the trace ends with a warning and
    the run continues.
    """

    def __init__(self, path: str | Path) -> None:
        """Create the file and its folder. A file that cannot be written is a warning."""
        path = Path(path)
        self._file: TextIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            keep_previous(path)
            self._file = path.open("w", buffering=1)
        except OSError as error:
            log.warning("there is no trace: trainer.trace_file=%s cannot be written: %s", path, error)
        self._workers: dict[str, _Worker] = {}
        self._pools: dict[str, int] = {}
        self._n_threads = 0
        self._started: float | None = None
        self._write("[\n")

    def begin(self, track: str, name: str, since: float, args: dict[str, object]) -> tuple[_Worker, int]:
        """Write the start of a span, and return its worker and row for :meth:`end`."""
        worker = self._worker(track)
        row = self._take_row(worker, since, OPEN)
        self._event("B", worker.pid, worker.threads[row], ts=self._ts(since), name=_title(name, args), args=args)
        return worker, row

    def end(self, span: tuple[_Worker, int], until: float) -> None:
        """Write the end of a span."""
        worker, row = span
        worker.free_at[row] = until
        self._event("E", worker.pid, worker.threads[row], ts=self._ts(until))

    def record(self, track: str, name: str, since: float, until: float, args: dict[str, object]) -> None:
        """Write a complete span."""
        worker = self._worker(track)
        thread = worker.threads[self._take_row(worker, since, until)]
        ts = self._ts(since)
        length = round(self._ts(until) - ts, 3)
        self._event("X", worker.pid, thread, ts=ts, dur=length, name=_title(name, args), args=args)

    def count(self, track: str, name: str, at: float, value: float) -> None:
        """Write a new value of a counter."""
        self._event("C", self._worker(track).pid, 0, ts=self._ts(at), name=name, args={name: value})

    def close(self) -> None:
        """Write the closing bracket. Later events, of tasks that are being canceled, are ignored."""
        self._write('{"ph":"M","name":"trace_end","pid":0}\n]\n')
        self._close_file()

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
        """Return the time since the first event, in microseconds."""
        if self._started is None:
            self._started = at
        return round((at - self._started) * 1e6, 3)

    def _event(self, phase: str, pid: int, thread: int, **more: object) -> None:
        event = {"ph": phase, "pid": pid, "tid": thread, **more}
        self._write(json.dumps(event, separators=(",", ":"), default=str) + ",\n")

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(text)
        except OSError as error:
            log.warning("the trace ends here: %s cannot be written any more: %s", self._file.name, error)
            self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # closing writes the buffer, which fails again
                self._file.close()
        self._file = None


def _title(name: str, args: dict[str, object]) -> str:
    return f"{name} {args['step']}" if "step" in args else name

"""Record of the project's function calls in one process, as lines of JSON.

A line has the time, the file, the function, the types of its arguments and of the first elements of containers among
them, and for some functions the stack. It uses ``sys.setprofile``. A function is recorded at most once in 5 ms for each
thread, so that loops cost little.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

REPO = str(Path(__file__).resolve().parents[2])
PACKAGES = tuple(f"{REPO}/{name}/" for name in ("recipe_gkd", "teacher"))
WITH_STACK = ("run_micro_batches", "forward_backward", "RemoteGroup.call_each", "WorkerGroup._call_ranks")
INTERVAL_S = 0.005


def install(folder: str) -> None:
    """Record all further calls of this process, its threads and its forks into files of ``folder``."""
    recorder = _Recorder(folder)
    os.register_at_fork(after_in_child=recorder.reopen)
    threading.setprofile(recorder.record)
    sys.setprofile(recorder.record)


class _Recorder:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._last: dict[tuple[int, Any], float] = {}
        self.reopen()

    def reopen(self) -> None:
        """Open the file of this process."""
        path = f"{self._folder}/{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def record(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGES):
            return
        now, key = time.monotonic(), (threading.get_ident(), code)
        if now - self._last.get(key, 0.0) < INTERVAL_S:
            return
        self._last[key] = now
        stack = _stack(frame) if code.co_qualname in WITH_STACK else []
        line = [now, code.co_filename.removeprefix(f"{REPO}/"), code.co_qualname, _types(frame), stack]
        os.write(self._file, json.dumps(line).encode() + b"\n")


def _types(frame: FrameType) -> list[str]:
    """Return the names of the classes of the arguments, of the first elements of containers, and their bases."""
    found: set[str] = set()
    for value in frame.f_locals.values():
        item, depth = value, 0
        while isinstance(item, list | tuple | dict) and item and depth < 2:
            item, depth = (next(iter(item.values())) if isinstance(item, dict) else item[0]), depth + 1
        for one in (value, item):
            found.update(base.__name__ for base in type(one).__mro__[:-1])
    return sorted(found)


def _stack(frame: FrameType | None) -> list[str]:
    """Return the project's functions on the stack, the innermost first."""
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGES):
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return found

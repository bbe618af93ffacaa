"""SIGTERM and SIGINT as something that a poller can wait for."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import FrameType
from typing import Protocol

SAME_STOP_S = 1.0
"""Signals within this time of the first are the same request to stop: Ctrl-C, supervisors and parents that forward a
signal deliver one request to a process more than once."""


class Stoppable(Protocol):
    """Readable once a loop should end: `StopSignal`, or one end of a socket pair."""

    def fileno(self) -> int: ...


class StopSignal:
    """Readable `fileno()` once the process was asked to stop. Make it in the main thread.

    Raising out of a signal handler could break an engine in the middle of a step; a descriptor is looked at between
    steps. A second signal, ``SAME_STOP_S`` after the first or later, ends the process at once with 128 + its number. A
    thread does that, so that it works while the main thread waits in an engine.
    """

    def __init__(self) -> None:
        from_signals, self._sender = socket.socketpair()
        self._receiver, to_loop = socket.socketpair()
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)
        threading.Thread(target=_watch, args=(from_signals, to_loop), name="teacher-stop", daemon=True).start()

    def fileno(self) -> int:
        return self._receiver.fileno()


def _watch(from_signals: socket.socket, to_loop: socket.socket) -> None:
    """Pass the first signal on to the loop, and end the process at the second."""
    first_at: float | None = None
    while numbers := from_signals.recv(1):
        number = numbers[0]
        if number not in (signal.SIGTERM, signal.SIGINT):
            continue
        if first_at is None:
            first_at = time.monotonic()
            to_loop.send(b"\0")
        elif time.monotonic() - first_at >= SAME_STOP_S:
            os._exit(128 + number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The byte that Python writes to the wake-up descriptor is the message."""

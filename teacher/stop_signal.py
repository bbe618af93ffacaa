"""SIGTERM and SIGINT as something that a poller can wait for."""

from __future__ import annotations

import signal
import socket
from types import FrameType
from typing import Protocol


class Stoppable(Protocol):
    """Readable once a loop should end: `StopSignal`, or one end of a socket pair."""

    def fileno(self) -> int: ...


class StopSignal:
    """Readable `fileno()` once the process was asked to stop. Make it in the main thread.

    Raising out of a signal handler could break an engine in the middle of a step; a descriptor is looked at between
    steps.
    """

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)

    def fileno(self) -> int:
        return self._receiver.fileno()


def _ignore(number: int, frame: FrameType | None) -> None:
    """The byte that Python writes to the wake-up descriptor is the message."""

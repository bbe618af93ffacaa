"""SIGTERM and SIGINT as a readable file descriptor.

===========  ==============================================================  =============================
state        event                                                           next state
===========  ==============================================================  =============================
running      SIGTERM or SIGINT                                               stopping: descriptor readable
stopping     signal within DUPLICATE_SIGNAL_WINDOW_S of the first            stopping
stopping     later signal                                                    process exits with 128 + signal
===========  ==============================================================  =============================
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from types import FrameType
from typing import Protocol

DUPLICATE_SIGNAL_WINDOW_S = 1.0
"""Time in which further signals count as copies of the first, in seconds.

Ctrl-C, supervisors and parents that forward a signal deliver one request to a process more than once.
"""


class Stoppable(Protocol):
    """Object with a descriptor that becomes readable when a loop is to end, such as ``StopSignal``."""

    def fileno(self) -> int:
        """Return the descriptor."""
        ...


class StopSignal:
    """Descriptor that becomes readable at the first signal. Create it in the main thread.

    An exception raised by a signal handler could interrupt an engine step. A loop polls the descriptor between steps
    instead. A second signal ends the process from a separate thread, so that it works while the main thread is blocked
    in an engine.
    """

    def __init__(self) -> None:
        from_signals, self._sender = socket.socketpair()
        self._receiver, to_loop = socket.socketpair()
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore)
        threading.Thread(
            target=_forward_signals, args=(from_signals, to_loop), name="teacher-stop", daemon=True
        ).start()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._receiver.fileno()


def _forward_signals(from_signals: socket.socket, to_loop: socket.socket) -> None:
    """Forward the first signal to the loop, and end the process at the second."""
    first_at: float | None = None
    while numbers := from_signals.recv(1):
        number = numbers[0]
        if number not in (signal.SIGTERM, signal.SIGINT):
            continue
        if first_at is None:
            first_at = time.monotonic()
            to_loop.send(b"\0")
        elif time.monotonic() - first_at >= DUPLICATE_SIGNAL_WINDOW_S:
            os._exit(128 + number)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. Python writes the signal number to the wake-up descriptor before it calls this handler."""

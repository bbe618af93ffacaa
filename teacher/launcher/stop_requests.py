"""Signals to a command. They are recorded, so that none interrupts the step from a new process to its pid file."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal that ends the command.

    Attributes:
        status: Exit status of the command.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class StopRequests:
    """SIGINT, SIGTERM and SIGHUP to this process, in the order of their arrival.

    Lifecycle::

        requests = StopRequests()
        requests.record()            # from now on signals are recorded
        requests.raise_if_any()      # between two steps of the work
        requests.restore()           # or ignore()
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def record(self, numbers: tuple[int, ...] = SIGNALS, *, also_ignored: bool = False) -> None:
        """Record signals. A signal that is ignored, as under nohup, stays so if not ``also_ignored``."""
        for number in numbers:
            if also_ignored or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._record)

    def raise_if_any(self) -> None:
        """Raise ``Interrupted`` if a signal has arrived."""
        if self.numbers:
            raise Interrupted(self.numbers[0])

    def restore(self) -> None:
        """Let recorded signals end the process again."""
        for number in SIGNALS:
            if signal.getsignal(number) == self._record:
                signal.signal(number, signal.SIG_DFL)

    def ignore(self) -> None:
        """Ignore all signals from now on."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.numbers.append(number)

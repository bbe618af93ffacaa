"""Orderly end of the training command on SIGINT, SIGTERM and SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

log = logging.getLogger(__name__)

SAME_REQUEST_S = 1.0
"""Signals within this time are one request, because a terminal, ``timeout`` and wrapper scripts repeat them."""

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


class Terminated(BaseException):
    """Request to end the run: SIGTERM, or SIGHUP of a terminal that has gone away.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_on_signals() -> None:
    """Make SIGTERM and SIGHUP raise :class:`Terminated` in the main thread."""
    for number in _terminating_signals():
        signal.signal(number, _raise_terminated)


async def run_until_terminated(work: Coroutine[Any, Any, None], on_background_error: ExceptionHandler) -> None:
    """Run ``work``. A signal cancels it, so that it closes its resources, and is raised afterwards.

    The first signal lets a background checkpoint complete. A second one ends this wait, or cuts the shutdown of the
    workers short. The rest takes seconds and ends all processes, even if more signals arrive.

    Args:
        work: The training.
        on_background_error: Exception handler of the event loop.

    Raises:
        KeyboardInterrupt: SIGINT was received first.
        Terminated: Another signal was received first.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    received: list[tuple[int, float]] = []

    def stop(number: int) -> None:
        if received and (number == signal.SIGHUP or time.monotonic() - received[-1][1] < SAME_REQUEST_S):
            return
        if not received:
            name = signal.Signals(number).name
            log.warning("%s: the run shuts down in order; send a second signal to end it without waiting", name)
        received.append((number, time.monotonic()))
        task.cancel()

    numbers = [
        *_terminating_signals(),
        *([signal.SIGINT] if signal.getsignal(signal.SIGINT) != signal.SIG_IGN else []),
    ]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    loop.set_exception_handler(on_background_error)
    try:
        await task
    except asyncio.CancelledError:
        if not received:
            raise
        raise (KeyboardInterrupt if received[0][0] == signal.SIGINT else Terminated(received[0][0])) from None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


@contextmanager
def hangup_ignored() -> Iterator[None]:
    """Let processes that are started in the body, and their children, ignore SIGHUP.

    A terminal that goes away sends it to all of them. Then the driver could no longer close them in order.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _terminating_signals() -> list[signal.Signals]:
    """Return SIGTERM and SIGHUP without those that this process ignores, such as SIGHUP under nohup."""
    numbers = [signal.SIGTERM, signal.SIGHUP]
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def _raise_terminated(number: int, _: object) -> NoReturn:
    raise Terminated(number)

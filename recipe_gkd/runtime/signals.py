"""Orderly end of the training command on SIGINT, SIGTERM, SIGUSR1 and SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from recipe_gkd.runtime.stop_request import StopRequest

log = logging.getLogger(__name__)

SAME_REQUEST_S = 1.0
"""Signals within this time are one request, because a terminal, ``timeout`` and wrapper scripts repeat them."""

ExceptionHandler = Callable[[asyncio.AbstractEventLoop, dict[str, Any]], object]


SAVING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals whose first one lets the training save a checkpoint between steps. Batch systems and terminals send them."""


class Terminated(BaseException):
    """Request to end the run at once: SIGTERM, SIGUSR1, or SIGHUP of a terminal that has gone away.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_on_signals() -> None:
    """Make SIGTERM, SIGUSR1 and SIGHUP raise :class:`Terminated` in the main thread."""
    for number in _terminating_signals():
        signal.signal(number, _raise_terminated)


async def run_until_terminated(
    work: Coroutine[Any, Any, None], on_background_error: ExceptionHandler, save_and_stop: StopRequest | None = None
) -> None:
    """Run ``work``. A signal cancels it, so that it closes its resources, and is raised afterwards.

    The first of ``SAVING_SIGNALS`` only makes a request, if the training accepts it: then ``work`` saves and returns.
    Otherwise the first signal lets a background checkpoint complete. A further signal ends the wait for the step or
    for the checkpoint, or cuts the shutdown of the workers short. The rest takes seconds and ends all processes, even
    if more signals arrive.

    Args:
        work: The training.
        on_background_error: Exception handler of the event loop.
        save_and_stop: Request to save and end, which the training accepts in its loop.

    Raises:
        KeyboardInterrupt: SIGINT was received first.
        Terminated: Another signal was received first.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    received: list[int] = []
    stop_request, last_at = save_and_stop or StopRequest(), -math.inf

    def stop(number: int) -> None:
        nonlocal last_at
        is_again = stop_request.reason is not None or (bool(received) and number == signal.SIGHUP)
        if time.monotonic() - last_at < SAME_REQUEST_S or (number in (signal.SIGHUP, signal.SIGUSR1) and is_again):
            return
        name, last_at = signal.Signals(number).name, time.monotonic()
        if not received and number in SAVING_SIGNALS and stop_request.request(name):
            return
        if not received:
            log.warning("%s: shutting down gracefully; repeat the signal to stop now", name)
        received.append(number)
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
        raise (KeyboardInterrupt if received[0] == signal.SIGINT else Terminated(received[0])) from None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, before[number])


@contextmanager
def hangup_ignored() -> Iterator[None]:
    """Let processes that are started in the body, and their children, ignore SIGHUP.

    A terminal that goes away sends it to all of them. Then the driver could no longer close them gracefully.
    """
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextmanager
def exit_as_termination() -> Iterator[None]:
    """Raise :class:`Terminated` instead of SystemExit in the body: a library's own handler of SIGTERM exits."""
    try:
        yield
    except SystemExit as error:
        raise Terminated(signal.SIGTERM) from error


def _terminating_signals() -> list[signal.Signals]:
    """Return SIGTERM, SIGUSR1 and SIGHUP without those that this process ignores, such as SIGHUP under nohup."""
    numbers = [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def _raise_terminated(number: int, _: object) -> NoReturn:
    raise Terminated(number)

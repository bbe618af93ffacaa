"""Daemon threads for blocking functions, so that a function that never returns does not delay the exit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def in_thread(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run ``function(*args)`` in a new daemon thread and return its result.

    Use it instead of ``asyncio.to_thread``. ``asyncio.run`` and the interpreter join the threads of the default
    executor without a deadline, so that a thread blocked by a disk would keep a failed run alive. If the caller is
    canceled, the thread continues.
    """
    return await asyncio.wrap_future(start_in_thread(function, *args))


def run_until(deadline: float, calls: Sequence[Callable[[], T]]) -> list[T | None]:
    """Run ``calls`` concurrently in daemon threads, and return at ``deadline`` at the latest.

    Args:
        deadline: Time by ``time.monotonic()``.
        calls: Functions without arguments.

    Returns:
        Results in the order of ``calls``; None for a call that raised, or that has not returned by ``deadline``.
    """
    futures = [start_in_thread(call) for call in calls]
    ended = wait(futures, timeout=max(0.0, deadline - time.monotonic())).done
    return [future.result() if future in ended and future.exception() is None else None for future in futures]


def start_in_thread(function: Callable[[*Ts], T], *args: *Ts) -> Future[T]:
    """Start a daemon thread that computes ``function(*args)``, and return its result as a future."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # a canceled caller must not cancel a future that the thread sets later

    def work() -> None:
        try:
            outcome.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            outcome.set_exception(error)

    name = getattr(function, "__name__", type(function).__name__)
    threading.Thread(target=work, name=f"in_thread:{name}", daemon=True).start()
    return outcome

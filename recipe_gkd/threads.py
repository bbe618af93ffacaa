"""Run blocking functions in daemon threads, so that a function that never returns cannot hold up the exit."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``, computed in a daemon thread of its own.

    Use it instead of ``asyncio.to_thread``: ``asyncio.run`` and the interpreter join the threads of the default
    executor without a deadline, so a thread that hangs on a disk would keep a failed run from ending. A caller that is
    canceled leaves the thread behind.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(result)
        else:
            outcome.set_exception(error)

    def work() -> None:
        result, failure = None, None
        try:
            result = function(*args)
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            failure = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name=_name(function), daemon=True).start()
    return await outcome


def run_until(deadline: float, calls: Sequence[Callable[[], T]]) -> list[T | None]:
    """Run ``calls`` at the same time in daemon threads, and return their results at ``deadline`` at the latest.

    Args:
        deadline: Time by ``time.monotonic()``.
        calls: Functions without arguments.

    Returns:
        Results in the order of ``calls``; None for a call that raised, or that has not returned by ``deadline``.
    """
    results: list[T | None] = [None] * len(calls)

    def work(place: int, call: Callable[[], T]) -> None:
        with suppress(Exception):
            results[place] = call()

    threads = [
        threading.Thread(target=work, args=(place, call), name=_name(call), daemon=True)
        for place, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(results)


def _name(function: Callable[..., Any]) -> str:
    return f"in_thread:{getattr(function, '__name__', type(function).__name__)}"

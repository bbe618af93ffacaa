"""Daemon threads for blocking functions, so that a function that never returns does not delay the exit.

A thread that has ended its function waits for the next one. Starting a thread takes up to 5 ms if another one computes,
because ``Thread.start`` waits until the new thread holds the interpreter's lock, and the event loop would stand still.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def in_thread(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run ``function(*args)`` in a daemon thread and return its result.

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
    """Compute ``function(*args)`` in a daemon thread, and return its result as a future."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # a canceled caller must not cancel a future that the thread sets later

    def work() -> None:
        try:
            outcome.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            outcome.set_exception(error)

    job = f"in_thread:{getattr(function, '__name__', type(function).__name__)}", work
    try:
        _idle.pop().put(job)
    except IndexError:
        jobs: SimpleQueue[_Job] = SimpleQueue()
        jobs.put(job)
        threading.Thread(target=_serve, args=(jobs,), name=job[0], daemon=True).start()
    return outcome


_Job = tuple[str, Callable[[], None]]
_MAX_IDLE = 32
_idle: deque[SimpleQueue[_Job]] = deque()
"""Queues of the threads that wait for a job."""
os.register_at_fork(after_in_child=_idle.clear)


def _serve(jobs: SimpleQueue[_Job]) -> None:
    """Run jobs one after the other. The thread has the name of its job, for dumps of the stacks."""
    while True:
        threading.current_thread().name, work = jobs.get()
        work()
        del work  # and the arguments of the function
        if len(_idle) >= _MAX_IDLE:
            return
        threading.current_thread().name = "in_thread:idle"
        _idle.append(jobs)

"""A group of Ray workers: call all of them at once, gather with a deadline, and name who failed or did not answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from recipe_gkd.errors import DeadlineError, EchoError, GkdError, WorkerError

_GRACE_S = 1.0
"""After a first failure, how long to collect others: the rank that failed first need not be the one that tells why."""


class WorkerGroup:
    """Ray actors of one kind, ordered by rank.

    Every method raises :class:`WorkerError` (or the worker's own :class:`GkdError`) as soon as one worker fails, and
    :class:`DeadlineError` naming the silent ones when ``timeout_s`` has passed.
    """

    def __init__(self, name: str, handles: Sequence[Any]) -> None:
        self.name = name
        self.handles = list(handles)

    def __len__(self) -> int:
        return len(self.handles)

    def label(self, rank: int) -> str:
        return f"{self.name} worker {rank} of {len(self)}"

    async def call(self, method: str, *args: Any, timeout_s: float, phase: str) -> list[Any]:
        """The same call on every worker; results in rank order."""
        return await self.call_each(method, [args] * len(self), timeout_s=timeout_s, phase=phase)

    async def call_each(self, method: str, args: Sequence[Sequence[Any]], *, timeout_s: float, phase: str) -> list[Any]:
        """One call on each worker with arguments of its own, in rank order."""
        calls = {
            self.label(rank): getattr(handle, method).remote(*own)
            for rank, (handle, own) in enumerate(zip(self.handles, args, strict=True))
        }
        return await gather(calls, timeout_s=timeout_s, phase=phase)

    async def call_one(self, rank: int, method: str, *args: Any, timeout_s: float, phase: str) -> Any:
        call = {self.label(rank): getattr(self.handles[rank], method).remote(*args)}
        return (await gather(call, timeout_s=timeout_s, phase=phase))[0]

    async def stream(self, rank: int, method: str, *args: Any, timeout_s: float, phase: str) -> AsyncIterator[Any]:
        """Iterate what an async generator of one worker yields; the deadline is for the whole of it."""
        items = getattr(self.handles[rank], method).options(num_returns="streaming").remote(*args)
        started = time.monotonic()
        try:
            while True:
                left = timeout_s - (time.monotonic() - started)
                try:
                    async with asyncio.timeout(max(0.0, left)):
                        item = await (await anext(items))
                except StopAsyncIteration:
                    return
                yield item
        except (RayTaskError, RayActorError) as error:  # first: a worker's own TimeoutError is also one of ours
            raise _blame(self.label(rank), phase, error) from error
        except TimeoutError as error:
            raise _silent(phase, [self.label(rank)], [], timeout_s) from error
        finally:
            await _close(items)

    async def stream_each(
        self, method: str, args: Sequence[Sequence[Any]], *, timeout_s: float, phase: str
    ) -> AsyncIterator[Any]:
        """What the async generators of all workers yield, in the order in which it comes."""
        items: asyncio.Queue[Any] = asyncio.Queue()

        async def pump(rank: int, own: Sequence[Any]) -> None:
            async for item in self.stream(rank, method, *own, timeout_s=timeout_s, phase=phase):
                items.put_nowait(item)

        running = {asyncio.create_task(pump(rank, own)) for rank, own in enumerate(args)}
        for task in running:
            task.add_done_callback(items.put_nowait)
        try:
            while running:
                item = await items.get()
                if isinstance(item, asyncio.Task):
                    running.remove(item)
                    item.result()  # raises what made it end early
                else:
                    yield item
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def stop(self, *, timeout_s: float) -> None:
        """Let each worker close what it holds, then end its process; never raises, never takes longer."""
        with suppress(GkdError):  # one that is dead or stuck is killed below
            await self.call("shutdown", timeout_s=timeout_s, phase="shutdown")
        for handle in self.handles:
            ray.kill(handle, no_restart=True)


async def gather(calls: dict[str, Awaitable[Any]], *, timeout_s: float, phase: str) -> list[Any]:
    """Await all, in order; ``calls`` maps the label of who is called to what to wait for."""
    tasks = {asyncio.ensure_future(_result(call)): label for label, call in calls.items()}
    try:
        _, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if pending and any(task.done() and task.exception() for task in tasks):
            _, pending = await asyncio.wait(pending, timeout=_GRACE_S)
        done = [task for task in tasks if task.done()]
        if failed := {tasks[task]: error for task in done if (error := task.exception())}:
            raise _root_cause(failed, phase)
        if pending:
            silent = [label for task, label in tasks.items() if task in pending]
            raise _silent(phase, silent, [tasks[task] for task in done], timeout_s)
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


async def _close(items: Any) -> None:
    """End what still generates. Ray loses a cancel that overtakes its call, so it is told until the call has ended."""
    ended = asyncio.ensure_future(_result(items.completed()))
    started = time.monotonic()
    while not ended.done() and time.monotonic() - started < _GRACE_S:
        ray.cancel(items)
        await asyncio.wait([ended], timeout=0.2)
    if not ended.cancel():
        ended.exception()


async def _result(call: Awaitable[Any]) -> Any:
    return await call


def _root_cause(failed: dict[str, BaseException], phase: str) -> GkdError:
    """Of failures in rank order, the one that explains the others.

    First what a worker says on purpose; then a death; last what may be its echo: a collective that broke.
    """

    def rank(error: BaseException) -> int:
        cause = _cause(error)
        if isinstance(cause, GkdError):
            return 2 if isinstance(cause, EchoError) else 0
        return 1 if isinstance(cause, RayActorError) else 2

    label, error = min(failed.items(), key=lambda item: rank(item[1]))
    return _blame(label, phase, error)


def _cause(error: BaseException) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error


def _blame(label: str, phase: str, error: BaseException) -> GkdError:
    """The error as the user sees it: who, in which phase, why; of the worker's own class if that is one of ours."""
    error = _cause(error)
    who = label.partition(" of ")[0]
    if isinstance(error, GkdError):
        return error if who in str(error) else type(error)(f"{phase}: {label}: {error}")
    if isinstance(error, RayActorError):
        return WorkerError(
            f"{phase}: {label} died ({_reason(error)}); its log is in /tmp/ray/session_latest/logs on its node, "
            "and the kernel's log tells if it was killed for want of memory"
        )
    return WorkerError(f"{phase}: {label} failed: {type(error).__name__}: {error}")


def _silent(phase: str, silent: list[str], answered: list[str], timeout_s: float) -> DeadlineError:
    others = f" ({', '.join(answered)} did)" if answered else ""
    return DeadlineError(
        f"{phase}: {', '.join(silent)} did not answer within {timeout_s:g} s{others}; "
        "look at that worker's log in /tmp/ray/session_latest/logs on its node, or give the phase more time"
    )


def _reason(error: BaseException) -> str:
    """Ray puts the reason into the last line, after the ids of the actor, and a page of advice behind it."""
    last = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    return last.split(" Some common causes")[0].rstrip(".")

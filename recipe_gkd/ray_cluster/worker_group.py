"""A group of Ray workers: call all of them at once, gather with a deadline, and name who failed or did not answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from recipe_gkd.errors import DeadlineError, GkdError, SecondaryFailure, WorkerDied, WorkerError
from recipe_gkd.ray_cluster.node_probe import end_workers, locate
from recipe_gkd.runtime.tasks import run_to_end

_GRACE_S = 1.0
"""After a first failure, how long to collect others: the rank that failed first need not be the one that tells why."""
_REASON_CHARS = 1000
"""Length of Ray's text about a lack of memory, which lists the processes of the node."""
_END_S = 2.0
"""How long the end of processes may take; it takes a tenth of that."""


class WorkerGroup:
    """Ray actors of one kind, ordered by rank.

    Every method raises :class:`WorkerError` (or the worker's own :class:`GkdError`) as soon as one worker fails, and
    :class:`DeadlineError` naming the silent ones when ``timeout_s`` has passed. A worker whose process has ended, or
    whose engine has failed, is a :class:`WorkerDied`; :meth:`replace` puts another in its place.
    """

    def __init__(self, name: str, handles: Sequence[Any]) -> None:
        self.name = name
        self.handles = list(handles)
        self._died: set[str] = set()  # Ray's ids: that a worker failed which was replaced is no news
        self._unanswered: set[int] = set()  # ranks that may still be busy with a call that was given up

    def __len__(self) -> int:
        return len(self.handles)

    def label(self, rank: int) -> str:
        return f"{self.name} worker {rank} of {len(self)}"

    async def call(self, method: str, *args: Any, timeout_s: float, phase: str) -> list[Any]:
        """The same call on every worker; results in rank order."""
        return await self.call_each(method, [args] * len(self), timeout_s=timeout_s, phase=phase)

    async def call_each(self, method: str, args: Sequence[Sequence[Any]], *, timeout_s: float, phase: str) -> list[Any]:
        """One call on each worker with arguments of its own, in rank order."""
        calls = [getattr(handle, method).remote(*own) for handle, own in zip(self.handles, args, strict=True)]
        return await self._gather(dict(enumerate(calls)), timeout_s=timeout_s, phase=phase)

    async def call_one(self, rank: int, method: str, *args: Any, timeout_s: float, phase: str) -> Any:
        call = {rank: getattr(self.handles[rank], method).remote(*args)}
        return (await self._gather(call, timeout_s=timeout_s, phase=phase))[0]

    async def stream(self, rank: int, method: str, *args: Any, timeout_s: float, phase: str) -> AsyncIterator[Any]:
        """Iterate what an async generator of one worker yields; the deadline is for the whole of it."""
        items = getattr(self.handles[rank], method).options(num_returns="streaming").remote(*args)
        actor_id = self._id(rank)  # of this worker, which may be replaced meanwhile
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
        except RayError as error:  # first: a worker's own TimeoutError is also one of ours
            raise await self._to_worker_error(rank, actor_id, phase, error) from error
        except TimeoutError as error:
            self._unanswered.add(rank)
            raise self._silent(phase, [rank], [], timeout_s) from error
        finally:
            await _close(items)

    async def dead(self) -> list[int]:
        """Ranks whose process has ended, or that a call could not reach; one that only does not answer is not dead."""
        places = await locate(self.handles)
        return [rank for rank, place in enumerate(places) if place.dead or self._id(rank) in self._died]

    def replace(self, rank: int, handle: Any) -> None:
        """Put a new worker in the place of one that died, or that can no longer be reached."""
        ray.kill(self.handles[rank], no_restart=True)
        self.handles[rank] = handle
        self._unanswered.discard(rank)

    def _id(self, rank: int) -> str:
        return str(self.handles[rank]._actor_id.hex())

    async def stop(self, *, timeout_s: float) -> None:
        """Let each worker close what it holds, then end its process and all that it has started.

        Processes that do not answer, even stopped ones, are killed; workers that left a call unanswered get a short
        time only. Never raises, never takes longer, though the killing has at least 2 s. Canceled, it kills at once.
        """
        try:
            with suppress(GkdError):
                close_s = min(max(0.0, timeout_s - _END_S), _GRACE_S if self._unanswered else timeout_s)
                await self.call("shutdown", timeout_s=close_s, phase="shutdown")
        finally:
            await run_to_end(end_workers(self.handles, timeout_s=_END_S))

    async def _gather(self, calls: dict[int, Awaitable[Any]], *, timeout_s: float, phase: str) -> list[Any]:
        """Await all, in the order of ``calls``: rank -> what to wait for."""
        tasks = {asyncio.ensure_future(_result(call)): rank for rank, call in calls.items()}
        actor_ids = {rank: self._id(rank) for rank in calls}  # of these workers, which may be replaced meanwhile
        try:
            _, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            if pending and any(task.done() and task.exception() for task in tasks):
                _, pending = await asyncio.wait(pending, timeout=_GRACE_S)
            done = [task for task in tasks if task.done()]
            if failed := {tasks[task]: error for task in done if (error := task.exception())}:
                rank, error = _root_cause(failed)
                raise await self._to_worker_error(rank, actor_ids[rank], phase, error) from error
            if pending:
                silent = [rank for task, rank in tasks.items() if task in pending]
                raise self._silent(phase, silent, [tasks[task] for task in done], timeout_s)
            return [task.result() for task in tasks]
        finally:
            for task, rank in tasks.items():
                (self._unanswered.discard if task.done() else self._unanswered.add)(rank)
                task.cancel()

    async def _to_worker_error(self, rank: int, actor_id: str, phase: str, error: BaseException) -> GkdError:
        """The error as the user sees it: who, in which phase, why; of the worker's own class if that is one of ours."""
        error, label = _cause(error), self.label(rank)
        who = label.partition(" of ")[0]
        if isinstance(error, WorkerDied):  # its engine has failed: the process lives, but is of no more use
            self._died.add(actor_id)
        if isinstance(error, GkdError):
            named = re.search(rf"\b{re.escape(who)}\b", str(error))  # worker 1 is not named by one of worker 12
            return error if named else type(error)(f"{phase}: {label}: {error}")
        place = (await locate([self.handles[rank]]))[0] if isinstance(error, RayError) else None
        if place is None or not (_is_death(error) or place.dead):
            return WorkerError(f"{phase}: {label} failed: {type(error).__name__}: {error}")
        self._died.add(actor_id)
        # Ray is sure that a process has ended, or only that it cannot be reached, as when its whole node dies.
        how = "died or cannot be reached" if isinstance(error, ActorUnavailableError) else "died"
        return WorkerDied(
            f"{phase}: {label} {how}, on node {place.node_ip or '(none yet)'} {place.node_id[:8]} "
            f"({_reason(error)}); its log is in /tmp/ray/session_latest/logs there{_advice(error)}"
        )

    def _silent(self, phase: str, silent: list[int], answered: list[int], timeout_s: float) -> DeadlineError:
        labels, others = [self.label(rank) for rank in silent], [self.label(rank) for rank in answered]
        did = f" ({', '.join(others)} did)" if others else ""
        error = DeadlineError(
            f"{phase}: {', '.join(labels)} did not answer within {timeout_s:g} s{did}; "
            "look at that worker's log in /tmp/ray/session_latest/logs on its node, or give the phase more time"
        )
        error.phase, error.silent, error.answered, error.waited_s = phase, labels, others, timeout_s
        return error


async def _close(items: Any) -> None:
    """End what still generates. Ray loses a cancel that overtakes its call, so it is told until the call has ended."""
    ended = asyncio.ensure_future(_result(items.completed()))
    ended.add_done_callback(_retrieve)  # also if this one is canceled meanwhile: asyncio would print a traceback
    started = time.monotonic()
    while not ended.done() and time.monotonic() - started < _GRACE_S:
        ray.cancel(items)
        await asyncio.wait([ended], timeout=0.2)
    ended.cancel()


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def _result(call: Awaitable[Any]) -> Any:
    return await call


def _root_cause(failed: dict[int, BaseException]) -> tuple[int, BaseException]:
    """Of failures in rank order, the one that explains the others.

    First what a worker says on purpose; then a death; last what may be its echo: a collective that broke.
    """

    def order(error: BaseException) -> int:
        cause = _cause(error)
        if isinstance(cause, GkdError):
            return 2 if isinstance(cause, SecondaryFailure) else 0
        return 1 if _is_death(cause) else 2

    return min(failed.items(), key=lambda item: order(item[1]))


def _cause(error: BaseException) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error


def _is_death(error: BaseException) -> bool:
    """Return True if Ray reports that a worker's process is gone; its memory monitor has an error of its own."""
    return isinstance(error, RayActorError | OutOfMemoryError)


def _reason(error: BaseException) -> str:
    """Return Ray's reason as one sentence.

    Ray puts the reason of a death into the last line, after the ids of the actor, and a page of advice behind it; of
    its memory monitor, the first lines list the node's memory and the processes that used it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if isinstance(error, OutOfMemoryError):
        return " ".join(lines).split(" Refer to the documentation")[0][:_REASON_CHARS].rstrip(".")
    return lines[-1].split(" Some common causes")[0].rstrip(".")


def _advice(error: BaseException) -> str:
    if isinstance(error, OutOfMemoryError):
        return "; use fewer or smaller workers on that node, or give it more memory"
    return ", and the kernel's log shows if it was killed for lack of memory"

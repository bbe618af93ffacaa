"""A group of Ray workers: call all of them at once, collect the results with a deadline, and name failed workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Sized
from contextlib import suppress
from functools import partial
from typing import Any

import ray
from ray import ObjectRefGenerator
from ray.actor import ActorHandle
from ray.exceptions import RayError

from recipe_gkd.errors import DeadlineError, GkdError, WorkerDied
from recipe_gkd.ray_cluster import worker_errors
from recipe_gkd.ray_cluster.node_probe import kill_workers, locate, session_folder
from recipe_gkd.runtime.keyed_timeout import raise_hint
from recipe_gkd.runtime.remote_group import OnResult, R, RemoteGroup, Ts, W_co
from recipe_gkd.runtime.tasks import run_to_end
from recipe_gkd.runtime.wait_log import waiting

log = logging.getLogger(__name__)

_MORE_FAILURES_S = 1.0
"""Time to collect further failures after the first one, which need not be the one that explains the others."""
_CANCEL_TIMEOUT_S = 1.0
_LOCATE_TIMEOUT_S = 1.0
"""Deadline of Ray's control service for the nodes in a message."""
_BUSY_SHUTDOWN_S = 1.0
"""Time that ``shutdown`` gets if a worker has left a call unanswered."""
_KILL_TIMEOUT_S = 5.0
"""Deadline of killing the processes. It usually takes 0.2 s, and seconds on a node whose cores are all busy."""
_RESERVED_FOR_KILL_S = 2.0
"""Part of the time of a stop that is kept for killing the processes."""


class WorkerGroup(RemoteGroup[W_co]):
    """Ray actors of one kind, ordered by rank.

    Lifecycle::

        group: WorkerGroup[RolloutWorker] = WorkerGroup("rollout", handles)
        reports = await group.call(RolloutWorker.setup, timeout_s=300, phase="start")
        group.replace(rank, handle)     # after WorkerDied
        await group.stop(timeout_s=10)  # ends all processes

    All calls raise these errors, as soon as one worker has failed:

    Raises:
        GkdError: The worker's own error, if the project raised it on purpose. ``worker`` is set.
        WorkerDied: A worker's process has ended, or its engine has failed. Call :meth:`replace` to continue.
        WorkerError: A worker failed in another way.
        DeadlineError: ``timeout_s`` has passed. ``silent`` lists the workers that did not answer.

    Attributes:
        name: Name of the pool, for labels.
        handles: Handles of the Ray actors, in rank order.
    """

    def __init__(self, name: str, handles: Sequence[Any]) -> None:
        self.name = name
        self.handles = list(handles)
        # Ray's actor ids. A late failure of a replaced worker must not count for its rank.
        self._died: set[str] = set()
        self._unanswered: set[int] = set()  # Ranks that may still execute a call that was given up.

    def __len__(self) -> int:
        """Return the number of workers."""
        return len(self.handles)

    def label(self, rank: int) -> str:
        """Return the name of a worker in messages, such as ``rollout worker 0 of 2``."""
        return f"{self.name} worker {rank} of {len(self)}"

    async def _call_ranks(
        self,
        method: str,
        args: Mapping[int, Sequence[object]],
        *,
        timeout_s: float,
        phase: str,
        on_result: OnResult | None = None,
    ) -> list[Any]:
        calls = {rank: getattr(self.handles[rank], method).remote(*rank_args) for rank, rank_args in args.items()}
        return await self._gather(calls, timeout_s=timeout_s, phase=phase, on_result=on_result)

    async def stream(
        self,
        rank: int,
        method: Callable[[W_co, *Ts], AsyncIterator[R]],
        *args: *Ts,
        timeout_s: float,
        phase: str,
        n_results: int = 0,
    ) -> AsyncIterator[R]:
        """Iterate over the items of an async generator method of one worker. The deadline is for the whole stream.

        Args:
            method: Method of the class.
            phase: Name of the phase, for messages.
            n_results: Number of responses in all items together, which are sequences of responses, for the log of
                waits. 0: the items are something else.
        """
        items = getattr(self.handles[rank], method.__name__).options(num_returns="streaming").remote(*args)
        actor_id = self._actor_id(rank)  # The worker may be replaced meanwhile.
        started, has_ended, name = time.monotonic(), False, self._short_label(rank)
        n_missing = n_results or 1
        try:
            with waiting(phase, timeout_s, lambda: {name: n_missing}, "responses" if n_results else ""):
                while True:
                    left_s = timeout_s - (time.monotonic() - started)
                    try:
                        async with asyncio.timeout(max(0.0, left_s)):
                            item = await (await anext(items))
                    except StopAsyncIteration:
                        has_ended = True
                        return
                    n_missing -= len(item) if n_results and isinstance(item, Sized) else 0
                    yield item
        except RayError as error:  # must precede TimeoutError: a TimeoutError that a worker raised is both
            raise await self._to_worker_error(rank, actor_id, phase, error) from error
        except TimeoutError as error:
            self._unanswered.add(rank)
            raise await self._deadline_error(phase, [rank], [], timeout_s) from error
        finally:
            if not has_ended:  # Canceling an ended stream would cost a call of Ray per replica and step.
                await _close(items)

    async def dead(self) -> list[int]:
        """Return the ranks whose process has ended, or that a call could not reach. Hung workers are not dead."""
        locations = await locate(self.handles)
        return [rank for rank, at in enumerate(locations) if at.dead or self._actor_id(rank) in self._died]

    def is_unanswered(self, rank: int) -> bool:
        """Return True if a worker has not answered a call before its deadline, and was not replaced since."""
        return rank in self._unanswered

    def count_as_dead(self, rank: int) -> None:
        """Report a worker as dead from now on, until it is replaced."""
        self._died.add(self._actor_id(rank))

    async def as_worker_error(self, rank: int, phase: str, error: BaseException) -> GkdError:
        """Return the error for the user for a failed call of a method of one worker, which was made without this class.

        Args:
            error: Error from Ray.
        """
        return await self._to_worker_error(rank, self._actor_id(rank), phase, error)

    def replace(self, rank: int, handle: ActorHandle) -> None:
        """Replace a dead worker by a new one."""
        ray.kill(self.handles[rank], no_restart=True)
        self.handles[rank] = handle
        self._unanswered.discard(rank)

    async def stop(self, *, timeout_s: float) -> None:
        """Call ``shutdown`` on each worker, then kill its process with everything that it has started.

        Hung and stopped processes are killed too. A failed ``shutdown`` call is ignored. If the caller is canceled, the
        processes are killed at once.

        Args:
            timeout_s: Deadline. Killing always has up to 5 s. ``shutdown`` gets 1 s at most if a worker has left a
                call unanswered.
        """
        try:
            with suppress(GkdError):
                shutdown_s = min(
                    max(0.0, timeout_s - _RESERVED_FOR_KILL_S), _BUSY_SHUTDOWN_S if self._unanswered else timeout_s
                )
                await self._call_ranks(
                    "shutdown", dict.fromkeys(range(len(self)), ()), timeout_s=shutdown_s, phase="shutdown"
                )
        finally:
            await run_to_end(kill_workers(self.handles, timeout_s=_KILL_TIMEOUT_S))

    async def _gather(
        self,
        calls: dict[int, Awaitable[Any]],
        *,
        timeout_s: float,
        phase: str,
        on_result: OnResult | None = None,
    ) -> list[Any]:
        """Await ``calls``, rank -> call. Return the results in the order of ``calls``."""
        if not calls:  # an error preceded the start of the workers
            return []
        tasks = {asyncio.ensure_future(_await(call)): rank for rank, call in calls.items()}
        if on_result is not None:
            for task, rank in tasks.items():
                task.add_done_callback(partial(_report_result, rank, on_result))
        actor_ids = {rank: self._actor_id(rank) for rank in calls}  # The workers may be replaced meanwhile.
        try:
            with waiting(phase, timeout_s, partial(self._unfinished, tasks)):
                _, pending = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            if pending and any(task.done() and task.exception() for task in tasks):
                _, pending = await asyncio.wait(pending, timeout=_MORE_FAILURES_S)
            done = [task for task in tasks if task.done()]
            if failures := {tasks[task]: error for task in done if (error := task.exception())}:
                rank, error = worker_errors.root_cause(failures)
                raise await self._to_worker_error(rank, actor_ids[rank], phase, error) from error
            if pending:
                silent = [rank for task, rank in tasks.items() if task in pending]
                raise await self._deadline_error(phase, silent, [tasks[task] for task in done], timeout_s)
            return [task.result() for task in tasks]
        finally:
            for task, rank in tasks.items():
                (self._unanswered.discard if task.done() else self._unanswered.add)(rank)
                task.cancel()

    async def _to_worker_error(self, rank: int, actor_id: str, phase: str, error: BaseException) -> GkdError:
        """Convert a failure into an error for the user, and record it if it is a death."""
        cause, label = worker_errors.unwrap(error), self.label(rank)
        if isinstance(cause, GkdError):
            known = cause.located(phase=phase, worker=label)
        else:
            location = (await locate([self.handles[rank]]))[0] if isinstance(cause, RayError) else None
            known = worker_errors.to_worker_error(cause, phase, self.name, label, location, session_folder())
        if isinstance(known, WorkerDied):
            self._died.add(actor_id)
        return known

    async def _deadline_error(
        self, phase: str, silent: list[int], answered: list[int], timeout_s: float
    ) -> DeadlineError:
        silent_labels, answered_labels = (tuple(map(self.label, ranks)) for ranks in (silent, answered))
        others = f" ({', '.join(answered_labels)} did)" if answered_labels else ""
        return DeadlineError(
            f"{', '.join(silent_labels)} did not answer within {timeout_s:g} s{others}{await self._nodes_of(silent)}",
            phase=phase,
            silent=silent_labels,
            answered=answered_labels,
            waited_s=timeout_s,
            remedy=f"check that the node can be reached, read that worker's log in {session_folder()}/logs there, or "
            f"{raise_hint(timeout_s, 'give the phase more time')}",
        )

    async def _nodes_of(self, ranks: list[int]) -> str:
        """Return `` on node ADDRESS ID, ...`` for a message, empty if Ray does not report the nodes."""
        try:
            async with asyncio.timeout(_LOCATE_TIMEOUT_S):
                locations = await locate([self.handles[rank] for rank in ranks])
        except (RayError, OSError) as error:  # TimeoutError is an OSError
            log.debug("the nodes of %s workers %s are unknown: %s", self.name, ranks, error)
            return ""
        nodes = dict.fromkeys(f"{at.node_ip} {at.node_id[:8]}" for at in locations if at.node_ip)
        return f", on node {', '.join(nodes)}" if nodes else ""

    def _unfinished(self, tasks: Mapping[asyncio.Task[Any], int]) -> dict[str, int]:
        """Return the names of the workers whose calls have not returned, for the log of waits."""
        return {self._short_label(rank): 1 for task, rank in tasks.items() if not task.done()}

    def _short_label(self, rank: int) -> str:
        return f"{self.name} worker {rank}"

    def _actor_id(self, rank: int) -> str:
        return str(self.handles[rank]._actor_id.hex())


async def _close(items: ObjectRefGenerator) -> None:
    """Cancel a generator that still runs. Ray loses a cancel that arrives before its call, so it is sent repeatedly."""
    ended = asyncio.ensure_future(_await(items.completed()))
    ended.add_done_callback(_retrieve)  # Else asyncio prints a traceback if this coroutine is canceled meanwhile.
    started = time.monotonic()
    while not ended.done() and time.monotonic() - started < _CANCEL_TIMEOUT_S:
        ray.cancel(items)
        await asyncio.wait([ended], timeout=0.2)
    ended.cancel()


def _report_result(rank: int, on_result: OnResult, task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is None:
        on_result(rank)


def _retrieve(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


async def _await(call: Awaitable[R]) -> R:
    return await call

"""Replacement of dead and silent rollout workers, with a limit on the number of restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, TypeVar, cast

from ray.exceptions import RayError

from recipe_gkd.errors import DeadlineError, GkdError, WorkerDied, find_timeout_error
from recipe_gkd.ray_cluster.new_workers import set_up_in_new_processes
from recipe_gkd.ray_cluster.node_probe import kill_workers, locate, run_on_node
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.runtime import process_trees
from recipe_gkd.runtime.run_log import as_event
from teacher.common.process_id import ProcessId

log = logging.getLogger(__name__)
T = TypeVar("T")

KILL_TIMEOUT_S = 5.0
"""Deadline of the end of a silent worker's processes."""
NODE_PROBE_TIMEOUT_S = 2.0
"""Deadline of a node that lists or kills processes. It usually takes a tenth of that."""


class NewWorker(Protocol):
    """Rollout worker that has started."""

    async def setup(self) -> object:
        """Start the engine."""


class RolloutRestarts:
    """Replaces dead rollout workers, at most ``trainer.max_worker_restarts`` times in a run.

    A worker that did not answer before a deadline, because its process or its node hangs, is replaced too. Its state is
    saved first, and its process is killed.

    Lifecycle::

        restarts = RolloutRestarts(rollouts, start_rollout, allowed=3, timeout_s=300)
        await restarts.record_processes(range(n))  # after the set-up of the workers
        await restarts.replace_dead(error)         # whenever a worker died, or is silent and can_replace(error)
        await restarts.kill_orphans()              # at the end of the run

    Args:
        rollouts: Group whose workers are replaced.
        start: Function that starts a new worker of a rank and returns its handle.
        allowed: Maximum number of restarts.
        timeout_s: Deadline of the set-up of new workers.
        save_state: Saves the state of all workers because of an error, for a diagnosis. None: nothing is saved.
    """

    def __init__(
        self,
        rollouts: WorkerGroup[NewWorker],
        start: Callable[[int], Any],
        *,
        allowed: int,
        timeout_s: float,
        save_state: Callable[[DeadlineError], Awaitable[object]] | None = None,
    ) -> None:
        self._rollouts, self._start, self._allowed, self._timeout_s = rollouts, start, allowed, timeout_s
        self._save_state = save_state
        self._used = 0
        self._processes: dict[int, tuple[str, list[ProcessId]]] = {}  # rank -> node id, processes after the set-up
        self._interrupted: set[int] = set()  # ranks whose new worker was not awaited; its processes are not recorded
        self._lock = asyncio.Lock()

    @property
    def n_restarts(self) -> int:
        """Number of workers that were replaced so far."""
        return self._used

    def can_replace(self, error: BaseException) -> bool:
        """Return True if an error is a missed deadline of rollout workers alone, and enough restarts are left."""
        late = find_timeout_error(error)
        ranks = self._silent_ranks(late)
        return late is not None and len(ranks) == len(late.silent) and self._used + len(ranks) <= self._allowed

    async def replace_dead(self, death: GkdError | None = None) -> None:
        """Replace all dead workers, and wait until the new workers are set up. They start without weights.

        Args:
            death: Error that reported the death, if there is one. If it is a missed deadline, or follows from one, the
                workers that did not answer are killed and replaced.

        Raises:
            WorkerDied: No restart is left.
            WorkerError: A new worker failed in its set-up.
            DeadlineError: A new worker was not set up in time.
        """
        async with self._lock:
            if late := find_timeout_error(death):
                await self._kill_silent(late)
            await self._replace_dead(death)

    def _silent_ranks(self, late: DeadlineError | None) -> list[int]:
        return [rank for rank in range(len(self._rollouts)) if late and self._rollouts.label(rank) in late.silent]

    async def _kill_silent(self, late: DeadlineError) -> None:
        """Kill workers that missed a deadline, after their state was saved. They count as dead afterwards."""
        ranks = [rank for rank in self._silent_ranks(late) if self._rollouts.is_unanswered(rank)]  # not replaced since
        if not ranks:
            return
        log.warning("%s; killing %s", late, ", ".join(map(self._rollouts.label, ranks)))
        if self._save_state is not None:
            await self._save_state(late)
        await kill_workers([self._rollouts.handles[rank] for rank in ranks], timeout_s=KILL_TIMEOUT_S)
        for rank in ranks:
            self._rollouts.count_as_dead(rank)

    async def record_processes(self, ranks: Iterable[int]) -> None:
        """Record the processes of live workers. The children of a dead process can no longer be found."""
        ranks = list(ranks)
        locations = await locate([self._rollouts.handles[rank] for rank in ranks])
        trees = await asyncio.gather(
            *(_result_or_none(run_on_node(at.node_id, process_trees.tree, [at.pid])) for at in locations)
        )
        for rank, location, tree in zip(ranks, locations, trees, strict=True):
            self._processes[rank] = location.node_id, tree or []

    async def kill_orphans(self, ranks: Iterable[int] | None = None) -> None:
        """Kill all recorded processes of dead workers, including a worker's own process if its engine has failed.

        Args:
            ranks: Ranks of the dead workers. None: all ranks, at the end of a run.

        Ranks of a tensor-parallel engine can hang, and would keep their GPUs. Never raises, and takes at most
        :data:`NODE_PROBE_TIMEOUT_S`.
        """
        ranks = range(len(self._rollouts)) if ranks is None else ranks
        recorded = [self._processes.pop(rank) for rank in ranks if rank in self._processes]
        kills = (
            _result_or_none(run_on_node(node, process_trees.kill_trees, processes, NODE_PROBE_TIMEOUT_S / 2))
            for node, processes in recorded
        )
        if survivors := [pid for pids in await asyncio.gather(*kills) for pid in pids or ()]:
            log.warning("processes of dead rollout workers that could not be killed: %s", survivors)

    async def _replace_dead(self, death: GkdError | None) -> None:
        dead = await self._rollouts.dead()
        if self._interrupted:
            handles = [self._rollouts.handles[rank] for rank in self._interrupted]
            await kill_workers(handles, timeout_s=KILL_TIMEOUT_S)
            self._interrupted.clear()
        await self.kill_orphans(dead)
        reason = f": {death}" if death is not None else ""
        for rank in dead:
            label = self._rollouts.label(rank)
            if self._used == self._allowed:
                raise self._no_restart_left(label, death) from death
            self._used += 1
            log.warning(
                "%s died; starting another (%d of %d restarts)%s", label, self._used, self._allowed, reason,
                extra=as_event("rollout_restart"),
            )  # fmt: skip
            self._rollouts.replace(rank, self._start(rank))
        try:
            outcomes = await asyncio.gather(*map(self._set_up, dead), return_exceptions=True)
            failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
            await self.record_processes(rank for rank, one in zip(dead, outcomes, strict=True) if one not in failed)
        except asyncio.CancelledError:  # an error of another worker; if the run survives it, the next call begins anew
            self._used -= len(dead)
            for rank in dead:
                self._rollouts.count_as_dead(rank)
            self._interrupted.update(dead)
            raise
        for error in failed:
            if not isinstance(error, WorkerDied):
                raise error
        if failed:
            # Ray needs up to 30 s to notice that a node is lost, and starts workers there until then.
            await self._replace_dead(cast(WorkerDied, failed[0]))

    def _no_restart_left(self, label: str, death: GkdError | None) -> WorkerDied:
        known = WorkerDied("its process died", worker=label) if death is None else death
        limit = f"trainer.max_worker_restarts={self._allowed}"
        reason = f"it was not replaced: {limit} {'are used up' if self._allowed else 'allows no restart'}"
        return WorkerDied(
            known.what, phase=known.phase, worker=label, remedy=known.remedy, details=(*known.details, reason)
        )

    async def _set_up(self, rank: int) -> None:
        """Wait until a new worker is set up. Errors: see :func:`set_up_in_new_processes`."""
        call = self._rollouts.call_one(rank, NewWorker.setup, timeout_s=self._timeout_s, phase="start again")
        await set_up_in_new_processes(self._rollouts, [rank], call)


async def _result_or_none(call: Awaitable[T]) -> T | None:
    """Return the result of a call to a node, or None if the node is dead or does not answer in time."""
    try:
        async with asyncio.timeout(NODE_PROBE_TIMEOUT_S):
            return await call
    except (RayError, OSError) as error:  # TimeoutError is an OSError, as are errors on this process's own node
        log.warning("could not list or kill processes on a node of the rollout pool: %s", str(error) or "no answer")
        return None

"""Mutual exclusion on the actor: updates, checkpoints and weight syncs. A needed sync goes first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from recipe_gkd.data.batches import ReadyBatch
from recipe_gkd.pipeline.stages import Sync
from recipe_gkd.pipeline.state import PipelineState
from recipe_gkd.runtime.clock import now
from recipe_gkd.runtime.tasks import FirstErrorTaskGroup
from teacher.common.sizes import GIB

DRAIN_TIMEOUT_S = 10.0
"""Deadline of the end of canceled stages before the last checkpoint is saved. They usually end within 1 s."""


class UpdateDropped(Exception):
    """The run is about to end, and the update has not begun."""


class ActorLock:
    """Lock on the actor. Updates and checkpoints hold it.

    A weight sync takes it when :attr:`~recipe_gkd.pipeline.state.PipelineState.sync_is_possible` is true.
    After an error the lock stays held, because the error ends the run and nothing else may start. Exceptions are
    canceled work, and work whose errors do not end the run.

    Args:
        state: State of the schedule.
        sync: See :class:`~recipe_gkd.pipeline.stages.PipelineStages`.
        tasks: Tasks of all stages.
    """

    def __init__(self, state: PipelineState, sync: Sync, tasks: FirstErrorTaskGroup) -> None:
        self._state, self._sync, self._tasks = state, sync, tasks
        self._sync_metrics: dict[str, float] = {}

    @asynccontextmanager
    async def hold(
        self, work: str, batch: ReadyBatch | None = None, *, may_fail: bool = False, may_be_dropped: bool = False
    ) -> AsyncIterator[None]:
        """Hold the actor during the body. A sync that generation needs goes first.

        If the stages were dropped, no sync goes first, and the body begins when all stages have ended.

        Adds the time spent waiting for weight syncs to ``batch.metrics["timing/wait_sync"]``.

        Args:
            work: Name of the span on the timeline.
            batch: Batch that the work belongs to. None if the wait is part of another metric.
            may_fail: True if the run continues after an error of the body.
            may_be_dropped: True if the work is not needed any more once the stages were dropped.

        Raises:
            UpdateDropped: The stages were dropped before the body began, and it may be dropped.
        """
        state, requested_at = self._state, now()
        await state.until(lambda: state.is_dropped or (not state.actor_busy and not self._sync_goes_first()))
        if state.is_dropped:
            if may_be_dropped:
                raise UpdateDropped
            await self._tasks.drained(DRAIN_TIMEOUT_S)
        labels = {}
        if batch is not None:
            batch.metrics["timing/wait_sync"] += now() - requested_at
            labels["step"] = batch.step
        async with self._busy(may_fail=may_fail):
            with self._state.timeline.span("actor", work, **labels):
                yield

    @asynccontextmanager
    async def hold_for_update(self, batch: ReadyBatch) -> AsyncIterator[None]:
        """Hold the actor during the body, which is one update. The actor's version increases at its end.

        Adds the metrics of the latest weight sync to ``batch.metrics`` if no other batch has received them.

        Raises:
            UpdateDropped: The stages were dropped before the update began.
        """
        async with self.hold("update", batch, may_be_dropped=True):
            batch.metrics |= self._sync_metrics
            batch.metrics["perf/teacher_rows_gb"] = self._state.rows.held_bytes / GIB
            self._sync_metrics = {}
            started_at = now()
            yield
            batch.drop_rows()
            self._state.rows.release(batch.step)
            self._state.actor_version += 1
            self._state.last_update_s = now() - started_at

    async def send_weights(self) -> None:
        """Send the actor's weights to all replicas. The caller has checked that a sync is possible.

        A caller that is canceled does not interrupt it, because half a sync leaves the replicas without weights. An
        error ends the run.
        """
        self._state.actor_busy = self._state.syncing = True  # before another task runs
        await asyncio.shield(self._tasks.start(self._send_weights()))

    async def _send_weights(self) -> None:
        state = self._state
        async with self._busy():
            with ExitStack() as spans:
                for track in ["actor", *(f"rollout {replica}" for replica in range(state.config.n_replicas))]:
                    spans.enter_context(state.timeline.span(track, "sync", version=state.actor_version))
                self._sync_metrics = await self._sync(state.actor_version)
            state.rollout_version, state.syncing = state.actor_version, False
            state.timeline.count("rollout", "weights version", state.actor_version)

    @asynccontextmanager
    async def _busy(self, *, may_fail: bool = False) -> AsyncIterator[None]:
        self._state.actor_busy, is_over = True, False
        try:
            yield
            is_over = True
        except asyncio.CancelledError:
            is_over = True
            raise
        except Exception:
            is_over = may_fail
            raise
        finally:
            if is_over:
                self._state.actor_busy = False
                self._state.notify()

    def _sync_goes_first(self) -> bool:
        """Return True if a sync is needed now, or will be needed while an update that starts now is running.

        The sync may have to wait for the responses in flight. Then the update is delayed only if it would end after
        them. Otherwise updates could repeatedly start shortly before the sync becomes possible, while replicas idle.
        """
        state = self._state
        if not any(
            version <= state.actor_version for version in [*state.needed_versions, *self._next_needed_versions()]
        ):
            return False
        generation_left_s = state.last_dispatch_at + state.last_generate_s - now()
        return state.config.inflight_update or not state.n_in_flight or generation_left_s < state.last_update_s

    def _next_needed_versions(self) -> list[int]:
        """Return ``[v]`` if the next batch needs weights ``v`` before the update after next, else ``[]``."""
        state = self._state
        if state.config.inflight_update or state.next_step is None or state.next_step > state.actor_version + 2:
            return []
        version = state.next_step - state.config.max_staleness
        return [version] if state.rollout_version is not None and state.rollout_version < version else []

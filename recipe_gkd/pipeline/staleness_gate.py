"""Staleness gate: decides when a batch is dispatched and which weights version it needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from recipe_gkd.data.batches import PromptBatch
from recipe_gkd.pipeline.actor_lock import ActorLock
from recipe_gkd.pipeline.state import PipelineState
from recipe_gkd.runtime.clock import now


class StalenessGate:
    """Admission of batches and of validation to the rollout replicas.

    Batch ``i`` passes when the memory has room for the teachers' rows, the replicas have weights of version
    ``i - max_staleness`` or newer, fewer responses than the capacity are in flight, no sync is running, and validation
    does not reserve the replicas. Conversations that wait for a tool leave their part of the capacity to others.
    """

    def __init__(self, state: PipelineState, lock: ActorLock) -> None:
        self._state, self._lock = state, lock
        self._n_admitted = 0

    async def admit(self, batch: PromptBatch) -> None:
        """Wait until ``batch`` may be dispatched, and count its prompts as in flight."""
        state = self._state
        if state.config.on_request:
            await state.until(lambda: state.n_requested > self._n_admitted)
        self._n_admitted += 1
        if not state.rows.has_room():  # before `next_step` is set, which makes updates wait for a sync of this batch
            state.rows.note_delay(batch.step)
            await state.until(state.rows.has_room)
        state.next_step, oldest_version = batch.step, batch.step - state.config.max_staleness
        if state.config.inflight_update:  # this sync does not have to wait for free capacity
            await self._ensure_fresh_weights(oldest_version)
        await state.until(lambda: state.n_in_flight - state.n_outside < state.config.capacity)
        await self._ensure_fresh_weights(oldest_version)
        # During a sync the wait for weights would be counted as generation time.
        await state.until(lambda: not state.syncing and not state.reserved)
        state.rows.begin(batch.step)
        state.add_in_flight(len(batch.prompts))
        state.last_dispatch_at = now()

    def close(self) -> None:
        """Record that no further batch will be dispatched."""
        self._state.next_step = None
        self._state.notify()

    @asynccontextmanager
    async def reserve(self, n_prompts: int) -> AsyncIterator[None]:
        """Reserve the replicas for ``n_prompts`` validation prompts, generated with the actor's current weights.

        Waits for the responses in flight and syncs the weights if the replicas have older ones. No batch is dispatched
        until the body has ended. If the body fails, its unfinished prompts do not count as in flight any more.
        """
        state = self._state
        state.reserved = True
        try:
            await state.until(lambda: not state.actor_busy and not state.n_in_flight and not state.n_parked)
            if state.rollout_version != state.actor_version:
                await self._lock.send_weights()
            state.add_in_flight(n_prompts)
            try:
                yield
            finally:
                state.add_in_flight(-state.n_in_flight)  # no other prompt is in flight
        finally:
            state.reserved = False
            state.notify()

    async def _ensure_fresh_weights(self, oldest_version: int) -> None:
        """Wait until the replicas have weights of ``oldest_version`` or newer.

        If they already have them, send newer weights when this delays no other task.
        """
        state = self._state

        def is_behind() -> bool:
            return state.rollout_version is None or state.rollout_version < oldest_version

        if is_behind():
            state.needed_versions.append(oldest_version)
            await state.until(
                lambda: not is_behind() or (state.actor_version >= oldest_version and self._may_send_weights())
            )
            if is_behind():
                await self._lock.send_weights()
            state.needed_versions.remove(oldest_version)
            state.notify()
        elif state.rollout_version != state.actor_version and self._may_send_weights():
            await self._lock.send_weights()

    def _may_send_weights(self) -> bool:
        # After a death the supervisor sends the weights, because its new worker needs them.
        return self._state.sync_is_possible and not self._state.deaths

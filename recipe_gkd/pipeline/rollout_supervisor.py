"""Rollout supervision: every prompt yields one response, even if the worker of its replica dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from recipe_gkd.data.parts import as_sampled
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import WorkerDied, WorkerError
from recipe_gkd.pipeline.actor_lock import ActorLock
from recipe_gkd.pipeline.stages import Generate, Replace
from recipe_gkd.pipeline.state import PipelineState
from recipe_gkd.runtime.tasks import FirstErrorTaskGroup

REPORT = "this is a bug; please report it"
ANY_VERSION = 0
"""Version that a new worker needs: a sync of any version, before the next update."""


class RolloutSupervisor:
    """Generation on the rollout replicas, with replacement of dead workers.

    A :class:`WorkerDied` error of ``generate`` parks the unfinished prompts, replaces the worker, sends it weights and
    generates the parked prompts again.
    """

    def __init__(
        self, state: PipelineState, lock: ActorLock, replace: Replace | None, tasks: FirstErrorTaskGroup
    ) -> None:
        self._state, self._lock, self._replace, self._tasks = state, lock, replace, tasks
        self._replacing = asyncio.Lock()

    async def responses(
        self, replica: int, prompts: Sequence[Prompt], step: int, generate: Generate
    ) -> AsyncIterator[tuple[Prompt, Response]]:
        """Yield each prompt once with its response, in the order in which the responses finish.

        Raises:
            WorkerError: ``generate`` ended early, or returned a response to a prompt that was not sent.
            WorkerDied: The worker died and may not be replaced.
        """
        unfinished = {prompt.uid: prompt for prompt in prompts}
        while unfinished:
            # A sync may replace a worker. New requests wait for its end.
            await self._state.until(lambda: replica in self._state.deaths or not self._state.syncing)
            # A replacement for another replica replaces all dead workers. This one may be dead without an error yet.
            if replica in self._state.deaths or self._replacing.locked():
                await self._restart_replica(replica, len(unfinished))
                continue
            try:
                async for responses in generate(replica, list(unfinished.values()), step):
                    self._state.add_in_flight(-len(responses))
                    for response in responses:
                        prompt = _take_prompt(unfinished, response, replica, step)
                        yield as_sampled(prompt, response), response
            except WorkerDied as death:
                if unfinished:  # otherwise the next batch or sync that needs this worker receives the error
                    self._state.deaths[replica] = death
            else:
                if unfinished:
                    raise WorkerError(
                        f"generation ended, but {len(unfinished)} of {len(prompts)} prompts have no response",
                        remedy=REPORT,
                        phase=f"generation, step {step}",
                        worker=f"rollout replica {replica}",
                        uids=tuple(unfinished),
                    )

    async def _restart_replica(self, replica: int, n_unfinished: int) -> None:
        """Replace the worker of a dead replica and send it weights, or wait until another replacement has ended.

        The unfinished prompts are parked meanwhile. If they counted as in flight, no sync could start. A canceled
        caller, such as a validation that fails on another replica, does not interrupt a replacement: training needs the
        worker, too.
        """
        state = self._state
        if self._replace is None:
            raise state.deaths[replica]
        state.n_parked += n_unfinished
        state.add_in_flight(-n_unfinished)
        try:
            await asyncio.shield(self._tasks.start(self._replace_worker(replica, self._replace)))
        finally:
            state.n_parked -= n_unfinished
            state.add_in_flight(n_unfinished)

    async def _replace_worker(self, replica: int, replace: Replace) -> None:
        state = self._state
        async with self._replacing:
            if death := state.deaths.get(replica):
                await replace(death)
                state.needed_versions.append(ANY_VERSION)
                try:
                    await state.until(lambda: state.sync_is_possible)
                    await self._lock.send_weights()
                finally:
                    state.needed_versions.remove(ANY_VERSION)
                del state.deaths[replica]
                state.notify()


def _take_prompt(unfinished: dict[int, Prompt], response: Response, replica: int, step: int) -> Prompt:
    """Remove the prompt of ``response`` from the unfinished ones and return it."""
    if response.uid not in unfinished:
        raise WorkerError(
            f"received a response to prompt {response.uid}, which is not among its unfinished prompts",
            remedy=REPORT,
            phase=f"generation, step {step}",
            worker=f"rollout replica {replica}",
            uids=(response.uid,),
        )
    return unfinished.pop(response.uid)

"""The schedule: generation, teacher scoring and training overlap as far as the staleness bound allows.

One pipeline serves every schedule. The schedules differ in one number. The *version* of the weights is their number of
optimizer steps. The update on batch ``i`` starts from version ``i``. If version ``v`` generated the batch, its
*staleness* is ``i - v``. With bound ``s``, batch ``i`` may be generated once the rollout replicas have version
``i - s``::

    sync (s=0)          generate 0 | train 0 | sync | generate 1 | train 1 | sync | ...

    one_step_off (s=1)  generate 0 | generate 1 | sync | generate 2 | sync | generate 3 ...
                                   | train 0    |      | train 1    |      | train 2    ...

    two_step_off (s=2)  like one_step_off with generation two batches ahead: the teacher also has a step for itself

Responses are scored in small groups as they finish, and a batch is ready when its last sample is scored. A batch is
dispatched as soon as the bound allows and capacity is free, so that replicas do not idle during the last responses of
the batch before. Weights are never sent during an update. Without ``inflight_update``, they are not sent while
responses are in flight either.

Each policy has its own module. :mod:`recipe_gkd.pipeline.state` lists the states, transitions and invariants::

    staleness_gate      when a batch is dispatched, and which weights version it needs
    actor_lock          order of updates, checkpoints and weight syncs on the actor
    rollout_supervisor  one response per prompt; replacement of dead workers
    batch_assembly      responses -> requests to teacher and reward function -> ready batch
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager

from recipe_gkd.data.batches import PromptBatch, ReadyBatch
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.pipeline.actor_lock import ActorLock
from recipe_gkd.pipeline.assignment import assign_prompts
from recipe_gkd.pipeline.batch_assembly import BatchAssembler
from recipe_gkd.pipeline.config import PipelineConfig
from recipe_gkd.pipeline.rollout_supervisor import RolloutSupervisor
from recipe_gkd.pipeline.stages import Generate, PipelineStages
from recipe_gkd.pipeline.staleness_gate import StalenessGate
from recipe_gkd.pipeline.state import PipelineState
from recipe_gkd.runtime.clock import now
from recipe_gkd.runtime.tasks import ExitArguments, FirstErrorTaskGroup


class Pipeline:
    """Iterator over ready batches, in order. It prepares the next batches meanwhile.

    Lifecycle::

        async with Pipeline(batches, config, stages) as pipeline:
            async for batch in pipeline:
                async with pipeline.actor_update(batch):     # no weight sync while the actor trains
                    ...                                      # train on batch.samples
            pipeline.drop()                                  # optional: the run ends before the next batch

    A weight sync precedes the first generation. An error of a stage ends the ``async with`` block with that error and
    cancels all other stages, except after :meth:`drop`. If a rollout worker dies during generation
    (:class:`WorkerDied`), ``stages.replace`` is called and its unfinished prompts are generated again.

    Attributes:
        timeline: Receiver of the spans and counters of all stages.
        add_outside: Function that counts prompts in flight that wait for a tool; see :class:`PipelineState`.
    """

    def __init__(
        self,
        batches: Iterable[PromptBatch],
        pipeline_config: PipelineConfig,
        stages: PipelineStages,
        *,
        first_version: int = 0,
        timeline: Timeline | None = None,
    ) -> None:
        """Create a pipeline that has not started.

        Args:
            batches: Prompts of the batches, in the order of training.
            first_version: Version of the actor's weights at the start.
            timeline: Receiver of spans and counters. By default a new one without a sink.
        """
        self.timeline = timeline or Timeline(now)
        self._batches, self._stages = batches, stages
        self._state = PipelineState(pipeline_config, self.timeline, first_version)
        self.add_outside = self._state.add_outside
        self._tasks = FirstErrorTaskGroup()
        self._lock = ActorLock(self._state, stages.sync, self._tasks)
        self._gate = StalenessGate(self._state, self._lock)
        self._supervisor = RolloutSupervisor(self._state, self._lock, stages.replace, self._tasks)
        self._assembler = BatchAssembler(self._state, stages, self._supervisor, self._tasks)
        self._dispatched: asyncio.Queue[asyncio.Task[ReadyBatch] | None] = asyncio.Queue()

    async def __aenter__(self) -> Pipeline:
        await self._tasks.__aenter__()
        self._tasks.start(self._dispatch_batches())
        return self

    async def __aexit__(self, *error: *ExitArguments) -> None:
        await self._tasks.__aexit__(*error)

    async def __aiter__(self) -> AsyncIterator[ReadyBatch]:
        while True:
            requested_at = now()
            self._state.n_requested += 1
            self._state.notify()
            assembly = await self._dispatched.get()
            if assembly is None:
                return
            batch = await assembly
            _record_waits(batch, (requested_at, now()), self._stages, self._state)
            yield batch

    def drop(self) -> None:
        """Cancel the stages of all batches whose update has not begun.

        From now on their errors are logged, and end nothing. An update or a checkpoint in progress is not affected.
        """
        self._state.is_dropped = True
        self._tasks.drop()
        self._state.notify()

    def actor_update(self, batch: ReadyBatch) -> AbstractAsyncContextManager[None]:
        """Hold the actor during the body, which is one update. Its weights have the next version afterwards.

        Adds the metrics of the latest weight sync to ``batch.metrics``, and the wait for it; see :meth:`actor_lock`.

        Raises:
            UpdateDropped: :meth:`drop` was called before the update began.
        """
        return self._lock.hold_for_update(batch)

    def actor_lock(
        self, work: str, batch: ReadyBatch | None = None, *, may_fail: bool = False
    ) -> AbstractAsyncContextManager[None]:
        """Hold the actor during the body: no update and no weight sync. A sync that generation needs goes first.

        After :meth:`drop` no sync goes first, and the body begins when all stages have ended, at the latest after
        :data:`~recipe_gkd.pipeline.actor_lock.DRAIN_TIMEOUT_S`.

        Adds the time spent waiting for weight syncs to ``batch.metrics["timing/wait_sync"]``.

        Args:
            work: Name of the span on the timeline.
            batch: Batch that the work belongs to. None if the wait is part of another metric.
            may_fail: True if the run continues after an error of the body.
        """
        return self._lock.hold(work, batch, may_fail=may_fail)

    async def generate_for_validation(
        self, prompts: Sequence[Prompt], generate: Generate, *, responses_per_prompt: int = 1
    ) -> list[Response]:
        """Generate responses to validation prompts with the actor's current weights.

        Only the task that updates the actor may call this, between two updates or before the first one. Responses in
        flight finish first. No batch is dispatched until all validation responses are complete. Dead workers are
        replaced.

        Args:
            prompts: Validation prompts.
            generate: Function that replaces ``stages.generate``. It receives the weights version as the step.
            responses_per_prompt: Number of consecutive uids that share a prompt.

        Returns:
            Responses in the order of ``prompts``.

        Raises:
            GkdError: Generation failed on a replica. A failed weight sync or replacement ends the run instead.
        """
        responses: dict[int, Response] = {}
        shares = assign_prompts(prompts, self._state.config.n_replicas, responses_per_prompt)
        with self.timeline.span("trainer", "validate", version=self._state.actor_version):
            async with self._gate.reserve(len(prompts)), FirstErrorTaskGroup() as tasks:
                replicas = [
                    tasks.start(self._validate_on(replica, share, generate, responses))
                    for replica, share in enumerate(shares)
                    if share
                ]
                for replica in replicas:
                    await replica
        return [responses[prompt.uid] for prompt in prompts]

    async def _validate_on(
        self, replica: int, prompts: list[Prompt], generate: Generate, responses: dict[int, Response]
    ) -> None:
        version = self._state.actor_version
        with self.timeline.span(f"rollout {replica}", "validate", version=version, samples=len(prompts)):
            async for prompt, response in self._supervisor.responses(replica, prompts, version, generate):
                responses[prompt.uid] = response

    async def _dispatch_batches(self) -> None:
        for batch in self._batches:
            await self._gate.admit(batch)
            self._dispatched.put_nowait(self._tasks.start(self._assembler.assemble(batch)))
        self._gate.close()
        self._dispatched.put_nowait(None)


def _record_waits(batch: ReadyBatch, waited: tuple[float, float], stages: PipelineStages, state: PipelineState) -> None:
    """Divide the trainer's wait for a batch into waits for weights, responses, teacher and rewards.

    Args:
        batch: Batch that was waited for.
        waited: Times of the request and of the end of the wait.
        stages: Stages of the schedule.
        state: State of the schedule.
    """
    since, ready_at = waited
    teacher = "wait_prev_prev_teacher" if state.config.max_staleness >= 2 else "wait_prev_teacher"
    ends = {"wait_sync": batch.dispatched_at, "wait_prev_gen": batch.generated_at, teacher: batch.scored_at}
    if stages.compute_rewards is not None:
        ends["wait_reward"] = ready_at
    for name, end in ends.items():
        until = min(max(since, end), ready_at)
        batch.metrics[f"timing/{name}"] = until - since
        if until > since:
            state.timeline.record("trainer", name, since, until, step=batch.step)
        since = until

"""The schedule: generate -> ask the teacher -> train, overlapped as far as a bound on staleness allows.

One pipeline serves every schedule; they differ in one number. The weights' *version* is the number of updates behind
them. Batch ``i`` is trained on when the actor is at version ``i``; if version ``v`` generated it, its *staleness* is
``i - v``. With bound ``s``, batch ``i`` may be generated once the rollout workers have version ``i - s``::

    sync (s=0)          generate 0 | train 0 | sync | generate 1 | train 1 | sync | ...

    one_step_off (s=1)  generate 0 | generate 1 | sync | generate 2 | sync | generate 3 ...
                                   | train 0    |      | train 1    |      | train 2    ...

    two_step_off (s=2)  the same with generation two batches ahead, so that the teacher, too, has a step for itself

Samples flow one by one: answers go to the teacher as they finish, in small groups, and a batch is trained on when its
last sample is scored. A batch is handed out as soon as the bound allows and a worker has a free place, so that workers
do not idle on the last answers of the batch before. Weights are sent never during an update and, unless they may be
updated in flight, never while answers are under way. Stages are callables: this module knows no worker.

Between two updates the trainer may have all workers for itself (:meth:`Pipeline.generate_for_validation`, for validation): what is
under way ends first, and the next batch is handed out afterwards.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

from recipe_gkd.data.prompts import PromptBatch
from recipe_gkd.data.samples import Prompt, Response, Sample
from recipe_gkd.errors import WorkerDied, WorkerError
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.pipeline.interface import (
    ComputeRewards,
    Generate,
    PipelineConfig,
    ReadyBatch,
    Replace,
    Score,
    Sync,
    assign_prompts,
)
from recipe_gkd.runtime.clock import now
from recipe_gkd.runtime.tasks import FirstErrorTaskGroup

ANY_VERSION = 0
"""What a new worker wants: a sync, of whatever version, before the next update."""


class Pipeline:
    """Yields every batch once, in order, ready to be trained on; prepares the next ones meanwhile.

    ::

        async with Pipeline(batches, flow, generate=..., score=..., sync=...) as pipeline:
            async for batch in pipeline:
                async with pipeline.updating(batch):     # no weight sync while the actor trains
                    ... train on batch.samples ...

    The first sync happens before anything is generated, so the first weights used are those of the actor. A stage that
    raises ends the ``async with`` with that exception, cancelling all the others; only a lane that dies while it
    generates (:class:`WorkerDied`) is first given to ``replace``, and its unfinished prompts are generated again.
    """

    def __init__(
        self,
        batches: Iterable[PromptBatch],
        pipeline_config: PipelineConfig,
        *,
        generate: Generate,
        score: Score,
        sync: Sync,
        judge: ComputeRewards | None = None,
        replace: Replace | None = None,
        first_version: int = 0,
        timeline: Timeline | None = None,
    ) -> None:
        """``first_version``: the actor's."""
        self._batches, self._config = batches, pipeline_config
        self._generate, self._score, self._judge, self._sync, self._replace = generate, score, judge, sync, replace
        self.timeline = timeline or Timeline(now)
        self._version = first_version
        self._rollout_version: int | None = None  # unknown until the first sync
        self._wanted: list[int] = []  # versions without which somebody cannot go on generating
        self._next_step: int | None = None  # of the batch that will be handed out next
        self._actor_busy = self._syncing = False
        self._reserved = False  # for answers that the trainer waits for: no batch is handed out
        self._in_flight = 0  # answers
        self._parked = 0  # answers that wait for a new worker
        self._dispatched_at = self._generate_s = self._update_s = 0.0  # of the last batch: what to expect of the next
        self._changed = asyncio.Event()
        self._replacing = asyncio.Lock()
        self._deaths: dict[int, WorkerDied] = {}  # lane -> why it may not be given work
        self._batches_in_flight: asyncio.Queue[asyncio.Task[ReadyBatch] | None] = asyncio.Queue()
        self._sync_metrics: dict[str, float] = {}
        self._tasks = FirstErrorTaskGroup()

    async def __aenter__(self) -> Pipeline:
        await self._tasks.__aenter__()
        self._tasks.start(self._produce())
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._tasks.__aexit__(*error)

    # ---- the trainer's side

    async def __aiter__(self) -> AsyncIterator[ReadyBatch]:
        while True:
            asked = now()
            task = await self._batches_in_flight.get()
            if task is None:
                return
            batch = await task
            self._account_for_wait(batch, asked, now())
            yield batch

    def _account_for_wait(self, batch: ReadyBatch, asked: float, ready: float) -> None:
        """What the trainer waited for since it asked: first weights for the workers, then answers, teacher, rewards."""
        teacher = "wait_prev_prev_teacher" if self._config.max_staleness >= 2 else "wait_prev_teacher"
        ends = {"wait_sync": batch.dispatched_at, "wait_prev_gen": batch.generated_at, teacher: batch.scored_at}
        if self._judge is not None:
            ends["wait_reward"] = ready
        since = asked
        for name, end in ends.items():
            until = min(max(since, end), ready)
            batch.metrics[f"timing/{name}"] = until - since
            if until > since:
                self.timeline.record("trainer", name, since, until, step=batch.step)
            since = until

    @asynccontextmanager
    async def actor_update(self, batch: ReadyBatch) -> AsyncIterator[None]:
        """The body is one update: when it ends, the actor's weights have the next version.

        Adds the metrics of the last weight sync, if new, to the batch's; see :meth:`actor`.
        """
        async with self.actor("update", batch):
            batch.metrics |= self._sync_metrics
            self._sync_metrics = {}
            began = now()
            yield
            self._version += 1
            self._update_s = now() - began

    @asynccontextmanager
    async def actor(self, work: str, batch: ReadyBatch) -> AsyncIterator[None]:
        """The actor for oneself: no update, no weight sync meanwhile. A sync that generation waits for goes first.

        ``work`` is what the timeline calls it. Adds to the batch's metrics what was waited for a weight sync.
        """
        asked = now()
        await self._until(lambda: not self._actor_busy and not self._sync_goes_first())
        batch.metrics["timing/wait_sync"] += now() - asked
        async with self._actor_now():
            with self.timeline.span("actor", work, step=batch.step):
                yield

    @asynccontextmanager
    async def _actor_now(self) -> AsyncIterator[None]:
        self._actor_busy = True
        yield
        self._actor_busy = False  # not after a failure, which ends the run: nothing else shall begin
        self._notify()

    async def generate_for_validation(
        self, prompts: Sequence[Prompt], generate: Generate, *, responses_per_prompt: int = 1
    ) -> list[Response]:
        """Answers outside the run, for validation, with the actor's weights as they are now; in the prompts' order.

        Only for who updates the actor, between two updates or before the first. The answers under way end first, the
        workers get these weights if theirs are older, and no batch is handed out until the last of these answers is
        there. A worker that dies is replaced as ever. ``generate`` is called with the weights' version as the step.
        """
        self._reserved = True
        with self.timeline.span("trainer", "validate", version=self._version):
            await self._until(lambda: not self._actor_busy and not self._in_flight and not self._parked)
            if self._rollout_version != self._version:
                await self._send_weights()
            responses: dict[int, Response] = {}
            self._add_in_flight(len(prompts))
            shares = assign_prompts(prompts, self._config.n_replicas, responses_per_prompt)
            replicas = [
                self._tasks.start(self._validate(replica, share, generate, responses))
                for replica, share in enumerate(shares)
                if share
            ]
            for ended in replicas:
                await ended
        self._reserved = False
        self._notify()
        return [responses[prompt.uid] for prompt in prompts]

    async def _validate(self, replica: int, prompts: list[Prompt], generate: Generate, responses: dict[int, Response]) -> None:
        with self.timeline.span(f"rollout {replica}", "validate", version=self._version, samples=len(prompts)):
            async for prompt, response in self._responses(replica, prompts, self._version, generate):
                responses[prompt.uid] = response

    # ---- when a batch is handed out, and when weights are sent

    async def _produce(self) -> None:
        for batch in self._batches:
            self._next_step, oldest_version = batch.step, batch.step - self._config.max_staleness
            if self._config.inflight_update:  # the sync need not wait until there is a free place
                await self._ensure_fresh_weights(oldest_version)
            await self._until(lambda: self._in_flight < self._config.capacity)
            await self._ensure_fresh_weights(oldest_version)
            # Not during a sync, or its wait for weights would pass for generation.
            await self._until(lambda: not self._syncing and not self._reserved)
            self._add_in_flight(len(batch.prompts))
            self._dispatched_at = now()
            self._batches_in_flight.put_nowait(self._tasks.start(self._prepare(batch)))
        self._next_step = None
        self._notify()
        self._batches_in_flight.put_nowait(None)

    async def _ensure_fresh_weights(self, oldest_version: int) -> None:
        """Before generating: wait for the weights that the bound asks for; take newer ones if that holds up nobody."""

        def behind() -> bool:
            return self._rollout_version is None or self._rollout_version < oldest_version

        if behind():
            self._wanted.append(oldest_version)
            await self._until(lambda: not behind() or (self._version >= oldest_version and self._can_sync()))
            if behind():
                await self._send_weights()
            self._wanted.remove(oldest_version)
            self._notify()
        elif self._rollout_version != self._version and self._can_sync():
            await self._send_weights()

    def _can_sync(self) -> bool:
        return self._is_quiet() and not self._deaths  # a new worker is sent its weights by who waits for it

    def _is_quiet(self) -> bool:
        return not self._actor_busy and (self._config.inflight_update or not self._in_flight)

    def _sync_goes_first(self) -> bool:
        """Before another update: a sync that somebody waits for, or will while that update goes on.

        It may have to wait for the answers under way; the update is held back if they are there before it could end.
        Else updates might begin, step after step, shortly before the sync can, and the workers idle through them.
        """
        if not any(version <= self._version for version in [*self._wanted, *self._wanted_next()]):
            return False
        seconds_left = self._dispatched_at + self._generate_s - now()
        return self._config.inflight_update or not self._in_flight or seconds_left < self._update_s

    def _wanted_next(self) -> list[int]:
        """The version that the next batch will wait for, unless the actor has two batches to train on till then."""
        if self._config.inflight_update or self._next_step is None or self._next_step > self._version + 2:
            return []
        version = self._next_step - self._config.max_staleness
        return [version] if self._rollout_version is not None and self._rollout_version < version else []

    async def _send_weights(self) -> None:
        async with self._actor_now():
            self._syncing = True
            with ExitStack() as spans:
                for track in ["actor", *(f"rollout {replica}" for replica in range(self._config.n_replicas))]:
                    spans.enter_context(self.timeline.span(track, "sync", version=self._version))
                self._sync_metrics = await self._sync(self._version)
            self._rollout_version, self._syncing = self._version, False
            self.timeline.count("rollout", "weights version", self._version)

    async def _until(self, true: Callable[[], bool]) -> None:
        """Nothing else runs between the moment when it is true and the return."""
        while not true():
            await self._changed.wait()

    def _add_in_flight(self, more: int) -> None:
        self._in_flight += more
        self.timeline.count("rollout", "answers under way", self._in_flight)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ---- a batch on its way: answers, from whatever lane, group by group to the teacher

    async def _prepare(self, prompts: PromptBatch) -> ReadyBatch:
        batch = ReadyBatch(prompts.step, prompts.epoch, dispatched_at=now())
        shares = assign_prompts(prompts.prompts, self._config.n_replicas, self._config.responses_per_prompt)
        requests: list[asyncio.Task[tuple[float, list[Sample]]]] = []
        judgements: list[asyncio.Task[dict[int, float]]] = []
        group: list[tuple[Prompt, Response]] = []
        group_size = math.ceil(len(prompts.prompts) / self._config.requests_per_batch)
        n_left = len(prompts.prompts)

        def answered(prompt: Prompt, response: Response) -> None:
            nonlocal group, n_left
            group.append((prompt, response))
            n_left -= 1
            if len(group) == group_size or not n_left:
                requests.append(self._tasks.start(self._request(group, batch.step)))
                if self._judge is not None:
                    judgements.append(self._tasks.start(self._compute_rewards(self._judge, group, batch.step)))
                group = []

        replicas = [
            self._tasks.start(self._run_replica(replica, share, batch.step, answered))
            for replica, share in enumerate(shares)
            if share
        ]
        ended = [await replica for replica in replicas]
        batch.generated_at = max(ended)
        self._generate_s = batch.generated_at - batch.dispatched_at
        for request in requests:
            batch.samples += (await request)[1]
        batch.scored_at = now()
        rewards = {uid: reward for judgement in judgements for uid, reward in (await judgement).items()}
        batch.samples = [replace(sample, reward=rewards.get(sample.prompt.uid)) for sample in batch.samples]
        batch.samples.sort(key=lambda sample: sample.prompt.uid)
        seconds = [end - batch.dispatched_at for end in ended]
        batch.metrics = {
            "timing/generate_sequences": max(seconds),
            "timing/generate_sequences_min": min(seconds),
            "timing/generate_sequences_max": max(seconds),
            "timing/generate_sequences_mean": sum(seconds) / len(seconds),
            "timing/get_teacher_knowledge": batch.scored_at - min(request.result()[0] for request in requests),
            "timing/teacher_tail": batch.scored_at - batch.generated_at,
        }
        return batch

    async def _run_replica(
        self, replica: int, prompts: list[Prompt], step: int, answered: Callable[[Prompt, Response], None]
    ) -> float:
        """When its last answer was there."""
        with self.timeline.span(f"rollout {replica}", "generate", step=step, samples=len(prompts)):
            async for prompt, response in self._responses(replica, prompts, step, self._generate):
                answered(prompt, response)
        return now()

    async def _responses(
        self, replica: int, prompts: list[Prompt], step: int, generate: Generate
    ) -> AsyncIterator[tuple[Prompt, Response]]:
        """Each prompt's answer once, even if the lane's worker has to be replaced on the way."""
        waiting = {prompt.uid: prompt for prompt in prompts}
        while waiting:
            await self._until(lambda: replica in self._deaths or not self._syncing)  # which may replace a worker
            if replica in self._deaths or self._replacing.locked():  # for another lane: this one may be dead unnoticed
                await self._restart_replica(replica, len(waiting))
                continue
            try:
                async for responses in generate(replica, list(waiting.values()), step):
                    self._add_in_flight(-len(responses))
                    for response in responses:
                        if response.uid not in waiting:
                            raise WorkerError(f"step {step}: an answer to prompt {response.uid}, which was not asked")
                        yield waiting.pop(response.uid), response
            except WorkerDied as death:
                if waiting:  # else whoever needs the worker next, a batch or a sync, meets its death
                    self._deaths[replica] = death
            else:
                if waiting:
                    raise WorkerError(f"step {step}: {len(waiting)} of {len(prompts)} prompts got no answer")

    async def _restart_replica(self, replica: int, n_waiting: int) -> None:
        """A new worker with weights for a lane whose worker died; for another, wait until there is no replacement.

        Its prompts are not under way meanwhile, or no sync could begin.
        """
        if self._replace is None:
            raise self._deaths[replica]
        self._parked += n_waiting
        self._add_in_flight(-n_waiting)
        async with self._replacing:
            if death := self._deaths.get(replica):
                await self._replace(death)
                self._wanted.append(ANY_VERSION)
                await self._until(self._is_quiet)
                await self._send_weights()
                self._wanted.remove(ANY_VERSION)
                del self._deaths[replica]
                self._notify()
        self._parked -= n_waiting
        self._add_in_flight(n_waiting)

    async def _request(self, group: Sequence[tuple[Prompt, Response]], step: int) -> tuple[float, list[Sample]]:
        """When it was made, and the samples."""
        began = now()
        with self.timeline.span("teacher", "score", step=step, samples=len(group)):
            return began, await self._score(group, step)

    async def _compute_rewards(self, judge: ComputeRewards, group: Sequence[tuple[Prompt, Response]], step: int) -> dict[int, float]:
        with self.timeline.span("reward", "judge", step=step, samples=len(group)):
            return await judge(group)

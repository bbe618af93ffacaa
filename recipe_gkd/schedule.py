"""The schedule: generate -> ask the teacher -> train, overlapped as far as a bound on staleness allows.

One pipeline serves every schedule; they differ in one number. The weights' *version* is the number of updates behind
them. Batch ``i`` is trained on when the actor is at version ``i``; if version ``v`` generated it, its *staleness* is
``i - v``. With bound ``s``, batch ``i`` may be generated once the rollout workers have version ``i - s``::

    sync (s=0)          generate 0 | train 0 | sync | generate 1 | train 1 | sync | ...

    one_step_off (s=1)  generate 0 | generate 1 | sync | generate 2 | sync | generate 3 ...
                                   | train 0    |      | train 1    |      | train 2    ...

    two_step_off (s=2)  the same with generation two batches ahead, so that the teacher, too, has a step for itself

Answers go to the teacher as they finish, in groups, whatever the trainer is doing. Weights are sent between two
generations, never during one, and never during an update. Stages are callables: this module knows no worker.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from recipe_gkd.data import PromptBatch
from recipe_gkd.errors import WorkerError
from recipe_gkd.samples import Answer, Prompt, Sample

T = TypeVar("T")

MAX_STALENESS = {"sync": 0, "one_step_off": 1, "two_step_off": 2}
"""``trainer.scheduler`` -> how many updates the weights that generate may be behind those that are trained."""

Generate = Callable[[PromptBatch], AsyncIterator[list[Answer]]]
"""Answers of a batch, in any order, as they finish."""
Score = Callable[[list[tuple[Prompt, Answer]]], Coroutine[Any, Any, list[Sample]]]
"""The teacher's opinion of some answers."""
Sync = Callable[[int], Awaitable[dict[str, float]]]
"""Send the actor's weights, which have this version, to every rollout worker; returns metrics."""


@dataclass
class ReadyBatch:
    """A batch that can be trained on, and what it took to get there (seconds)."""

    step: int
    epoch: float
    generated_at: float
    """When its last answer was there, on `time.monotonic`'s clock."""
    samples: list[Sample] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def staleness(self) -> list[int]:
        """Of each sample: updates between the weights that generated it and those that it will update."""
        return [self.step - sample.answer.weights_version for sample in self.samples]


class Pipeline:
    """Yields every batch once, in order, ready to be trained on; prepares the next ones meanwhile.

    ::

        async with Pipeline(batches, generate=..., score=..., sync=..., max_staleness=1) as pipeline:
            async for batch in pipeline:
                async with pipeline.updating(batch):     # no weight sync while the actor trains
                    ... train on batch.samples ...

    The first sync happens before anything is generated, so the first weights used are those of the actor. A stage that
    raises ends the ``async with`` with that exception, cancelling all the others.
    """

    def __init__(
        self,
        batches: Iterable[PromptBatch],
        *,
        generate: Generate,
        score: Score,
        sync: Sync,
        max_staleness: int,
        score_group: Callable[[int], int] = lambda batch_size: batch_size,
        first_version: int = 0,
    ) -> None:
        """``score_group``: batch size -> answers of one request to the teacher. ``first_version``: the actor's."""
        self._batches, self._max_staleness = batches, max_staleness
        self._generate, self._score, self._sync, self._score_group = generate, score, sync, score_group
        self._version = first_version
        self._rollout_version: int | None = None  # unknown until the first sync
        self._wanted: int | None = None  # the version without which generation cannot go on
        self._actor_busy = False
        self._changed = asyncio.Condition()
        self._scored: asyncio.Queue[asyncio.Task[ReadyBatch] | None] = asyncio.Queue()
        self._sync_metrics: dict[str, float] = {}
        self._tasks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Pipeline:
        await self._tasks.__aenter__()
        self._start(self._produce())
        return self

    async def __aexit__(self, *error: Any) -> None:
        for task in self._running:  # none, unless the body left before the last batch
            task.cancel()
        try:
            await self._tasks.__aexit__(*error)
        except BaseExceptionGroup as group:
            raise self._cause(error[1], group) from None

    @staticmethod
    def _cause(body: BaseException | None, group: BaseExceptionGroup[BaseException]) -> BaseException:
        """What the body raised came first, unless it was only cancelled because a stage had failed."""
        task = asyncio.current_task()
        cancelled_from_outside = task is not None and task.cancelling() > 0
        if body is not None and (cancelled_from_outside or not isinstance(body, asyncio.CancelledError)):
            return body
        return _first(group)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def __aiter__(self) -> AsyncIterator[ReadyBatch]:
        while True:
            asked = time.monotonic()
            task = await self._scored.get()
            if task is None:
                return
            batch = await task
            ready = time.monotonic()
            generated = min(max(asked, batch.generated_at), ready)
            batch.metrics["timing/wait_prev_gen"] = generated - asked
            batch.metrics["timing/wait_prev_teacher"] = ready - generated
            yield batch

    @asynccontextmanager
    async def updating(self, batch: ReadyBatch) -> AsyncIterator[None]:
        """The body is one update: when it ends, the actor's weights have the next version.

        Adds to the batch's metrics what was waited for a weight sync, and the metrics of the last one, if new.
        """
        asked = time.monotonic()
        async with self.actor():
            batch.metrics["timing/wait_sync"] = time.monotonic() - asked
            batch.metrics |= self._sync_metrics
            self._sync_metrics = {}
            yield
            self._version += 1

    @asynccontextmanager
    async def actor(self) -> AsyncIterator[None]:
        """The actor for oneself: no update, no weight sync meanwhile. A sync that generation waits for goes first."""
        async with self._actor_when(lambda: self._wanted is None or self._version < self._wanted):
            yield

    @asynccontextmanager
    async def _actor_when(self, ready: Callable[[], bool]) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._actor_busy and ready())
            self._actor_busy = True
        try:
            yield
        finally:
            async with self._changed:
                self._actor_busy = False
                self._changed.notify_all()

    async def _produce(self) -> None:
        for batch in self._batches:
            await self._freshen(oldest_version=batch.step - self._max_staleness)
            await self._generate_one(batch)
        self._scored.put_nowait(None)

    async def _freshen(self, oldest_version: int) -> None:
        """Before generating: wait for the weights that the bound asks for; take newer ones if the actor is idle."""
        if self._rollout_version is None or self._rollout_version < oldest_version:
            self._wanted = max(oldest_version, 0)
        elif self._rollout_version == self._version or self._actor_busy:
            return
        async with self._actor_when(lambda: self._wanted is None or self._version >= self._wanted):
            version = self._version
            self._sync_metrics = await self._sync(version)
            self._rollout_version, self._wanted = version, None

    async def _generate_one(self, prompts: PromptBatch) -> None:
        """Generate a batch; each group of answers goes to the teacher as soon as it is full."""
        started = time.monotonic()
        waiting = {prompt.uid: prompt for prompt in prompts.prompts}
        group_size = self._score_group(len(waiting))
        group: list[tuple[Prompt, Answer]] = []
        requests: list[asyncio.Task[list[Sample]]] = []
        first_request: float | None = None
        async for answers in self._generate(prompts):
            for answer in answers:
                if answer.uid not in waiting:
                    raise WorkerError(f"step {prompts.step}: an answer to prompt {answer.uid}, which was not asked")
                group.append((waiting.pop(answer.uid), answer))
                if len(group) == group_size or not waiting:
                    first_request = first_request or time.monotonic()
                    requests.append(self._start(self._score(group)))
                    group = []
        if waiting:
            raise WorkerError(f"step {prompts.step}: {len(waiting)} of {len(prompts.prompts)} prompts got no answer")
        ended = time.monotonic()
        batch = ReadyBatch(prompts.step, prompts.epoch, ended, metrics={"timing/generate_sequences": ended - started})
        self._scored.put_nowait(self._start(self._collect(batch, requests, first_request or ended)))

    async def _collect(
        self, batch: ReadyBatch, requests: list[asyncio.Task[list[Sample]]], first_request: float
    ) -> ReadyBatch:
        for request in requests:
            batch.samples += await request
        batch.samples.sort(key=lambda sample: sample.prompt.uid)
        batch.metrics["timing/get_teacher_knowledge"] = time.monotonic() - first_request
        return batch


def group_size(batch_size: int, n_requests: int) -> int:
    """Answers of one request, so that a batch makes ``n_requests`` of them; any batch size is fine."""
    return max(1, math.ceil(batch_size / n_requests))


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that came first; the rest of the group are its consequences."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

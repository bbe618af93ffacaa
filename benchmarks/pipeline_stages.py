"""The real schedule with stages that only take time.

A rollout replica has slots. Each response occupies a slot for its own duration, in the order of the requests. With
several turns, it leaves its slot between two of them, while a tool runs. A teacher
worker serves one request at a time, for a duration proportional to its number of responses. Update and sync have fixed
durations.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from recipe_gkd.data.batches import PromptBatch
from recipe_gkd.data.samples import Prompt, Response, Sample, TeacherTopK
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.pipeline.assignment import assign_prompts
from recipe_gkd.pipeline.config import PipelineConfig
from recipe_gkd.pipeline.pipeline import Pipeline
from recipe_gkd.pipeline.stages import PipelineStages
from recipe_gkd.runtime.clock import now

NO_IDS, NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)
TIMER_RESOLUTION_S = 1e-9


@dataclass(frozen=True, kw_only=True)
class BatchTimes:
    """Durations of a batch in each stage, in seconds.

    Attributes:
        responses: Duration of each response in its slot. All batches have the same number of responses.
        tools: Durations of the tool calls of each response, which are between its turns. Empty: one turn.
        teacher: Duration of the whole batch, divided among all teacher workers.
        update: Duration of the update.
        sync: Duration of the weight sync whose version is the step of this batch.
    """

    responses: Sequence[float]
    teacher: float
    update: float
    sync: float
    tools: Sequence[Sequence[float]] = ()


@dataclass(frozen=True, kw_only=True)
class Pools:
    """Sizes of the pools.

    Attributes:
        n_slots: Number of slots of each replica.
    """

    n_replicas: int = 2
    n_slots: int = 16
    n_teachers: int = 2


@dataclass
class RunRecord:
    """Record of a run, with one entry per step.

    Attributes:
        ended_at: Time at the end of the update.
        staleness: Maximum staleness of the samples.
        metrics: Metrics as in metrics.jsonl, without metrics that stages without work do not have.
    """

    ended_at: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)


class Stages:
    """Stages that only take time.

    Attributes:
        timeline: Tracks of the pools. A span covers the work only, without the wait for a free slot or worker.
        on_outside: Function that gets 1 when a tool of a response starts, and -1 when it ends.
    """

    def __init__(self, times: Callable[[int], BatchTimes], pools: Pools, *, whole_batches: bool = False) -> None:
        """Create the stages of one run.

        Args:
            times: Function from a step, starting at 0, to its durations.
            pools: Sizes of the pools.
            whole_batches: If True, the teacher starts a batch after its last response and returns all its samples at
                the same time.
        """
        self._times, self._whole_batches = times, whole_batches
        self.n_replicas, self.n_teachers = pools.n_replicas, 1 if whole_batches else pools.n_teachers
        self.batch_size = len(times(0).responses)
        self._slots = [asyncio.Semaphore(pools.n_slots) for _ in range(pools.n_replicas)]
        self._teachers = asyncio.Semaphore(self.n_teachers)
        self._n_responded: defaultdict[int, int] = defaultdict(int)
        self._scored: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self._paused_s, self._paused_since = 0.0, float("inf")
        self._version = 0
        self.timeline = Timeline(now)
        self.on_outside: Callable[[int], None] = lambda _: None

    @property
    def callables(self) -> PipelineStages:
        return PipelineStages(generate=self.generate, score=self.score, sync=self.sync)

    def batch(self, step: int) -> PromptBatch:
        uids = range(step * self.batch_size, (step + 1) * self.batch_size)
        return PromptBatch(step, 0.0, [Prompt(uid=uid, ids=NO_IDS, row=uid) for uid in uids])

    async def generate(self, replica: int, prompts: Sequence[Prompt], step: int) -> AsyncIterator[list[Response]]:
        times, version = self._times(step), self._version
        done: asyncio.Queue[int] = asyncio.Queue()

        async def response(uid: int) -> None:
            index = uid % self.batch_size
            tools = times.tools[index] if times.tools else ()
            for tool_s in (None, *tools):
                if tool_s is not None:
                    self.on_outside(1)
                    await asyncio.sleep(tool_s)
                    self.on_outside(-1)
                async with self._slots[replica]:
                    with self.timeline.span(f"rollout {replica}", "generate"):
                        await self._generate_for(times.responses[index] / (1 + len(tools)))
            done.put_nowait(uid)

        responses = [asyncio.ensure_future(response(prompt.uid)) for prompt in prompts]
        try:
            for _ in responses:
                yield [_response(await done.get(), version)]
        finally:
            for task in responses:
                task.cancel()

    async def _generate_for(self, seconds: float) -> None:
        """Wait for ``seconds`` without the durations of syncs, which pause generation."""
        due = now() + seconds - self._paused()
        while (left := due + self._paused() - now()) > TIMER_RESOLUTION_S:
            await asyncio.sleep(left)

    def _paused(self) -> float:
        """Return the total duration of all syncs until now, in seconds."""
        return self._paused_s + max(0.0, now() - self._paused_since)

    async def score(self, group: Sequence[tuple[Prompt, Response]], step: int) -> list[Sample]:
        if not self._whole_batches:
            await self._teach(step, len(group))
        else:
            self._n_responded[step] += len(group)
            if self._n_responded[step] == self.batch_size:
                await self._teach(step, self.batch_size)
                self._scored[step].set()
            await self._scored[step].wait()
        return [Sample(prompt=prompt, response=response, teacher=TeacherTopK.absent(0)) for prompt, response in group]

    async def _teach(self, step: int, n_responses: int) -> None:
        async with self._teachers:
            with self.timeline.span("teacher", "score"):
                await asyncio.sleep(self._times(step).teacher * self.n_teachers * n_responses / self.batch_size)

    async def update(self, step: int) -> None:
        with self.timeline.span("actor", "update"):
            await asyncio.sleep(self._times(step).update)

    async def sync(self, version: int) -> dict[str, float]:
        self._paused_since = now()
        with self.timeline.span("actor", "sync"), self.timeline.span("sync", "sync"):
            await asyncio.sleep(self._times(version).sync)
        self._paused_s, self._paused_since = self._paused(), float("inf")
        self._version = version
        return {"timing/sync_rollout_weights": self._times(version).sync}

    async def alone(self, n_requests: int) -> tuple[float, float, float, float]:
        """Return the durations of generate, teacher, update and sync for one batch without overlap, in seconds."""
        prompts, ends = self.batch(0).prompts, [now()]
        shares = [share for share in enumerate(assign_prompts(prompts, self.n_replicas, 1)) if share[1]]

        async def generate(replica: int, share: Sequence[Prompt]) -> None:
            async for _ in self.generate(replica, share, 0):
                pass

        await asyncio.gather(*(generate(replica, share) for replica, share in shares))
        ends.append(now())
        responses = [(prompt, _response(prompt.uid, 0)) for prompt in prompts]
        await asyncio.gather(*(self.score(responses[i::n_requests], 0) for i in range(n_requests)))
        ends.append(now())
        await self.update(0)
        ends.append(now())
        await self.sync(0)
        ends.append(now())
        g, t, u, w = (end - since for since, end in itertools.pairwise(ends))
        return g, t, u, w


async def drive(stages: Stages, pipeline_config: PipelineConfig, n_steps: int) -> RunRecord:
    """Train on ``n_steps`` batches with the real schedule."""
    record, started_at = RunRecord(), now()
    pipeline = Pipeline(
        (stages.batch(step) for step in range(n_steps)),
        pipeline_config,
        stages.callables,
    )
    stages.on_outside = pipeline.add_outside
    async with pipeline:
        async for batch in pipeline:
            async with pipeline.actor_update(batch):
                update_started_at = now()
                await stages.update(batch.step)
            ended = now()
            batch.metrics |= {"timing/step": ended - started_at, "timing/update_actor": ended - update_started_at}
            batch.metrics |= idle(pipeline.timeline, stages, started_at, ended)
            batch.metrics.setdefault("timing/sync_rollout_weights", 0.0)
            record.ended_at.append(ended)
            record.staleness.append(max(batch.staleness))
            record.metrics.append(batch.metrics)
            pipeline.timeline.forget(ended)
            started_at = ended
    return record


def idle(timeline: Timeline, stages: Stages, since: float, until: float) -> dict[str, float]:
    """Return the fractions of the time between ``since`` and ``until`` in which the pools were idle."""
    rollouts = [f"rollout {replica}" for replica in range(stages.n_replicas)]
    return {
        "perf/idle_actor": timeline.idle(["actor"], since, until),
        "perf/idle_rollout": timeline.idle(rollouts, since, until),
        "perf/idle_teacher": timeline.idle(["teacher"], since, until, stages.n_teachers),
    }


def _response(uid: int, version: int) -> Response:
    return Response(
        uid=uid,
        ids=NO_IDS,
        logprobs=NO_LOGPROBS,
        finish_reason="stop",
        weights_version=version,
        versions_T=NO_IDS,
    )

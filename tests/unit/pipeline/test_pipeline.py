"""Properties of the schedule over random durations, sizes, bounds and failures, in virtual time."""

from __future__ import annotations

import asyncio
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import run

from recipe_gkd.config.staleness import MAX_STALENESS
from recipe_gkd.data.batches import PromptBatch, ReadyBatch
from recipe_gkd.data.samples import Prompt, Response, Reward, Sample, StoredTopK
from recipe_gkd.errors import WorkerDied
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.pipeline.actor_lock import DRAIN_TIMEOUT_S, UpdateDropped
from recipe_gkd.pipeline.assignment import assign_prompts
from recipe_gkd.pipeline.config import PipelineConfig
from recipe_gkd.pipeline.pipeline import Pipeline
from recipe_gkd.pipeline.stages import PipelineStages
from recipe_gkd.runtime.clock import now
from recipe_gkd.runtime.stop_request import StopRequest
from tests._support.errors import raises

EMPTY = np.zeros(0, np.int32)
VALIDATION_STEP = -1
STORED = StoredTopK(
    block=None, index=0, n_bytes=1, home=0, n_scored=0, sampled_logps_T=np.zeros(0, np.float32)
)  # one byte per response


@dataclass
class Plan:
    """A simulated run.

    Attributes:
        pipeline_config: Settings of the schedule.
        batch_size: Number of prompts per batch.
        first: Step of the first batch.
        seconds: Mean duration of a call of each stage.
        seed: Seed of the random durations and orders.
        fails: Stage, and number of its calls that succeed before it raises an error. None if no stage fails.
        deaths: Calls of generate in which the worker dies, and the maximum number of prompts that are unfinished then.
        validated: Numbers of trained batches after which the trainer validates. 0 is before the first batch.
        n_validated: Number of validation prompts.
        has_rewards: True if the run computes rewards.
    """

    pipeline_config: PipelineConfig
    n_batches: int = 5
    batch_size: int = 5
    first: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    fails: tuple[str, int] | None = None
    deaths: dict[int, int] = field(default_factory=dict)
    validated: frozenset[int] = frozenset()
    n_validated: int = 5
    has_rewards: bool = False


@dataclass
class Trained:
    step: int
    uids: list[int]
    staleness: list[int]
    metrics: dict[str, float]


class FakeStages:
    """Stages that only take time. They record their calls and assert that forbidden overlaps do not occur."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rng = plan, random.Random(plan.seed)
        self.version, self.rollout_version = plan.first, -1
        self.generating = 0
        self.updating = self.syncing = False
        self.has_weights = [False] * plan.pipeline_config.n_replicas
        self.n_generations = 0
        self.calls = {"generate": 0, "score": 0, "sync": 0, "update": 0, "save": 0, "replace": 0, "rewards": 0}
        self.responded: list[int] = []
        self.requests: list[int] = []
        self.syncs: list[int] = []
        self.dead: set[int] = set()
        self.n_replaced = 0
        self.overlaps = {"generate, update": 0, "generate, score": 0, "two batches": 0}
        self.generated_during_sync = 0
        self.steps_in_flight: list[int] = []
        self.validated: list[int] = []
        self.on_cancel: Callable[[str], Awaitable[None]] | None = None
        self.row_bytes = self.most_row_bytes = 0

    async def spend(self, stage: str) -> None:
        self.calls[stage] += 1
        try:
            await asyncio.sleep(self.plan.seconds.get(stage, 0.0) * self.rng.uniform(0.3, 1.7))
        except asyncio.CancelledError:
            if self.on_cancel is not None:
                await self.on_cancel(stage)
            raise
        if self.plan.fails and self.plan.fails[0] == stage and self.calls[stage] > self.plan.fails[1]:
            raise LookupError(stage)

    async def generate(
        self, replica: int, prompts: Sequence[Prompt], step: int, validation: bool = False
    ) -> AsyncIterator[list[Response]]:
        call, self.n_generations = self.n_generations, self.n_generations + 1
        if replica in self.dead:
            raise WorkerDied("its process died", worker=f"rollout worker {replica}")
        assert self.has_weights[replica] and (not self.syncing or self.plan.pipeline_config.inflight_update)
        assert not validation or (step == self.version == self.rollout_version and not self.updating)
        step = VALIDATION_STEP if validation else step
        self.generating += 1
        self.steps_in_flight.append(step)
        assert VALIDATION_STEP not in self.steps_in_flight or len(set(self.steps_in_flight)) == 1
        self.overlaps["two batches"] += len(set(self.steps_in_flight)) > 1
        version = self.rollout_version
        order = self.rng.sample(list(prompts), len(prompts))
        try:
            while True:
                if call in self.plan.deaths and len(order) <= self.plan.deaths[call]:
                    self.dead.add(replica)
                    raise WorkerDied("its process died", worker=f"rollout worker {replica}")
                if not order:
                    return
                some = [order.pop() for _ in range(min(len(order), self.rng.randint(1, 3)))]
                await self.spend("generate")
                assert not self.syncing or self.plan.pipeline_config.inflight_update
                assert not validation or version == self.version == self.rollout_version
                self.responded += [prompt.uid for prompt in some if not validation]
                self.overlaps["generate, update"] += self.updating
                self.generated_during_sync += self.syncing
                yield [
                    Response(
                        uid=prompt.uid,
                        ids=EMPTY,
                        logprobs=EMPTY,
                        finish_reason="stop",
                        weights_version=version,
                        versions_T=EMPTY,
                    )
                    for prompt in some
                ]
        finally:
            self.generating -= 1
            self.steps_in_flight.remove(step)

    async def score(self, group: Sequence[tuple[Prompt, Response]], step: int) -> list[Sample]:
        self.requests.append(len(group))
        self.overlaps["generate, score"] += self.generating > 0
        await self.spend("score")
        self.row_bytes += len(group)
        self.most_row_bytes = max(self.most_row_bytes, self.row_bytes)
        return [Sample(prompt=prompt, response=response, teacher=STORED) for prompt, response in group]

    async def compute_rewards(self, group: Sequence[tuple[Prompt, Response]]) -> dict[int, Reward]:
        await self.spend("rewards")
        return {prompt.uid: Reward(reward_of(prompt.uid)) for prompt, _ in group if prompt.uid % 3}

    async def sync(self, version: int) -> dict[str, float]:
        if self.dead:  # like WeightSynchronizer, which replaces dead workers
            await self.replace(WorkerDied("a rollout worker"))
        assert not self.updating and not self.syncing and version == self.version
        assert not self.generating or self.plan.pipeline_config.inflight_update
        self.syncing = True
        try:
            await self.spend("sync")
        finally:
            self.syncing = False
        self.rollout_version = version
        self.has_weights = [True] * len(self.has_weights)
        self.syncs.append(version)
        return {"timing/sync_rollout_weights": 0.0}

    async def replace(self, death: WorkerDied) -> None:
        for replica in list(self.dead):
            self.dead.remove(replica)
            self.has_weights[replica] = False
            self.n_replaced += 1
        await self.spend("replace")

    async def validate(self, pipeline: Pipeline) -> float:
        """Validate if this is due, and return the duration in seconds."""
        started_at = now()
        if self.version - self.plan.first in self.plan.validated:
            uids = list(range(self.plan.n_validated))
            responses = await pipeline.generate_for_validation(
                [Prompt(uid=uid, ids=EMPTY, row=uid) for uid in uids],
                partial(self.generate, validation=True),
                responses_per_prompt=self.plan.pipeline_config.responses_per_prompt,
            )
            assert [response.uid for response in responses] == uids
            assert {response.weights_version for response in responses} <= {self.version}
            self.validated.append(self.version)
        return now() - started_at

    def batches(self) -> list[PromptBatch]:
        size = self.plan.batch_size
        return [
            PromptBatch(
                step, 0.0, [Prompt(uid=uid, ids=EMPTY, row=uid) for uid in range(step * size, (step + 1) * size)]
            )
            for step in range(self.plan.first, self.plan.first + self.plan.n_batches)
        ]

    def pipeline(self, timeline: Timeline | None = None) -> Pipeline:
        return Pipeline(
            self.batches(),
            self.plan.pipeline_config,
            PipelineStages(
                generate=self.generate,
                score=self.score,
                sync=self.sync,
                compute_rewards=self.compute_rewards if self.plan.has_rewards else None,
                replace=self.replace,
            ),
            first_version=self.plan.first,
            timeline=timeline,
        )

    async def run(self) -> list[Trained]:
        trained = []
        async with self.pipeline() as pipeline:
            await self.validate(pipeline)
            started_at = now()
            async for batch in pipeline:
                async with pipeline.actor_update(batch):
                    assert not self.syncing and not self.updating
                    self.updating = True
                    update_started_at = now()
                    await self.spend("update")
                    batch.metrics["timing/update_actor"] = now() - update_started_at
                    self.version, self.updating = self.version + 1, False
                    self.row_bytes -= len(batch.samples)
                batch.metrics["timing/validate"] = await self.validate(pipeline)
                if "save" in self.plan.seconds:
                    async with pipeline.actor_lock("save", batch):
                        assert not self.syncing
                        save_started_at = now()
                        await self.spend("save")
                        batch.metrics["timing/save_checkpoint"] = now() - save_started_at
                batch.metrics["timing/step"], started_at = now() - started_at, now()
                uids = [sample.prompt.uid for sample in batch.samples]
                rewards = [reward_of(uid) if self.plan.has_rewards and uid % 3 else None for uid in uids]
                assert [sample.reward for sample in batch.samples] == rewards
                trained.append(Trained(batch.step, uids, batch.staleness, batch.metrics))
        return trained


class Block:
    """Rows in an object store."""


def reward_of(uid: int) -> float:
    return uid / 2


@dataclass
class Spans:
    """A sink that records the spans of a timeline."""

    spans: list[tuple[str, str, float, float]] = field(default_factory=list)

    def begin(self, track: str, name: str, since: float, args: dict[str, Any]) -> tuple[str, str, float]:
        return track, name, since

    def end(self, span: tuple[str, str, float], until: float) -> None:
        self.spans.append((*span, until))

    def record(self, *_: Any) -> None: ...

    def count(self, *_: Any) -> None: ...

    def of(self, track: str, name: str) -> list[tuple[float, float]]:
        return [span[2:] for span in self.spans if span[:2] == (track, name)]


SHAPES = {
    "balanced": dict(generate=2.0, score=4.0, update=6.0, sync=1.0),
    "generation_bound": dict(generate=5.0, score=1.0, update=1.0, sync=1.0),
    "teacher_bound": dict(generate=1.0, score=20.0, update=1.0, sync=1.0),
    "update_bound": dict(generate=1.0, score=1.0, update=20.0, sync=1.0),
}

pipeline_configs = st.builds(
    PipelineConfig,
    max_staleness=st.integers(0, 4),
    n_replicas=st.integers(1, 3),
    capacity=st.integers(1, 12),
    responses_per_prompt=st.integers(1, 3),
    requests_per_batch=st.integers(1, 6),
    inflight_update=st.booleans(),
    on_request=st.booleans(),
    max_row_bytes=st.none() | st.integers(1, 30),
).map(lambda config: replace(config, on_request=config.on_request and not config.max_staleness))
plans = st.builds(
    Plan,
    pipeline_config=pipeline_configs,
    n_batches=st.integers(0, 7),
    batch_size=st.integers(1, 7),
    first=st.integers(0, 20),
    seconds=st.fixed_dictionaries(
        {stage: st.sampled_from([0.0, 0.1, 1.0, 5.0]) for stage in [*SHAPES["balanced"], "rewards"]}
    ),
    seed=st.integers(0, 1 << 30),
    validated=st.sampled_from([frozenset(), frozenset(range(9))]) | st.frozensets(st.integers(0, 7)),
    n_validated=st.integers(1, 7),
    has_rewards=st.booleans(),
)


def check_exactness(plan: Plan, stages: FakeStages, trained: list[Trained]) -> None:
    steps = range(plan.first, plan.first + plan.n_batches)
    uids = range(steps.start * plan.batch_size, steps.stop * plan.batch_size)
    assert [batch.step for batch in trained] == list(steps)
    assert [uid for batch in trained for uid in batch.uids] == list(uids)
    staleness = [value for batch in trained for value in batch.staleness]
    assert all(0 <= value <= plan.pipeline_config.max_staleness for value in staleness)
    assert stages.syncs[:1] == [plan.first][: plan.n_batches or 0 in plan.validated]
    assert stages.syncs == sorted(stages.syncs)
    assert stages.validated == [plan.first + n for n in sorted(plan.validated) if n <= plan.n_batches]


class TestExactness:
    @settings(max_examples=200, deadline=None)
    @given(plan=plans)
    def test_every_prompt_is_trained_on_once_in_order_within_bound(self, plan: Plan) -> None:
        stages = FakeStages(plan)
        trained = run(stages.run())
        check_exactness(plan, stages, trained)
        assert sorted(stages.responded) == [uid for batch in trained for uid in batch.uids]
        assert len(stages.syncs) == len(set(stages.syncs))
        limit = plan.pipeline_config.max_row_bytes
        assert limit is None or stages.most_row_bytes <= max(limit, plan.batch_size)


class TestRows:
    @pytest.mark.parametrize("bound", [0, 1, 2])
    def test_rows_of_a_batch_are_freed_with_its_update(self, bound: int) -> None:
        """Otherwise the rows of one more batch than the limit allows would be in memory."""
        stages = FakeStages(Plan(PipelineConfig(max_staleness=bound), seconds=SHAPES["balanced"]))
        blocks: dict[int, weakref.ref[Block]] = {}

        async def score(group: Sequence[tuple[Prompt, Response]], step: int) -> list[Sample]:
            block = Block()
            blocks.update({prompt.uid: weakref.ref(block) for prompt, _ in group})
            return [replace(sample, teacher=replace(STORED, block=block)) for sample in await scored(group, step)]

        scored, stages.score = stages.score, score  # type: ignore[method-assign]

        async def work() -> None:
            async with stages.pipeline() as pipeline:
                async for batch in pipeline:
                    async with pipeline.actor_update(batch):
                        stages.version += 1
                        assert all(blocks[sample.prompt.uid]() is not None for sample in batch.samples)
                    assert not any(blocks[sample.prompt.uid]() for sample in batch.samples)

        run(work())
        assert len(blocks) == stages.plan.n_batches * stages.plan.batch_size


class TestWorkerDeath:
    @settings(max_examples=200, deadline=None)
    @given(
        plan=plans,
        deaths=st.dictionaries(st.integers(0, 12), st.integers(0, 7), max_size=4),
        replace_s=st.sampled_from([0.0, 9.0]),
    )
    def test_death_keeps_every_prompt_exactly_once(self, plan: Plan, deaths: dict[int, int], replace_s: float) -> None:
        stages = FakeStages(replace(plan, deaths=deaths, seconds=plan.seconds | {"replace": replace_s}))
        check_exactness(plan, stages, run(stages.run()))

    @pytest.mark.parametrize("bound", [0, 1, 2])
    def test_death_after_last_response_is_handled_by_next_use(self, bound: int) -> None:
        plan = Plan(PipelineConfig(max_staleness=bound), seconds=SHAPES["balanced"], deaths={1: 0})
        stages = FakeStages(plan)
        check_exactness(plan, stages, run(stages.run()))
        assert stages.n_replaced == 1

    def test_death_without_replacement_ends_run(self) -> None:
        stages = FakeStages(Plan(PipelineConfig(max_staleness=1), deaths={2: 3}))

        async def refuse(death: WorkerDied) -> None:
            raise death

        stages.replace = refuse  # type: ignore[method-assign]
        with raises(WorkerDied, worker="rollout worker 0"):
            run(stages.run())


class TestFailures:
    @settings(max_examples=100, deadline=None)
    @given(
        plan=plans, stage=st.sampled_from(["generate", "score", "rewards", "sync", "update"]), call=st.integers(0, 8)
    )
    def test_failing_stage_ends_run_with_its_error(self, plan: Plan, stage: str, call: int) -> None:
        stages = FakeStages(replace(plan, fails=(stage, call)))
        try:
            check_exactness(plan, stages, run(stages.run()))
        except LookupError as error:
            assert error.args == (stage,)
            assert stages.generating == 0
        else:
            assert stages.calls[stage] <= call

    def test_early_exit_cancels_generation(self) -> None:
        stages = FakeStages(Plan(PipelineConfig(max_staleness=2), n_batches=50, seconds=SHAPES["balanced"]))

        async def first_batch_only() -> int:
            async with stages.pipeline() as pipeline:
                async for batch in pipeline:
                    return batch.step
            raise AssertionError

        assert run(first_batch_only()) == 0
        assert stages.generating == 0

    def test_failing_update_wins_over_later_errors(self) -> None:
        stages = FakeStages(Plan(PipelineConfig(max_staleness=2), n_batches=9, seconds=SHAPES["update_bound"]))

        async def score_and_break(group: Sequence[tuple[Prompt, Response]], step: int) -> list[Sample]:
            try:
                return await FakeStages.score(stages, group, step)
            finally:
                if stages.updating:
                    raise ZeroDivisionError("a secondary failure")

        async def run_and_fail() -> None:
            async with stages.pipeline() as pipeline:
                async for batch in pipeline:
                    async with pipeline.actor_update(batch):
                        stages.updating = True
                        raise LookupError("the update")

        stages.score = score_and_break  # type: ignore[method-assign]
        with pytest.raises(LookupError):
            run(run_and_fail())

    def test_canceled_run_stays_canceled(self) -> None:
        stages = FakeStages(Plan(PipelineConfig(max_staleness=1), n_batches=9, seconds=SHAPES["update_bound"]))

        async def fail_when_canceled(group: Sequence[tuple[Prompt, Response]], step: int) -> list[Sample]:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                raise ZeroDivisionError("a secondary failure") from None
            return []

        async def cancel_soon() -> None:
            stages.score = fail_when_canceled  # type: ignore[method-assign]
            training = asyncio.ensure_future(stages.run())
            await asyncio.sleep(3600)
            training.cancel()
            await training

        with pytest.raises(asyncio.CancelledError):
            run(cancel_soon())


class TestTimings:
    @settings(max_examples=50, deadline=None)
    @given(plan=plans, save_s=st.sampled_from([0.0, 0.3, 3.0]))
    def test_step_is_sum_of_waits_and_work(self, plan: Plan, save_s: float) -> None:
        for batch in run(FakeStages(replace(plan, seconds=plan.seconds | {"save": save_s})).run()):
            teacher = "wait_prev_prev_teacher" if plan.pipeline_config.max_staleness >= 2 else "wait_prev_teacher"
            parts = ["wait_sync", "wait_prev_gen", teacher, "update_actor", "validate", "save_checkpoint"]
            parts += ["wait_reward"] if plan.has_rewards else []
            assert batch.metrics["timing/step"] == pytest.approx(sum(batch.metrics[f"timing/{part}"] for part in parts))

    def test_slow_rewards_overlap_with_teacher(self) -> None:
        seconds = dict(generate=1.0, score=6.0, rewards=16.0, update=1.0)
        plan = Plan(PipelineConfig(max_staleness=0), seconds=seconds, has_rewards=True)
        for batch in run(FakeStages(plan).run()):
            score_s, rest_s = (batch.metrics[f"timing/{name}"] for name in ("wait_prev_teacher", "wait_reward"))
            assert score_s > 0 and rest_s >= 0 and max(score_s, 0.3 * 16) <= score_s + rest_s <= max(score_s, 1.7 * 16)


class TestStaleness:
    @settings(max_examples=50, deadline=None)
    @given(
        bound=st.integers(0, 1),
        replicas=st.integers(1, 3),
        seeds=st.tuples(*[st.integers(0, 1 << 30)] * 2),
        validated=st.frozensets(st.integers(0, 7)),
    )
    def test_staleness_up_to_one_step_off_does_not_depend_on_timing(
        self, bound: int, replicas: int, seeds: tuple[int, int], validated: frozenset[int]
    ) -> None:
        pipeline_config = PipelineConfig(max_staleness=bound, n_replicas=replicas, capacity=4)
        plan = Plan(pipeline_config, n_batches=7, seconds=SHAPES["balanced"])
        runs = [
            FakeStages(replace(plan, seed=seed, validated=steps)).run()
            for seed in seeds
            for steps in (frozenset(), validated)
        ]
        first, *others = ([batch.staleness for batch in run(trained)] for trained in runs)
        assert others == [first] * 3

    def test_sync_schedule_syncs_before_every_batch(self) -> None:
        stages = FakeStages(Plan(PipelineConfig(max_staleness=0, capacity=99), seconds=SHAPES["balanced"]))
        run(stages.run())
        assert stages.syncs == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("on_request", [True, False])
    def test_batch_on_request_waits_for_checkpoint_and_validation_of_the_step_before(self, on_request: bool) -> None:
        """Otherwise it is generated meanwhile, so that a checkpoint of a hybrid engine would wait for its end."""
        config = PipelineConfig(max_staleness=0, on_request=on_request)
        plan = Plan(config, seconds=SHAPES["balanced"] | {"save": 3.0}, validated=frozenset(range(1, 6)))
        stages, sink = FakeStages(plan), Spans()

        async def train() -> None:
            async with stages.pipeline(Timeline(now, sink)) as pipeline:
                async for batch in pipeline:
                    async with pipeline.actor_update(batch):
                        stages.version += 1
                    await asyncio.sleep(1.0)  # metrics of the update
                    await stages.validate(pipeline)
                    await asyncio.sleep(1.0)  # rewards
                    async with pipeline.actor_lock("save", batch):
                        await asyncio.sleep(3.0)

        run(train())
        saves, generated = sink.of("actor", "save"), sink.of("rollout 0", "generate")
        overlap = any(since < end and until > start for since, until in generated for start, end in saves)
        assert len(saves) == len(generated) == plan.n_batches and overlap is not on_request

    @pytest.mark.parametrize("bound", [1, 2, 3])
    def test_needed_sync_precedes_next_update(self, bound: int) -> None:
        stages = FakeStages(Plan(PipelineConfig(max_staleness=bound), n_batches=9, seconds=SHAPES["update_bound"]))
        trained = run(stages.run())
        assert [batch.staleness[0] for batch in trained] == [*range(bound), *[bound] * (9 - bound)]
        assert stages.syncs == list(range(9 - bound))

    def test_sync_waits_for_responses_in_flight_unless_inflight_update(self) -> None:
        for inflight in (False, True):
            pipeline_config = PipelineConfig(max_staleness=1, capacity=8, inflight_update=inflight)
            stages = FakeStages(
                Plan(pipeline_config, n_batches=9, batch_size=8, seconds=dict(generate=1, score=1, update=1, sync=10))
            )
            run(stages.run())  # the stages assert that no sync overlaps with generation
            assert bool(stages.generated_during_sync) == inflight

    def test_each_schedule_has_its_bound(self) -> None:
        assert MAX_STALENESS == {"sync": 0, "one_step_off": 1, "two_step_off": 2}


class TestTeacherRequests:
    @pytest.mark.parametrize("n_replicas", [1, 3])
    @pytest.mark.parametrize(
        ("size", "n_requests", "sizes"), [(5, 2, [3, 2]), (5, 1, [5]), (5, 9, [1] * 5), (6, 4, [2, 2, 2])]
    )
    def test_requests_per_batch_splits_into_equal_groups(
        self, size: int, n_requests: int, sizes: list[int], n_replicas: int
    ) -> None:
        pipeline_config = PipelineConfig(max_staleness=0, requests_per_batch=n_requests, n_replicas=n_replicas)
        stages = FakeStages(Plan(pipeline_config, n_batches=1, batch_size=size))
        run(stages.run())
        assert stages.requests == sizes

    @pytest.mark.parametrize("n_replicas", [1, 4])
    def test_requests_start_before_last_response(self, n_replicas: int) -> None:
        pipeline_config = PipelineConfig(max_staleness=0, requests_per_batch=4, n_replicas=n_replicas)
        stages = FakeStages(Plan(pipeline_config, n_batches=3, batch_size=12, seconds=dict(generate=2, score=2)))
        run(stages.run())
        assert stages.overlaps["generate, score"] >= 3


class TestOverlap:
    @pytest.mark.parametrize(("bound", "overlaps"), [(0, False), (1, True), (2, True)])
    def test_generation_overlaps_with_updates_unless_sync(self, bound: int, overlaps: bool) -> None:
        stages = FakeStages(
            Plan(PipelineConfig(max_staleness=bound), n_batches=6, seconds=dict(generate=2, score=2, update=10))
        )
        run(stages.run())
        assert bool(stages.overlaps["generate, update"]) == overlaps

    @pytest.mark.parametrize(("inflight", "bound"), [(False, 2), (True, 1)])
    def test_next_batch_starts_during_last_responses(self, inflight: bool, bound: int) -> None:
        pipeline_config = PipelineConfig(max_staleness=bound, capacity=8, inflight_update=inflight)
        stages = FakeStages(Plan(pipeline_config, n_batches=9, batch_size=8, seconds=SHAPES["generation_bound"]))
        run(stages.run())
        assert stages.overlaps["two batches"] >= 3


class TestValidation:
    @pytest.mark.parametrize("bound", [0, 1, 2])
    def test_validation_before_training_precedes_first_batch(self, bound: int) -> None:
        stages = FakeStages(
            Plan(PipelineConfig(max_staleness=bound), n_batches=2, seconds=SHAPES["balanced"], validated=frozenset({0}))
        )

        async def first_dispatch_at() -> tuple[float, float]:
            async with stages.pipeline() as pipeline:
                validated_s = await stages.validate(pipeline)
                async for batch in pipeline:
                    return validated_s, batch.dispatched_at
            raise AssertionError

        validated_s, dispatched_at = run(first_dispatch_at())
        assert dispatched_at >= validated_s > 0

    @pytest.mark.parametrize("bound", [1, 2])
    def test_validation_overlaps_with_teacher_only(self, bound: int) -> None:
        plan = Plan(PipelineConfig(max_staleness=bound), seconds=SHAPES["teacher_bound"], validated=frozenset({2}))
        stages, sink = FakeStages(plan), Spans()

        async def validated_once() -> None:
            pipeline = stages.pipeline(Timeline(now, sink))
            async with pipeline:
                async for batch in pipeline:
                    async with pipeline.actor_update(batch):
                        stages.version += 1
                    if batch.step == 1:
                        await stages.validate(pipeline)

        run(validated_once())
        [whole], [replica] = (sink.of(track, "validate") for track in ("trainer", "rollout 0"))
        assert whole[0] <= replica[0] < replica[1] <= whole[1]
        generated = sink.of("rollout 0", "generate")
        assert all(until <= replica[0] or since >= replica[1] for since, until in generated)
        assert any(since >= replica[1] for since, _ in generated)
        assert any(since < replica[1] and until > replica[0] for since, until in sink.of("teacher", "score"))


class TestStop:
    """Runs that stop at random moments. Canceled stages fail, or take long to end."""

    @settings(max_examples=200, deadline=None)
    @given(
        plan=plans,
        stop_at_s=st.floats(0.0, 60.0),
        cleanup_s=st.sampled_from([0.0, 0.0, 3.0, 1e6]),
        fails=st.booleans(),
    )
    def test_save_waits_only_for_the_update_in_progress(
        self, plan: Plan, stop_at_s: float, cleanup_s: float, fails: bool
    ) -> None:
        self.check_stop(plan, stop_at_s, cleanup_s, fails=fails)

    @pytest.mark.parametrize("bound", [0, 1, 2])
    def test_stop_during_generation_does_not_wait_for_the_next_sync(self, bound: int) -> None:
        plan = Plan(PipelineConfig(max_staleness=bound), n_batches=8, seconds=SHAPES["generation_bound"])
        for stop_at_s in np.arange(0.0, 60.0, 0.5):
            self.check_stop(plan, float(stop_at_s))

    def check_stop(self, plan: Plan, stop_at_s: float, cleanup_s: float = 0.0, *, fails: bool = False) -> None:
        """Train until the stop, and check when the save begins and that nothing runs meanwhile."""
        stages, stop = FakeStages(plan), StopRequest()
        update_s, saved_at, is_hung = 0.0, [0.0], cleanup_s > DRAIN_TIMEOUT_S

        async def end_slowly(stage: str) -> None:
            assert stop.reason is None or stage not in ("update", "save")
            await asyncio.sleep(cleanup_s)
            if fails:
                raise LookupError(stage)

        async def update(pipeline: Pipeline, batch: ReadyBatch) -> None:
            nonlocal update_s
            async with pipeline.actor_update(batch):
                assert stop.reason is None
                began_at = now()
                await stages.spend("update")
                stages.version += 1
                update_s = now() - began_at

        async def train() -> int:
            n_trained = 0
            async with stages.pipeline() as pipeline:
                stages.on_cancel = end_slowly
                with stop.accepted(pipeline.drop), suppress(UpdateDropped):
                    asyncio.get_running_loop().call_later(stop_at_s, stop.request, "the test")
                    await stop.unless_requested(stages.validate(pipeline), timeout_s=DRAIN_TIMEOUT_S)
                    async for batch in stop.until_requested(pipeline):
                        await update(pipeline, batch)
                        n_trained += 1
                        await stop.unless_requested(stages.validate(pipeline), timeout_s=DRAIN_TIMEOUT_S)
                if stop.reason is not None:
                    async with pipeline.actor_lock("save_checkpoint"):
                        saved_at.append(now())
                        assert is_hung or not (stages.syncing or stages.generating)
                        await stages.spend("save")
                stages.on_cancel = None
            return n_trained

        n_trained = run(train())
        assert stages.calls["save"] == (stop.reason is not None)
        assert n_trained == plan.n_batches or stop.reason == "the test"
        n_drains = 2  # of a validation, and of the stages
        if stop.reason is not None:
            assert saved_at[-1] <= stop_at_s + update_s + n_drains * min(cleanup_s, DRAIN_TIMEOUT_S) + 1e-6


class TestAssignPrompts:
    def test_groups_stay_together_in_equal_shares(self) -> None:
        prompts = [Prompt(uid=uid, ids=EMPTY, row=uid // 2) for uid in range(12)]
        shares = assign_prompts(prompts, n_replicas=3, responses_per_prompt=2)
        assert [[prompt.row for prompt in share] for share in shares] == [[0, 0, 3, 3], [1, 1, 4, 4], [2, 2, 5, 5]]

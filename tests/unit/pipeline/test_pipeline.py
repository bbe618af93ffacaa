"""The pipeline's promises, over random durations, sizes, bounds and failures, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_time import run

from recipe_gkd.config.staleness import MAX_STALENESS
from recipe_gkd.data.batches import PromptBatch
from recipe_gkd.data.samples import Prompt, Response, Sample, TeacherTopK
from recipe_gkd.errors import WorkerDied
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.pipeline.assignment import assign_prompts
from recipe_gkd.pipeline.config import PipelineConfig
from recipe_gkd.pipeline.pipeline import Pipeline
from recipe_gkd.pipeline.stages import PipelineStages
from recipe_gkd.runtime.clock import now

EMPTY = np.zeros(0, np.int32)
VALIDATION = -1
"""Stands for the step of what is under way."""


@dataclass
class Plan:
    """What happens in a run: sizes, seconds, and which calls of a stage fail."""

    pipeline_config: PipelineConfig
    n_batches: int = 5
    batch_size: int = 5
    first: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    fails: tuple[str, int] | None = None
    """(stage, call from 0) that raises."""
    deaths: dict[int, int] = field(default_factory=dict)
    """Calls of generate, from 0, in which the worker dies, and how many prompts are then unanswered, at most."""
    validated: frozenset[int] = frozenset()
    """The trainer validates when so many batches have been trained on; 0: before the first."""
    n_validated: int = 5
    """Prompts of a validation."""
    judged: bool = False


@dataclass
class Trained:
    step: int
    uids: list[int]
    staleness: list[int]
    metrics: dict[str, float]


class Stages:
    """Stages that only take time, keep a record of what they were asked, and check what must not overlap."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rng = plan, random.Random(plan.seed)
        self.version, self.rollout_version = plan.first, -1
        self.generating = 0
        self.actor_update = self.syncing = False
        self.has_weights = [False] * plan.pipeline_config.n_replicas
        self.n_generations = 0
        self.calls = {"generate": 0, "score": 0, "sync": 0, "update": 0, "save": 0, "replace": 0, "judge": 0}
        self.answered: list[int] = []
        self.requests: list[int] = []
        self.syncs: list[int] = []
        self.dead: set[int] = set()
        self.n_replaced = 0
        self.overlaps = {"generate, update": 0, "generate, score": 0, "two batches": 0}
        self.generated_during_sync = 0
        self.steps_under_way: list[int] = []
        self.validated: list[int] = []

    async def spend(self, stage: str) -> None:
        self.calls[stage] += 1
        await asyncio.sleep(self.plan.seconds.get(stage, 0.0) * self.rng.uniform(0.3, 1.7))
        if self.plan.fails and self.plan.fails[0] == stage and self.calls[stage] > self.plan.fails[1]:
            raise LookupError(stage)

    async def generate(
        self, replica: int, prompts: Sequence[Prompt], step: int, validation: bool = False
    ) -> AsyncIterator[list[Response]]:
        call, self.n_generations = self.n_generations, self.n_generations + 1
        if replica in self.dead:
            raise WorkerDied(f"rollout worker {replica}")
        assert self.has_weights[replica] and (not self.syncing or self.plan.pipeline_config.inflight_update)
        assert not validation or (step == self.version == self.rollout_version and not self.actor_update)
        step = VALIDATION if validation else step
        self.generating += 1
        self.steps_under_way.append(step)
        assert VALIDATION not in self.steps_under_way or len(set(self.steps_under_way)) == 1
        self.overlaps["two batches"] += len(set(self.steps_under_way)) > 1
        version = self.rollout_version
        order = self.rng.sample(list(prompts), len(prompts))
        try:
            while True:
                if call in self.plan.deaths and len(order) <= self.plan.deaths[call]:
                    self.dead.add(replica)
                    raise WorkerDied(f"rollout worker {replica}")
                if not order:
                    return
                some = [order.pop() for _ in range(min(len(order), self.rng.randint(1, 3)))]
                await self.spend("generate")
                assert not self.syncing or self.plan.pipeline_config.inflight_update
                assert not validation or version == self.version == self.rollout_version
                self.answered += [prompt.uid for prompt in some if not validation]
                self.overlaps["generate, update"] += self.actor_update
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
            self.steps_under_way.remove(step)

    async def score(self, group: Sequence[tuple[Prompt, Response]], step: int) -> list[Sample]:
        self.requests.append(len(group))
        self.overlaps["generate, score"] += self.generating > 0
        await self.spend("score")
        return [Sample(prompt=prompt, response=response, teacher=TeacherTopK.absent(0)) for prompt, response in group]

    async def judge(self, group: Sequence[tuple[Prompt, Response]]) -> dict[int, float]:
        await self.spend("judge")
        return {prompt.uid: reward_of(prompt.uid) for prompt, _ in group if prompt.uid % 3}

    async def sync(self, version: int) -> dict[str, float]:
        if self.dead:  # as the real one, which has dead workers replaced
            await self.replace(WorkerDied("a rollout worker"))
        assert not self.actor_update and not self.syncing and version == self.version
        assert not self.generating or self.plan.pipeline_config.inflight_update
        self.syncing = True
        await self.spend("sync")
        self.rollout_version, self.syncing = version, False
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
        """How long it took."""
        began = now()
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
        return now() - began

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
                compute_rewards=self.judge if self.plan.judged else None,
                replace=self.replace,
            ),
            first_version=self.plan.first,
            timeline=timeline,
        )

    async def run(self) -> list[Trained]:
        trained = []
        async with self.pipeline() as pipeline:
            await self.validate(pipeline)
            began = now()
            async for batch in pipeline:
                async with pipeline.actor_update(batch):
                    assert not self.syncing and not self.actor_update
                    self.actor_update = True
                    update_began = now()
                    await self.spend("update")
                    batch.metrics["timing/update_actor"] = now() - update_began
                    self.version, self.actor_update = self.version + 1, False
                batch.metrics["timing/validate"] = await self.validate(pipeline)
                if "save" in self.plan.seconds:
                    async with pipeline.actor_lock("save", batch):
                        assert not self.syncing
                        save_began = now()
                        await self.spend("save")
                        batch.metrics["timing/save_checkpoint"] = now() - save_began
                batch.metrics["timing/step"], began = now() - began, now()
                uids = [sample.prompt.uid for sample in batch.samples]
                rewards = [reward_of(uid) if self.plan.judged and uid % 3 else None for uid in uids]
                assert [sample.reward for sample in batch.samples] == rewards
                trained.append(Trained(batch.step, uids, batch.staleness, batch.metrics))
        return trained


def reward_of(uid: int) -> float:
    return uid / 2


@dataclass
class Spans:
    """A timeline's sink."""

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

flows = st.builds(
    PipelineConfig,
    max_staleness=st.integers(0, 4),
    n_replicas=st.integers(1, 3),
    capacity=st.integers(1, 12),
    responses_per_prompt=st.integers(1, 3),
    requests_per_batch=st.integers(1, 6),
    inflight_update=st.booleans(),
)
plans = st.builds(
    Plan,
    pipeline_config=flows,
    n_batches=st.integers(0, 7),
    batch_size=st.integers(1, 7),
    first=st.integers(0, 20),
    seconds=st.fixed_dictionaries(
        {stage: st.sampled_from([0.0, 0.1, 1.0, 5.0]) for stage in [*SHAPES["balanced"], "judge"]}
    ),
    seed=st.integers(0, 1 << 30),
    validated=st.sampled_from([frozenset(), frozenset(range(9))]) | st.frozensets(st.integers(0, 7)),
    n_validated=st.integers(1, 7),
    judged=st.booleans(),
)


def check_exactness(plan: Plan, stages: Stages, trained: list[Trained]) -> None:
    steps = range(plan.first, plan.first + plan.n_batches)
    uids = range(steps.start * plan.batch_size, steps.stop * plan.batch_size)
    assert [batch.step for batch in trained] == list(steps)
    assert [uid for batch in trained for uid in batch.uids] == list(uids)
    staleness = [value for batch in trained for value in batch.staleness]
    assert all(0 <= value <= plan.pipeline_config.max_staleness for value in staleness)
    assert stages.syncs[:1] == [plan.first][: plan.n_batches or 0 in plan.validated]
    assert stages.syncs == sorted(stages.syncs)
    assert stages.validated == [plan.first + n for n in sorted(plan.validated) if n <= plan.n_batches]


@settings(max_examples=200, deadline=None)
@given(plan=plans)
def test_every_prompt_is_generated_once_and_trained_on_once_in_order_within_the_bound(plan: Plan) -> None:
    stages = Stages(plan)
    trained = run(stages.run())
    check_exactness(plan, stages, trained)
    assert sorted(stages.answered) == [uid for batch in trained for uid in batch.uids]
    assert len(stages.syncs) == len(set(stages.syncs))


@settings(max_examples=200, deadline=None)
@given(
    plan=plans, deaths=st.dictionaries(st.integers(0, 12), st.integers(0, 7), max_size=4), s=st.sampled_from([0.0, 9.0])
)
def test_a_worker_that_dies_costs_no_prompt_and_repeats_none(plan: Plan, deaths: dict[int, int], s: float) -> None:
    stages = Stages(replace(plan, deaths=deaths, seconds=plan.seconds | {"replace": s}))
    check_exactness(plan, stages, run(stages.run()))


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_worker_that_dies_after_its_last_answer_is_met_by_who_needs_it_next(bound: int) -> None:
    plan = Plan(PipelineConfig(max_staleness=bound), seconds=SHAPES["balanced"], deaths={1: 0})
    stages = Stages(plan)
    check_exactness(plan, stages, run(stages.run()))
    assert stages.n_replaced == 1


@settings(max_examples=100, deadline=None)
@given(plan=plans, stage=st.sampled_from(["generate", "score", "judge", "sync", "update"]), call=st.integers(0, 8))
def test_a_failing_stage_ends_the_run_with_its_own_error_and_nothing_left(plan: Plan, stage: str, call: int) -> None:
    stages = Stages(replace(plan, fails=(stage, call)))
    try:
        check_exactness(plan, stages, run(stages.run()))
    except LookupError as error:
        assert error.args == (stage,)
        assert stages.generating == 0
    else:
        assert stages.calls[stage] <= call


@settings(max_examples=50, deadline=None)
@given(plan=plans, save_s=st.sampled_from([0.0, 0.3, 3.0]))
def test_a_step_is_the_sum_of_what_the_trainer_waited_for_and_did(plan: Plan, save_s: float) -> None:
    for batch in run(Stages(replace(plan, seconds=plan.seconds | {"save": save_s})).run()):
        teacher = "wait_prev_prev_teacher" if plan.pipeline_config.max_staleness >= 2 else "wait_prev_teacher"
        parts = ["wait_sync", "wait_prev_gen", teacher, "update_actor", "validate", "save_checkpoint"]
        parts += ["wait_reward"] if plan.judged else []
        assert batch.metrics["timing/step"] == pytest.approx(sum(batch.metrics[f"timing/{part}"] for part in parts))


@settings(max_examples=50, deadline=None)
@given(
    bound=st.integers(0, 1),
    replicas=st.integers(1, 3),
    seeds=st.tuples(*[st.integers(0, 1 << 30)] * 2),
    validated=st.frozensets(st.integers(0, 7)),
)
def test_up_to_one_step_off_which_weights_generate_does_not_depend_on_timing_nor_on_validation(
    bound: int, replicas: int, seeds: tuple[int, int], validated: frozenset[int]
) -> None:
    pipeline_config = PipelineConfig(max_staleness=bound, n_replicas=replicas, capacity=4)
    plan = Plan(pipeline_config, n_batches=7, seconds=SHAPES["balanced"])
    runs = [
        Stages(replace(plan, seed=seed, validated=steps)).run() for seed in seeds for steps in (frozenset(), validated)
    ]
    first, *others = ([batch.staleness for batch in run(trained)] for trained in runs)
    assert others == [first] * 3


def test_sync_is_strictly_on_policy_and_syncs_before_every_generation() -> None:
    stages = Stages(Plan(PipelineConfig(max_staleness=0, capacity=99), seconds=SHAPES["balanced"]))
    run(stages.run())
    assert stages.syncs == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_generation_gets_its_weights_before_the_next_update_begins(bound: int) -> None:
    stages = Stages(Plan(PipelineConfig(max_staleness=bound), n_batches=9, seconds=SHAPES["update_bound"]))
    trained = run(stages.run())
    assert [batch.staleness[0] for batch in trained] == [*range(bound), *[bound] * (9 - bound)]
    assert stages.syncs == list(range(9 - bound))


@pytest.mark.parametrize("n_replicas", [1, 3])
@pytest.mark.parametrize(
    ("size", "n_requests", "sizes"), [(5, 2, [3, 2]), (5, 1, [5]), (5, 9, [1] * 5), (6, 4, [2, 2, 2])]
)
def test_a_batch_goes_to_the_teacher_in_as_many_requests_from_however_many_workers(
    size: int, n_requests: int, sizes: list[int], n_replicas: int
) -> None:
    pipeline_config = PipelineConfig(max_staleness=0, requests_per_batch=n_requests, n_replicas=n_replicas)
    stages = Stages(Plan(pipeline_config, n_batches=1, batch_size=size))
    run(stages.run())
    assert stages.requests == sizes


@pytest.mark.parametrize(("bound", "overlaps"), [(0, False), (1, True), (2, True)])
def test_generation_goes_on_during_updates_unless_the_schedule_is_sync(bound: int, overlaps: bool) -> None:
    stages = Stages(Plan(PipelineConfig(max_staleness=bound), n_batches=6, seconds=dict(generate=2, score=2, update=10)))
    run(stages.run())
    assert bool(stages.overlaps["generate, update"]) == overlaps


@pytest.mark.parametrize("n_replicas", [1, 4])
def test_the_teacher_is_asked_before_the_last_answer_is_there(n_replicas: int) -> None:
    pipeline_config = PipelineConfig(max_staleness=0, requests_per_batch=4, n_replicas=n_replicas)
    stages = Stages(Plan(pipeline_config, n_batches=3, batch_size=12, seconds=dict(generate=2, score=2)))
    run(stages.run())
    assert stages.overlaps["generate, score"] >= 3


def test_a_slow_judge_is_waited_for_beside_the_teacher_and_only_for_the_rest() -> None:
    seconds = dict(generate=1.0, score=6.0, judge=16.0, update=1.0)
    plan = Plan(PipelineConfig(max_staleness=0), seconds=seconds, judged=True)
    for batch in run(Stages(plan).run()):
        score_s, rest_s = (batch.metrics[f"timing/{name}"] for name in ("wait_prev_teacher", "wait_reward"))
        assert score_s > 0 and rest_s >= 0 and max(score_s, 0.3 * 16) <= score_s + rest_s <= max(score_s, 1.7 * 16)


@pytest.mark.parametrize(("inflight", "bound"), [(False, 2), (True, 1)])
def test_a_worker_does_not_idle_on_the_last_answers_while_the_bound_allows_it_more(inflight: bool, bound: int) -> None:
    pipeline_config = PipelineConfig(max_staleness=bound, capacity=8, inflight_update=inflight)
    stages = Stages(Plan(pipeline_config, n_batches=9, batch_size=8, seconds=SHAPES["generation_bound"]))
    run(stages.run())
    assert stages.overlaps["two batches"] >= 3


def test_weights_wait_for_the_answers_under_way_unless_they_may_be_updated_in_flight() -> None:
    for inflight in (False, True):
        pipeline_config = PipelineConfig(max_staleness=1, capacity=8, inflight_update=inflight)
        stages = Stages(Plan(pipeline_config, n_batches=9, batch_size=8, seconds=dict(generate=1, score=1, update=1, sync=10)))
        run(stages.run())  # the stages assert it
        assert bool(stages.generated_during_sync) == inflight


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_validation_before_training_comes_before_the_first_batch(bound: int) -> None:
    stages = Stages(Plan(PipelineConfig(max_staleness=bound), n_batches=2, seconds=SHAPES["balanced"], validated=frozenset({0})))

    async def first_batch_handed_out_at() -> tuple[float, float]:
        async with stages.pipeline() as pipeline:
            validated_s = await stages.validate(pipeline)
            async for batch in pipeline:
                return validated_s, batch.dispatched_at
        raise AssertionError

    validated_s, dispatched_at = run(first_batch_handed_out_at())
    assert dispatched_at >= validated_s > 0


@pytest.mark.parametrize("bound", [1, 2])
def test_validation_shows_in_the_timeline_while_the_teacher_and_later_generation_go_on(bound: int) -> None:
    plan = Plan(PipelineConfig(max_staleness=bound), seconds=SHAPES["teacher_bound"], validated=frozenset({2}))
    stages, sink = Stages(plan), Spans()

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


def test_leaving_early_cancels_what_is_under_way() -> None:
    stages = Stages(Plan(PipelineConfig(max_staleness=2), n_batches=50, seconds=SHAPES["balanced"]))

    async def first_batch_only() -> int:
        async with stages.pipeline() as pipeline:
            async for batch in pipeline:
                return batch.step
        raise AssertionError

    assert run(first_batch_only()) == 0
    assert stages.generating == 0


def test_a_worker_that_dies_ends_the_run_if_it_may_not_be_replaced() -> None:
    stages = Stages(Plan(PipelineConfig(max_staleness=1), deaths={2: 3}))

    async def refuse(death: WorkerDied) -> None:
        raise death

    stages.replace = refuse  # type: ignore[method-assign]
    with pytest.raises(WorkerDied, match="rollout worker 0"):
        run(stages.run())


def test_a_failing_update_is_told_even_if_a_stage_breaks_while_it_is_cancelled() -> None:
    stages = Stages(Plan(PipelineConfig(max_staleness=2), n_batches=9, seconds=SHAPES["update_bound"]))

    async def score_and_break(group: Sequence[tuple[Prompt, Response]], step: int) -> list[Sample]:
        try:
            return await Stages.score(stages, group, step)
        finally:
            if stages.actor_update:
                raise ZeroDivisionError("an echo")

    async def run_and_fail() -> None:
        async with stages.pipeline() as pipeline:
            async for batch in pipeline:
                async with pipeline.actor_update(batch):
                    stages.actor_update = True
                    raise LookupError("the update")

    stages.score = score_and_break  # type: ignore[method-assign]
    with pytest.raises(LookupError, match="the update"):
        run(run_and_fail())


def test_a_cancelled_run_stays_cancelled_whatever_its_stages_do() -> None:
    stages = Stages(Plan(PipelineConfig(max_staleness=1), n_batches=9, seconds=SHAPES["update_bound"]))

    async def fail_when_canceled(group: Sequence[tuple[Prompt, Response]], step: int) -> list[Sample]:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            raise ZeroDivisionError("an echo") from None
        return []

    async def cancel_soon() -> None:
        stages.score = fail_when_canceled  # type: ignore[method-assign]
        under_way = asyncio.ensure_future(stages.run())
        await asyncio.sleep(100)
        under_way.cancel()
        await under_way

    with pytest.raises(asyncio.CancelledError):
        run(cancel_soon())


def test_all_answers_to_one_prompt_go_to_one_worker_and_workers_get_equal_shares() -> None:
    prompts = [Prompt(uid=uid, ids=EMPTY, row=uid // 2) for uid in range(12)]
    shares = assign_prompts(prompts, n_replicas=3, responses_per_prompt=2)
    assert [[prompt.row for prompt in share] for share in shares] == [[0, 0, 3, 3], [1, 1, 4, 4], [2, 2, 5, 5]]


def test_each_schedule_has_its_bound() -> None:
    assert MAX_STALENESS == {"sync": 0, "one_step_off": 1, "two_step_off": 2}

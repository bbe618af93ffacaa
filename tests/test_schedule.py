"""The pipeline's promises, over many batch counts and durations, with stages that only take time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import numpy as np
import pytest

from recipe_gkd.data import PromptBatch
from recipe_gkd.samples import Answer, Prompt, Sample, TeacherTopK
from recipe_gkd.schedule import MAX_STALENESS, Pipeline, group_size

EMPTY = np.zeros(0, np.int32)


class Stages:
    """Stages that keep a record of what they were asked, and check that nothing happens at a forbidden time."""

    def __init__(self, seconds: dict[str, float], rng: random.Random, batch_size: int = 5) -> None:
        self.seconds, self.rng, self.batch_size = seconds, rng, batch_size
        self.version, self.rollout_version = 0, -1
        self.generating = self.updating = self.syncing = False
        self.generated: list[int] = []
        self.requests: list[int] = []
        self.syncs: list[int] = []
        self.generated_during_update: list[int] = []
        self.asked_while_generating = 0
        self.broken = False

    async def spend(self, stage: str) -> None:
        await asyncio.sleep(self.seconds.get(stage, 0.0) * self.rng.uniform(0.3, 1.7))

    def batches(self, n: int, first: int = 0) -> list[PromptBatch]:
        size = self.batch_size
        return [
            PromptBatch(
                step, 0.0, [Prompt(uid=uid, ids=EMPTY, row=uid) for uid in range(step * size, (step + 1) * size)]
            )
            for step in range(first, first + n)
        ]

    async def generate(self, batch: PromptBatch) -> AsyncIterator[list[Answer]]:
        assert not self.syncing and not self.generating
        self.generating = True
        order = self.rng.sample(batch.prompts, len(batch.prompts))
        while order:
            some = [order.pop() for _ in range(min(len(order), self.rng.randint(1, 3)))]
            await self.spend("generate")
            self.generated += [prompt.uid for prompt in some]
            self.generated_during_update += [prompt.uid for prompt in some if self.updating]
            yield [
                Answer(
                    uid=prompt.uid,
                    ids=EMPTY,
                    logprobs=EMPTY,
                    finish_reason="stop",
                    weights_version=self.rollout_version,
                    versions_T=EMPTY,
                )
                for prompt in some
            ]
        self.generating = False

    async def score(self, group: list[tuple[Prompt, Answer]]) -> list[Sample]:
        self.requests.append(len(group))
        self.asked_while_generating += self.generating
        await self.spend("teacher")
        rows = np.zeros((0, 4), np.float32)
        return [
            Sample(prompt=prompt, answer=answer, teacher=TeacherTopK(logps_TK=rows, ids_TK=rows, sampled_logps_T=EMPTY))
            for prompt, answer in group
        ]

    async def sync(self, version: int) -> dict[str, float]:
        assert not self.generating and not self.updating and version == self.version
        self.syncing = True
        await self.spend("sync")
        self.rollout_version, self.syncing = version, False
        self.syncs.append(version)
        return {"timing/sync_rollout_weights": 0.0}

    async def run(
        self, n: int, bound: int, first: int = 0, n_requests: int = 2
    ) -> list[tuple[int, list[int], list[int]]]:
        """-> (step, uids, staleness) of each batch in the order of training."""
        self.version, trained = first, []
        async with Pipeline(
            self.batches(n, first),
            generate=self.generate,
            score=self.score,
            sync=self.sync,
            max_staleness=bound,
            score_group=lambda size: group_size(size, n_requests),
            first_version=first,
        ) as pipeline:
            async for batch in pipeline:
                async with pipeline.updating(batch):
                    assert not self.syncing
                    self.updating = True
                    await self.spend("update")
                    trained.append((batch.step, [sample.prompt.uid for sample in batch.samples], batch.staleness))
                    self.version, self.updating = self.version + 1, False
        return trained


SHAPES = {
    "balanced": dict(generate=2e-3, teacher=4e-3, update=6e-3, sync=1e-3),
    "generation_bound": dict(generate=5e-3, teacher=1e-3, update=1e-3, sync=1e-3),
    "teacher_bound": dict(generate=1e-3, teacher=2e-2, update=1e-3, sync=1e-3),
    "update_bound": dict(generate=1e-3, teacher=1e-3, update=2e-2, sync=1e-3),
    "instant": {},
}


@pytest.mark.parametrize("bound", MAX_STALENESS.values(), ids=MAX_STALENESS.keys())
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_every_prompt_is_generated_and_trained_on_once_in_order_within_the_bound(
    n: int, shape: str, bound: int
) -> None:
    stages = Stages(SHAPES[shape], random.Random(n * 10 + bound))
    trained = asyncio.run(asyncio.wait_for(stages.run(n, bound), 20))
    assert [step for step, _, _ in trained] == list(range(n))
    assert [uid for _, uids, _ in trained for uid in uids] == list(range(n * stages.batch_size))
    assert sorted(stages.generated) == list(range(n * stages.batch_size))
    staleness = [value for _, _, values in trained for value in values]
    assert min(staleness) >= 0 and max(staleness) <= bound
    if n > bound and shape == "update_bound":
        assert max(staleness) == bound  # generation runs as far ahead as it may


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_run_that_starts_later_counts_versions_from_there(bound: int) -> None:
    stages = Stages(SHAPES["balanced"], random.Random(0))
    trained = asyncio.run(asyncio.wait_for(stages.run(4, bound, first=10), 20))
    assert [step for step, _, _ in trained] == [10, 11, 12, 13]
    assert stages.syncs[0] == 10
    assert all(0 <= value <= bound for _, _, values in trained for value in values)


def test_sync_is_strictly_on_policy_and_syncs_before_every_generation() -> None:
    stages = Stages(SHAPES["balanced"], random.Random(0))
    asyncio.run(asyncio.wait_for(stages.run(5, 0), 20))
    assert stages.syncs == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bound", [1, 2])
def test_generation_gets_its_weights_before_the_next_update_begins(bound: int) -> None:
    stages = Stages(SHAPES["update_bound"], random.Random(0))
    trained = asyncio.run(asyncio.wait_for(stages.run(9, bound), 20))
    assert [values[0] for _, _, values in trained] == [*range(bound), *[bound] * (9 - bound)]
    assert stages.syncs == list(range(9 - bound))


@pytest.mark.parametrize(
    ("size", "n_requests", "sizes"), [(5, 2, [3, 2]), (5, 1, [5]), (5, 9, [1] * 5), (6, 4, [2, 2, 2])]
)
def test_partial_groups_go_to_the_teacher_too(size: int, n_requests: int, sizes: list[int]) -> None:
    stages = Stages({}, random.Random(0), batch_size=size)
    asyncio.run(asyncio.wait_for(stages.run(1, 0, n_requests=n_requests), 20))
    assert stages.requests == sizes


@pytest.mark.parametrize(("bound", "overlaps"), [(0, False), (1, True), (2, True)])
def test_generation_goes_on_during_updates_unless_the_schedule_is_sync(bound: int, overlaps: bool) -> None:
    stages = Stages(dict(generate=2e-3, teacher=2e-3, update=1e-2), random.Random(0))
    asyncio.run(asyncio.wait_for(stages.run(6, bound), 20))
    assert bool(stages.generated_during_update) == overlaps


def test_the_teacher_is_asked_before_the_last_answer_is_there() -> None:
    stages = Stages(dict(generate=2e-3, teacher=2e-3), random.Random(0), batch_size=12)
    asyncio.run(asyncio.wait_for(stages.run(3, 0, n_requests=4), 20))
    assert stages.asked_while_generating >= 3


@pytest.mark.parametrize("stage", ["generate", "score", "sync"])
def test_a_failing_stage_ends_the_run_with_its_own_error(stage: str) -> None:
    stages = Stages({}, random.Random(0))

    async def fail(*_: object) -> list[Sample]:
        raise LookupError(stage)

    async def fail_streaming(_: PromptBatch) -> AsyncIterator[list[Answer]]:
        raise LookupError(stage)
        yield []

    setattr(stages, stage, fail_streaming if stage == "generate" else fail)
    with pytest.raises(LookupError, match=stage):
        asyncio.run(asyncio.wait_for(stages.run(3, 1), 20))


def test_leaving_early_cancels_what_is_under_way() -> None:
    async def first_batch_only() -> int:
        stages = Stages(SHAPES["balanced"], random.Random(0))
        async with Pipeline(
            stages.batches(50), generate=stages.generate, score=stages.score, sync=stages.sync, max_staleness=2
        ) as pipeline:
            async for batch in pipeline:
                return batch.step
        raise AssertionError

    assert asyncio.run(asyncio.wait_for(first_batch_only(), 5)) == 0


def test_a_failing_update_is_told_even_if_a_stage_breaks_while_it_is_cancelled() -> None:
    stages = Stages(SHAPES["update_bound"], random.Random(0))

    async def score_and_break(group: list[tuple[Prompt, Answer]]) -> list[Sample]:
        try:
            return await Stages.score(stages, group)
        finally:
            if stages.broken:
                raise ZeroDivisionError("an echo")

    async def run_and_fail() -> None:
        async with Pipeline(
            stages.batches(9), generate=stages.generate, score=score_and_break, sync=stages.sync, max_staleness=2
        ) as pipeline:
            async for batch in pipeline:
                async with pipeline.updating(batch):
                    stages.broken = True
                    raise LookupError("the update")

    with pytest.raises(LookupError, match="the update"):
        asyncio.run(asyncio.wait_for(run_and_fail(), 20))


def test_a_cancelled_run_stays_cancelled_whatever_its_stages_do() -> None:
    stages = Stages(SHAPES["update_bound"], random.Random(0))

    async def fail_when_cancelled(group: list[tuple[Prompt, Answer]]) -> list[Sample]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ZeroDivisionError("an echo") from None
        return []

    async def cancel_soon() -> None:
        stages.score = fail_when_cancelled  # type: ignore[method-assign]
        run = asyncio.ensure_future(stages.run(9, 1))
        await asyncio.sleep(0.1)
        run.cancel()
        await run

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel_soon())

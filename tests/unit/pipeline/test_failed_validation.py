"""The schedule after a validation that failed: training continues, unless it needs what has failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import pytest

from recipe_gkd.data.batches import PromptBatch
from recipe_gkd.data.samples import Prompt, Response, Sample
from recipe_gkd.errors import DeadlineError, GkdError, WorkerDied, WorkerError
from recipe_gkd.pipeline.config import PipelineConfig
from recipe_gkd.pipeline.pipeline import Pipeline
from recipe_gkd.pipeline.stages import PipelineStages
from tests._support.waiting import PATIENCE_S
from tests.unit.pipeline.test_pipeline import EMPTY, STORED

N_STEPS = 6
VALIDATION_PROMPTS = 100


def prompts_of(first: int, n: int) -> list[Prompt]:
    return [Prompt(uid=uid, ids=EMPTY, row=uid) for uid in range(first, first + n)]


def response_to(prompt: Prompt, version: int) -> Response:
    return Response(
        uid=prompt.uid, ids=EMPTY, logprobs=EMPTY, finish_reason="stop", weights_version=version, versions_T=EMPTY
    )


@dataclass
class Run:
    """A run of 6 steps whose validation after the first step fails on replica 0 after ``fails_after_s``.

    The worker of replica 1 dies in that validation.

    Attributes:
        config: Settings of the schedule.
        n_prompts: Prompts of a batch.
        sync_s: Duration of a weight sync after the death, in seconds.
        replace_s: Duration of the replacement, in seconds.
        sync_error: Error of the sync of version 1.
        trained: Steps of the updates.
        synced: Versions of the weight syncs that have ended.
    """

    config: PipelineConfig
    n_prompts: int = 2
    fails_after_s: float = 0.02
    sync_s: float = 0.0
    replace_s: float = 0.0
    sync_error: GkdError | None = None
    trained: list[int] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)
    has_died: bool = False

    async def generate(self, replica: int, prompts: Sequence[Prompt], step: int) -> AsyncIterator[list[Response]]:
        yield [response_to(prompt, step) for prompt in prompts]

    async def validate(self, replica: int, prompts: Sequence[Prompt], step: int) -> AsyncIterator[list[Response]]:
        if replica == 1:
            self.has_died = True
            raise WorkerDied("its process ended", worker="rollout worker 1")
        await asyncio.sleep(self.fails_after_s)
        raise WorkerError("a prompt is rejected")
        yield []

    async def score(self, group: Sequence[tuple[Prompt, Response]], step: int) -> list[Sample]:
        return [Sample(prompt=prompt, response=response, teacher=STORED) for prompt, response in group]

    async def sync(self, version: int) -> dict[str, float]:
        if version == 1 and self.sync_error is not None:
            raise self.sync_error
        await asyncio.sleep(self.sync_s if self.has_died else 0)
        self.synced.append(version)
        return {}

    async def replace(self, death: WorkerDied) -> None:
        await asyncio.sleep(self.replace_s)

    async def run(self) -> str:
        """Return the message of the validation's error."""
        batches = [
            PromptBatch(step=step, epoch=0, prompts=prompts_of(step * self.n_prompts, self.n_prompts))
            for step in range(N_STEPS)
        ]
        stages = PipelineStages(generate=self.generate, score=self.score, sync=self.sync, replace=self.replace)
        failure = ""
        async with Pipeline(batches, self.config, stages) as pipeline:
            async for batch in pipeline:
                async with pipeline.actor_update(batch):
                    self.trained.append(batch.step)
                if batch.step == 0:
                    try:
                        await pipeline.generate_for_validation(prompts_of(VALIDATION_PROMPTS, 2), self.validate)
                    except GkdError as error:
                        failure = str(error)
        return failure


def finish(run: Run) -> str:
    return asyncio.run(asyncio.wait_for(run.run(), PATIENCE_S))


@pytest.mark.parametrize("inflight_update", [False, True])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_weight_sync_of_a_replacement_is_not_interrupted(max_staleness: int, inflight_update: bool) -> None:
    run = Run(PipelineConfig(max_staleness=max_staleness, n_replicas=2, inflight_update=inflight_update), sync_s=0.1)
    assert "a prompt is rejected" in finish(run)
    assert run.trained == list(range(N_STEPS)) and run.synced.count(1) >= 1


def test_replacement_is_completed_without_prompts_for_the_replica() -> None:
    run = Run(PipelineConfig(max_staleness=0, n_replicas=2), n_prompts=1, replace_s=0.1)
    assert "a prompt is rejected" in finish(run)
    assert run.trained == list(range(N_STEPS))


@pytest.mark.parametrize("error", [WorkerError("out of memory"), DeadlineError("no answer"), WorkerDied("it ended")])
@pytest.mark.parametrize("on_request", [False, True])
def test_failed_weight_sync_ends_the_run(error: GkdError, on_request: bool) -> None:
    run = Run(PipelineConfig(max_staleness=0, n_replicas=2, on_request=on_request), sync_error=error)
    with pytest.raises(type(error)) as raised:
        finish(run)
    assert raised.value is error and run.trained == [0]

"""Stages of the schedule on the connected workers: generation, validation and the update of the actor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import ray

from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.config import Config
from recipe_gkd.config.timeouts import ACTOR_TIMEOUT, ROLLOUT_TIMEOUT, timeout_of
from recipe_gkd.data.batches import ReadyBatch
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.samples import Prompt, Response, Sample
from recipe_gkd.errors import DeadlineError, WorkerDied
from recipe_gkd.rewards.advantages import with_group_statistics
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.runtime.keyed_timeout import with_margin
from recipe_gkd.runtime.threads import in_thread
from recipe_gkd.runtime.wait_log import waiting_for
from recipe_gkd.workers import Workers

R = TypeVar("R")
GENERATION_RPC_MARGIN_S = 3.0
"""Time added to a worker's own deadline, because its error names the cause and the driver's only a missing reply."""


async def generate_responses(
    workers: Workers, config: Config, data: PromptData, rank: int, prompts: Sequence[Prompt], step: int
) -> AsyncIterator[list[Response]]:
    """Yield the responses to the prompts of one rollout worker as they finish. Reference responses come first.

    Args:
        workers: Connected workers.
        config: Configuration of the run.
        data: Data set that the prompts come from.
        rank: Rank of the rollout worker.
        prompts: Prompts of the worker.
        step: Step of the batch.
    """
    with_reference = [prompt for prompt in prompts if prompt.reference_ids is not None]
    if with_reference:
        yield [data.reference_response(prompt, version=step) for prompt in with_reference]
    sampled = [prompt for prompt in prompts if prompt.reference_ids is None]
    if not sampled:
        return
    timeout_s = timeout_of(config, ROLLOUT_TIMEOUT, GENERATION_RPC_MARGIN_S)
    phase = f"generate, step {step}"
    n, stream = len(sampled), workers.rollouts.stream
    items = stream(rank, RolloutWorker.generate, sampled, step, timeout_s=timeout_s, phase=phase, n_results=n)
    async for responses in _replaceable(workers, items):
        yield responses


async def generate_validation_responses(
    workers: Workers, timeout_s: float, rank: int, prompts: Sequence[Prompt], step: int
) -> AsyncIterator[list[Response]]:
    """Yield the responses to the validation prompts of one rollout worker as they finish.

    Args:
        workers: Connected workers.
        timeout_s: Deadline of the worker for all its prompts.
        rank: Rank of the rollout worker.
        prompts: Prompts of the worker.
        step: Version of the weights.
    """
    items = workers.rollouts.stream(
        rank,
        RolloutWorker.generate,
        list(prompts),
        step,
        "validation",
        timeout_s,
        timeout_s=with_margin(timeout_s, GENERATION_RPC_MARGIN_S),
        phase=f"validate after step {step}",
        n_results=len(prompts),
    )
    async for responses in _replaceable(workers, items):
        yield responses


async def _replaceable(workers: Workers, items: AsyncIterator[list[Response]]) -> AsyncIterator[list[Response]]:
    """Yield the responses of a rollout worker, which counts as dead if it is silent and can be replaced.

    Raises:
        WorkerDied: The worker died, or it did not answer before the deadline and can be replaced.
        GkdError: Generation failed in another way.
    """
    try:
        async for responses in items:
            yield responses
    except DeadlineError as error:
        if not workers.restarts.can_replace(error):
            raise
        [label] = error.silent
        raise WorkerDied(
            error.what, phase=error.phase, worker=label, remedy=error.remedy, details=("it is treated as dead",)
        ) from error


async def sum_kl(
    workers: Workers, config: Config, samples: Sequence[Sample], step: int
) -> list[dict[int, tuple[float, float]]]:
    """Return the KL divergences of scored samples from every actor rank.

    Args:
        workers: Connected workers.
        config: Configuration of the run.
        samples: Samples that teachers have scored.
        step: Number of optimizer steps of the weights.

    Returns:
        Results of :meth:`~recipe_gkd.actor.student_actor.StudentActor.kl_sums`, to be added up by uid.
    """
    phase = f"KL divergence after step {step}"
    return await _call_on_shards(workers, config, ActorWorker.kl_sums, samples, step, phase)


async def update_actors(workers: Workers, config: Config, batch: ReadyBatch) -> dict[str, float]:
    """Do one optimizer step on ``batch``, divided among the data-parallel ranks, and return its metrics."""
    samples = [replace(sample, reward_numbers={}) for sample in batch.samples]  # for metrics of the driver only
    samples = with_group_statistics(samples, config.gkd, config.actor_rollout_ref.rollout.n)
    phase = f"update, step {batch.step}"
    return (await _call_on_shards(workers, config, ActorWorker.update, samples, batch.step, phase))[0]


async def _call_on_shards(
    workers: Workers,
    config: Config,
    method: Callable[[ActorWorker, Sequence[Sample], int], R],
    samples: Sequence[Sample],
    step: int,
    phase: str,
) -> list[R]:
    """Divide samples among the data-parallel ranks, and return the results of all ranks."""
    with waiting_for(phase, None, "the object store of this node"):
        # Ray replaces a reference by its object when a method is called.
        shards = [cast(Sequence[Sample], await in_thread(ray.put, shard)) for shard in workers.sharding.divide(samples)]
    return await workers.actors.call_each(
        method,
        [(shards[dp_rank], step) for dp_rank in workers.dp_ranks],
        timeout_s=timeout_of(config, ACTOR_TIMEOUT),
        phase=phase,
    )

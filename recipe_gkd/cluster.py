"""Connected workers of a run, and the stages of the schedule on them: generation, validation, update, restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import ray
from ray.exceptions import RayError

from recipe_gkd.actor.objective.token_kl import TokenKl
from recipe_gkd.actor.ranks import RankReport
from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.config import Config
from recipe_gkd.config.timeouts import ACTOR_TIMEOUT, ROLLOUT_TIMEOUT, timeout_of
from recipe_gkd.conversations.open_batch import Batch
from recipe_gkd.conversations.stage import ConversationStage
from recipe_gkd.data.batches import ReadyBatch
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.samples import Prompt, Response, Sample
from recipe_gkd.data.sharding import Sharding
from recipe_gkd.errors import DeadlineError, GkdError, WorkerDied
from recipe_gkd.ray_cluster.actor_restarts import ActorRestarts
from recipe_gkd.ray_cluster.capacity import ClusterCapacity
from recipe_gkd.ray_cluster.object_store import ObjectStoreUsage
from recipe_gkd.ray_cluster.rollout_restarts import RolloutRestarts
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.rewards.advantages import with_group_statistics
from recipe_gkd.rollout.ray_worker import RolloutWorker
from recipe_gkd.rollout.turns import Turn, TurnRequest
from recipe_gkd.runtime.keyed_timeout import with_margin
from recipe_gkd.runtime.threads import in_thread
from recipe_gkd.runtime.wait_log import waiting_for
from recipe_gkd.teachers.scoring.homes import Homes
from recipe_gkd.teachers.scoring.pool import ScoringPool
from recipe_gkd.weight_sync.synchronizer import WeightSynchronizer

log = logging.getLogger(__name__)

R = TypeVar("R")

GENERATION_RPC_MARGIN_S = 3.0
"""Time added to a worker's own deadline, because its error names the cause and the driver's only a missing reply."""
SCORING_CONNECT_S = 60.0
"""Time that scoring workers have to reach the teachers, which the driver has reached before."""
LOCATE_TIMEOUT_S = 5.0
"""Deadline of Ray's control service for the state of the actor ranks after an error."""


@dataclass(frozen=True)
class ActorReports:
    """Reports of the actor ranks after their set-up.

    Attributes:
        homes: Nodes of the data-parallel ranks.
    """

    ranks: list[RankReport]
    homes: Homes

    @property
    def dp_ranks(self) -> list[int]:
        """Data-parallel rank of each rank."""
        return [report.dp_rank for report in self.ranks]


@dataclass
class Cluster:
    """Connected workers of both pools.

    Lifecycle::

        async with start_cluster(config, device, ...) as cluster:
            await cluster.weights.sync(0)
            async for responses in cluster.generate(data, rank, prompts, step=0): ...
            metrics = await cluster.update(batch)

    Attributes:
        actors: Actor ranks.
        weights: Transfer of weights from the actors to the rollout workers.
        dp_ranks: Data-parallel rank of each actor rank.
        sharding: Division of a batch among the data-parallel ranks.
        restarts: Replacement of dead rollout workers.
        actor_restarts: Replacement of all actor ranks after one was lost.
        engine_dtype: Data type of the rollout engines.
        actor_devices: Name of the device of each actor rank, such as ``NVIDIA H100 80GB HBM3`` or ``cpu``.
        scoring: Scoring workers. None if the teachers run in the driver's process.
        store_usage: Use of Ray's object stores.
        capacity: Resources that the cluster could grant instead, for advice. None if they are unknown.
        conversations: Conversations of several turns. None: a response is one turn.
    """

    config: Config
    actors: WorkerGroup[ActorWorker]
    rollouts: WorkerGroup[RolloutWorker]
    weights: WeightSynchronizer
    dp_ranks: list[int]
    sharding: Sharding
    restarts: RolloutRestarts
    actor_restarts: ActorRestarts[ActorWorker, ActorReports]
    engine_dtype: str = ""
    actor_devices: Sequence[str] = ()
    scoring: ScoringPool | None = None
    store_usage: ObjectStoreUsage = field(default_factory=ObjectStoreUsage)
    capacity: ClusterCapacity | None = None
    conversations: ConversationStage | None = None

    # Stages of the schedule.

    async def generate(
        self, data: PromptData, rank: int, prompts: Sequence[Prompt], step: int
    ) -> AsyncIterator[list[Response]]:
        """Yield the responses to the prompts of one rollout worker as they finish. Reference responses come first.

        Args:
            data: Data set that the prompts come from.
            step: Step of the batch.

        Raises:
            WorkerDied: The worker died, or it did not answer before the deadline and can be replaced.
            GkdError: Generation failed in another way.
        """
        with_reference = [prompt for prompt in prompts if prompt.reference_ids is not None]
        if with_reference:
            yield [data.reference_response(prompt, version=step) for prompt in with_reference]
        sampled = [prompt for prompt in prompts if prompt.reference_ids is None]
        if not sampled:
            return
        batch, timeout_s = Batch(data=data, replica=rank, step=step), timeout_of(self.config, ROLLOUT_TIMEOUT)
        async for responses in self._sample(batch, sampled, timeout_s, f"generate, step {step}"):
            yield responses

    async def generate_for_validation(
        self, data: PromptData, timeout_s: float, rank: int, prompts: Sequence[Prompt], step: int
    ) -> AsyncIterator[list[Response]]:
        """Yield the responses to the validation prompts of one rollout worker as they finish.

        Args:
            data: Data set that the prompts come from.
            timeout_s: Deadline of the worker for all its prompts.
            step: Version of the weights.

        Raises:
            WorkerDied, GkdError: See :meth:`generate`.
        """
        batch = Batch(data=data, replica=rank, step=step, sampling="validation")
        async for responses in self._sample(batch, prompts, timeout_s, f"validate after step {step}"):
            yield responses

    async def _sample(
        self, batch: Batch, prompts: Sequence[Prompt], timeout_s: float, phase: str
    ) -> AsyncGenerator[list[Response]]:
        """Yield the sampled responses of one rollout worker, or its conversations, as they end.

        Args:
            timeout_s: Deadline of the worker for a call.
            phase: Name of the phase, for messages.
        """
        call = batch.step, batch.sampling, timeout_s
        deadline_s = with_margin(timeout_s, GENERATION_RPC_MARGIN_S)

        async def send(requests: Sequence[TurnRequest]) -> AsyncGenerator[list[Turn]]:
            items = self.rollouts.stream(
                batch.replica,
                RolloutWorker.generate_turns,
                list(requests),
                *call,
                timeout_s=deadline_s,
                phase=phase,
                n_results=len(requests),
            )
            async for turns in self._replaceable(items):
                yield turns

        if self.conversations is None:
            items = self.rollouts.stream(
                batch.replica,
                RolloutWorker.generate,
                list(prompts),
                *call,
                timeout_s=deadline_s,
                phase=phase,
                n_results=len(prompts),
            )
            responses = self._replaceable(items)
        else:
            responses = self.conversations.generate(batch, prompts, send)
        async with aclosing(responses) as stream:
            async for each in stream:
                yield each

    async def _replaceable(self, items: AsyncIterator[R]) -> AsyncGenerator[R]:
        """Yield the results of a rollout worker, which counts as dead if it is silent and can be replaced."""
        try:
            async for item in items:
                yield item
        except DeadlineError as error:
            if not self.restarts.can_replace(error):
                raise
            [label] = error.silent
            details = (*error.details, "it is treated as dead")
            raise WorkerDied(
                error.what, phase=error.phase, worker=label, remedy=error.remedy, details=details
            ) from error

    async def update(self, batch: ReadyBatch) -> dict[str, float]:
        """Do one optimizer step on ``batch``, divided among the data-parallel ranks, and return its metrics."""
        samples = with_group_statistics(batch.samples, self.config.gkd, self.config.actor_rollout_ref.rollout.n)
        samples = [_for_actor(sample) for sample in samples]
        phase = f"update, step {batch.step}"
        arguments = await self._divide(samples, batch.step, phase)
        timeout_s = timeout_of(self.config, ACTOR_TIMEOUT)
        return (await self.actors.call_each(ActorWorker.update, arguments, timeout_s=timeout_s, phase=phase))[0]

    async def token_kl(self, samples: Sequence[Sample], step: int) -> list[TokenKl]:
        """Return the KL divergences at the tokens of scored samples from every actor rank.

        Args:
            samples: Samples that teachers have scored.
            step: Number of optimizer steps of the weights.
        """
        phase = f"KL divergence after step {step}"
        arguments = await self._divide(samples, step, phase)
        timeout_s = timeout_of(self.config, ACTOR_TIMEOUT)
        return await self.actors.call_each(ActorWorker.token_kl, arguments, timeout_s=timeout_s, phase=phase)

    async def _divide(self, samples: Sequence[Sample], step: int, phase: str) -> list[tuple[Sequence[Sample], int]]:
        """Return the arguments of each actor rank: the shard of its data-parallel rank, and the step.

        Raises:
            DeadlineError: The object store did not accept the samples, for example because the disk hangs to which Ray
                spills objects.
        """
        timeout_s, store = timeout_of(self.config, ACTOR_TIMEOUT), "the object store of this node"
        try:
            with waiting_for(phase, timeout_s, store):
                async with asyncio.timeout(timeout_s):
                    # Ray replaces a reference by its object when a method is called.
                    shards = [
                        cast(Sequence[Sample], await in_thread(ray.put, shard))
                        for shard in self.sharding.divide(samples)
                    ]
        except TimeoutError as error:
            raise DeadlineError(
                f"{store} did not accept the samples within {timeout_s:g} s",
                phase=phase,
                waited_s=timeout_s,
                remedy=f"check the disk to which Ray spills objects, or raise {timeout_s.key}",
            ) from error
        return [(shards[dp_rank], step) for dp_rank in self.dp_ranks]

    # Restarts.

    async def metrics(self) -> dict[str, float]:
        """Return the numbers of restarted workers so far, and the use of Ray's object stores."""
        counts = {
            "actor/restarts": float(self.actor_restarts.n_restarts),
            "rollout/restarts": float(self.restarts.n_restarts),
        }
        if self.scoring is not None:
            counts["teachers/scoring/restarts"] = float(self.scoring.n_restarts)
        return counts | await self.store_usage.metrics()

    async def replace_dead_rollouts(self, death: WorkerDied) -> None:
        """Replace dead rollout workers, and silent ones if the death is a missed deadline.

        New workers have no weights until a complete sync.

        Raises:
            WorkerDied: No more workers may be replaced (``trainer.max_worker_restarts``).
        """
        await self.restarts.replace_dead(death)
        self.weights.forget()

    async def actor_is_lost(self, error: BaseException) -> bool:
        """Return True if an actor rank has ended, or if it did not answer before a deadline that ``error`` reports.

        It is also True if Ray does not report the state of the ranks.
        """
        if not isinstance(error, GkdError):
            return False
        try:
            async with asyncio.timeout(LOCATE_TIMEOUT_S):
                return bool(await self.actor_restarts.lost(error))
        except (RayError, OSError) as unknown:  # TimeoutError is an OSError
            log.warning("Ray does not report the state of the actor ranks: %s", unknown)
            return True

    async def restart_actors(self, error: GkdError) -> None:
        """Start all actor ranks again if one was lost, with the weights of the model folder. The engines stay.

        Args:
            error: Error with which the training ended.

        Raises:
            GkdError: ``error`` itself if no rank was lost or no restart is left (``trainer.max_actor_restarts``), or an
                error of the start.
        """
        reports = await self.actor_restarts.restart(error)
        self.dp_ranks = reports.dp_ranks
        self.sharding = replace(self.sharding, homes=reports.homes.of_ranks)
        if self.scoring is not None:
            await self.scoring.move(reports.homes, SCORING_CONNECT_S)
        await self.restarts.replace_dead()  # one whose replacement was interrupted by the error
        self.weights.forget()


def _for_actor(sample: Sample) -> Sample:
    """Return a sample without what only the driver reads."""
    return replace(sample, reward_numbers={}, response=replace(sample.response, transcript=None, prompt_ids=None))

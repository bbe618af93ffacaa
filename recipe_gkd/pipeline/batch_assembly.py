"""Batch assembly: responses -> requests to teacher and reward function -> a batch that is ready for training."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace

from recipe_gkd.data.batches import PromptBatch, ReadyBatch
from recipe_gkd.data.samples import Prompt, Response, Reward, Sample
from recipe_gkd.pipeline.assignment import assign_prompts
from recipe_gkd.pipeline.rollout_supervisor import RolloutSupervisor
from recipe_gkd.pipeline.stages import ComputeRewards, PipelineStages
from recipe_gkd.pipeline.state import PipelineState
from recipe_gkd.runtime.clock import now
from recipe_gkd.runtime.tasks import FirstErrorTaskGroup

Group = list[tuple[Prompt, Response]]


class BatchAssembler:
    """Assembly of batches: responses are collected from all replicas and scored in groups as they finish."""

    def __init__(
        self,
        state: PipelineState,
        stages: PipelineStages,
        supervisor: RolloutSupervisor,
        tasks: FirstErrorTaskGroup,
    ) -> None:
        self._state, self._stages, self._supervisor, self._tasks = state, stages, supervisor, tasks

    async def assemble(self, prompts: PromptBatch) -> ReadyBatch:
        """Generate and score the responses to a dispatched batch, and compute their rewards.

        Returns:
            The batch with its samples in the order of their uids, and with the timing metrics of its generation.
        """
        config = self._state.config
        batch = ReadyBatch(prompts.step, prompts.epoch, dispatched_at=now())
        requests = _ScoringRequests(self._state, self._stages, self._tasks, batch.step, len(prompts.prompts))
        shares = assign_prompts(prompts.prompts, config.n_replicas, config.responses_per_prompt)
        replicas = [
            self._tasks.start(self._generate(replica, share, requests)) for replica, share in enumerate(shares) if share
        ]
        ended_at = [await replica for replica in replicas]
        batch.generated_at = max(ended_at)
        self._state.last_generate_s = batch.generated_at - batch.dispatched_at
        samples = await requests.samples()
        self._state.rows.complete(batch.step)
        self._state.notify()
        batch.scored_at = now()
        rewards = await requests.rewards()
        samples = [_with_reward(sample, rewards.get(sample.prompt.uid)) for sample in samples]
        batch.samples = sorted(samples, key=lambda sample: sample.prompt.uid)
        batch.metrics = _timing_metrics(batch, ended_at, requests.first_started_at)
        return batch

    async def _generate(self, replica: int, prompts: list[Prompt], requests: _ScoringRequests) -> float:
        """Generate the responses of one replica and return the time of the last one."""
        step = requests.step
        with self._state.timeline.span(f"rollout {replica}", "generate", step=step, samples=len(prompts)):
            async for prompt, response in self._supervisor.responses(replica, prompts, step, self._stages.generate):
                requests.add(prompt, response)
        return now()


def _with_reward(sample: Sample, reward: Reward | None) -> Sample:
    if reward is None:
        return sample
    return replace(sample, reward=reward.score, reward_numbers=reward.numbers, turn_rewards=reward.turn_scores)


class _ScoringRequests:
    """Requests of one batch to the teacher and to the reward function, one per group of finished responses."""

    def __init__(
        self, state: PipelineState, stages: PipelineStages, tasks: FirstErrorTaskGroup, step: int, n_prompts: int
    ) -> None:
        self.step = step
        self._timeline, self._rows, self._stages, self._tasks = state.timeline, state.rows, stages, tasks
        self._group_size = math.ceil(n_prompts / state.config.requests_per_batch)
        self._n_missing = n_prompts
        self._group: Group = []
        self._scores: list[asyncio.Task[list[Sample]]] = []
        self._rewards: list[asyncio.Task[dict[int, Reward]]] = []
        self._started_at: list[float] = []

    def add(self, prompt: Prompt, response: Response) -> None:
        """Add a finished response. A full group, or the last one, is sent at once."""
        self._group.append((prompt, response))
        self._n_missing -= 1
        if len(self._group) == self._group_size or not self._n_missing:
            self._scores.append(self._tasks.start(self._score(self._group)))
            if self._stages.compute_rewards is not None:
                rewards = self._compute_rewards(self._stages.compute_rewards, self._group)
                self._rewards.append(self._tasks.start(rewards))
            self._group = []

    async def samples(self) -> list[Sample]:
        return [sample for task in self._scores for sample in await task]

    async def rewards(self) -> dict[int, Reward]:
        return {uid: reward for task in self._rewards for uid, reward in (await task).items()}

    @property
    def first_started_at(self) -> float:
        return min(self._started_at)

    async def _score(self, group: Group) -> list[Sample]:
        self._started_at.append(now())
        with self._timeline.span("teacher", "score", step=self.step, samples=len(group)):
            samples = await self._stages.score(group, self.step)
        self._rows.add(self.step, sum(sample.teacher.n_bytes for sample in samples))
        return samples

    async def _compute_rewards(self, compute_rewards: ComputeRewards, group: Group) -> dict[int, Reward]:
        with self._timeline.span("reward", "compute rewards", step=self.step, samples=len(group)):
            return await compute_rewards(group)


def _timing_metrics(batch: ReadyBatch, ended_at: Sequence[float], first_request_at: float) -> dict[str, float]:
    generate_s = [end - batch.dispatched_at for end in ended_at]
    return {
        "timing/generate_sequences": max(generate_s),
        "timing/generate_sequences_min": min(generate_s),
        "timing/generate_sequences_max": max(generate_s),
        "timing/generate_sequences_mean": sum(generate_s) / len(generate_s),
        "timing/get_teacher_knowledge": batch.scored_at - first_request_at,
        "timing/teacher_tail": batch.scored_at - batch.generated_at,
    }

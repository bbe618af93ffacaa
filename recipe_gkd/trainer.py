"""The training loop: ``Trainer.loop`` is the algorithm, ``schedule.Pipeline`` decides when its stages run."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray

from recipe_gkd.actor.microbatch import shard_batch
from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.checkpoints.saver import CheckpointSaver
from recipe_gkd.checkpoints.state import Best, ResumeState
from recipe_gkd.config import Config
from recipe_gkd.config.staleness import staleness_bound
from recipe_gkd.data.prompts import PromptLoader
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import GkdError
from recipe_gkd.metrics.loggers import Loggers
from recipe_gkd.metrics.steps import StepMetrics, span
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.pipeline.interface import PipelineConfig, ReadyBatch
from recipe_gkd.pipeline.pipeline import Pipeline
from recipe_gkd.rewards import RewardItems, RewardScorer
from recipe_gkd.rewards.advantages import with_group_statistics
from recipe_gkd.runtime.threads import in_thread
from recipe_gkd.teacher_routing import Teachers
from recipe_gkd.validation import Validation
from recipe_gkd.workers import Workers

log = logging.getLogger(__name__)

RPC_DEADLINE_MARGIN_S = 3.0
"""A worker's own deadline ends first: its error says more than that it did not answer."""


@dataclass(frozen=True)
class RewardContext:
    """The reward function, and what it judges."""

    scorer: RewardScorer
    items: RewardItems | None = None
    """What it is given of the training data; None: training answers are not judged."""
    validation: Validation | None = None


class Trainer:
    """Student answers; a teacher's top-k at every position of the answers; an update toward it; and again."""

    def __init__(
        self,
        config: Config,
        workers: Workers,
        teachers: Teachers,
        loader: PromptLoader,
        start: ResumeState,
        reward_context: RewardContext | None = None,
    ) -> None:
        """``judging``: None if nothing is judged."""
        self.config, self.workers, self.teachers, self.loader = config, workers, teachers, loader
        self.start, self.reward_context = start, reward_context
        self.progress, self.best = start.progress, start.best
        self.teachers.resume(start.progress.skipped_samples)
        self.root = folder_of(config.trainer).absolute()
        self.saver = CheckpointSaver(config, self.root, self.call_actors, best=start.best)
        self.last_step = loader.last_step(self.progress.prompts_trained, self.progress.step)

    async def fit(self) -> None:
        """Train to the last step, and complete the checkpoint of that step if one is due.

        Complete checkpoints stay, whatever ends the run; half-written ones are removed.

        Raises:
            CheckpointError: More than ``trainer.save_failures_allowed`` saves failed, or the last one did twice.
        """
        try:
            await self.loop()
            await self.saver.finish_run(self.progress.step)
        except BaseException as error:
            await self.saver.give_up(workers_failed=isinstance(error, GkdError))
            raise

    async def loop(self) -> None:
        """The algorithm."""
        trainer = self.config.trainer
        with (
            Loggers(trainer, first_step=self.progress.step, last_step=self.last_step) as loggers,
            StepMetrics(self.config, n_rollouts=len(self.workers.rollouts), capacity=self.workers.capacity) as steps,
        ):
            async with self.pipeline(steps.timeline) as pipeline:
                if trainer.val_before_train:
                    metrics = await self.validate(pipeline)
                    steps.log_validation(loggers, metrics, self.progress.step)
                    if best := self.choose_best(metrics, has_checkpoint=self.start.belongs_to_run(self.root)):
                        self.saver.keep_best(best)
                async for batch in pipeline:
                    batch.metrics |= self.teachers.report(
                        batch.samples, batch.step, before=self.progress.skipped_samples
                    )
                    async with pipeline.actor_update(batch):
                        with span(batch.metrics, "timing/update_actor"):
                            batch.metrics |= await self.update(batch)
                    self.advance(batch)
                    if self.validation_is_due():
                        with span(batch.metrics, "timing/validate"):
                            batch.metrics |= await self.validate(pipeline)
                        self.choose_best(batch.metrics)
                    if self.saver.is_pending or self.save_is_due():
                        async with pipeline.actor("save_checkpoint", batch):
                            with span(batch.metrics, "timing/save_checkpoint"):
                                await (self.save() if self.save_is_due() else self.saver.finish(wait=False))
                        batch.metrics["checkpoint/failed_saves"] = float(self.saver.failed_saves)
                        self.best = self.saver.best_of(self.best)
                    steps.log(loggers, batch, self.progress.step)

    def pipeline(self, timeline: Timeline) -> Pipeline:
        trainer, settings = self.config.trainer, self.config.actor_rollout_ref
        pipeline_config = PipelineConfig(
            max_staleness=staleness_bound(trainer),
            n_replicas=len(self.workers.rollouts),
            capacity=len(self.workers.rollouts) * settings.rollout.max_num_seqs,
            responses_per_prompt=settings.rollout.n,
            requests_per_batch=settings.teacher.n_server_workers * settings.teacher.num_microbatches,
            inflight_update=trainer.inflight_update,
        )
        return Pipeline(
            self.loader.batches(self.progress.prompts_trained, first_step=self.progress.step),
            pipeline_config,
            generate=self.generate,
            score=self.teachers.score,
            judge=self.judge if self.reward_context is not None and self.reward_context.items is not None else None,
            sync=self.workers.weights.sync,
            replace=self.workers.replace_dead_rollouts,
            first_version=self.progress.step,
            timeline=timeline,
        )

    # ---- the stages

    async def generate(self, rank: int, prompts: Sequence[Prompt], step: int) -> AsyncIterator[list[Response]]:
        """One rollout worker's share of a batch, as its answers finish; given ones are there already."""
        given = [prompt for prompt in prompts if prompt.reference_ids is not None]
        if given:
            yield [self.loader.data.reference_response(prompt, version=step) for prompt in given]
        asked = [prompt for prompt in prompts if prompt.reference_ids is None]
        if not asked:
            return
        async for responses in self.workers.rollouts.stream(
            rank,
            "generate",
            asked,
            step,
            timeout_s=self.config.actor_rollout_ref.rollout.timeout_s + RPC_DEADLINE_MARGIN_S,
            phase=f"generate, step {step}",
        ):
            yield responses

    async def judge(self, group: Sequence[tuple[Prompt, Response]]) -> dict[int, float]:
        """What the reward function says of the sampled answers, by uid."""
        assert self.reward_context is not None and self.reward_context.items is not None
        scorer, items = self.reward_context.scorer, self.reward_context.items
        sampled = [pair for pair in group if pair[0].reference_ids is None]
        described = await in_thread(lambda: [items.of(prompt, response) for prompt, response in sampled])
        return dict(zip([item.uid for item in described], await scorer.score(described), strict=True))

    async def update(self, batch: ReadyBatch) -> dict[str, float]:
        """One optimizer step on the whole batch; each data-parallel rank gets its share."""
        actors = self.workers.actors
        samples = with_group_statistics(batch.samples, self.config.gkd, self.config.actor_rollout_ref.rollout.n)
        shards = [await in_thread(ray.put, shard) for shard in shard_batch(samples, self.workers.dp_size)]
        results = await actors.call_each(
            "update",
            [(shards[dp_rank], batch.step) for dp_rank in self.workers.dp_ranks],
            timeout_s=self.config.actor_rollout_ref.actor.timeout_s,
            phase=f"update, step {batch.step}",
        )
        return dict(results[0])

    async def validate(self, pipeline: Pipeline) -> dict[str, float]:
        """Of the actor's weights as they are; while the reward function judges, generation goes on."""
        assert self.reward_context is not None and self.reward_context.validation is not None  # the configuration would be refused
        validation = self.reward_context.validation
        generate = partial(self.generate_validation, timeout_s=validation.timeout_s)
        responses = await pipeline.generate_for_validation(validation.prompts, generate, responses_per_prompt=validation.n)
        return await validation.report(responses, self.reward_context.scorer, self.progress.step)

    async def generate_validation(
        self, rank: int, prompts: Sequence[Prompt], step: int, *, timeout_s: float
    ) -> AsyncIterator[list[Response]]:
        """One rollout worker's share of the validation prompts."""
        async for responses in self.workers.rollouts.stream(
            rank,
            "generate",
            list(prompts),
            step,
            "validation",
            timeout_s,
            timeout_s=timeout_s + RPC_DEADLINE_MARGIN_S,
            phase=f"validate after step {step}",
        ):
            yield responses

    async def save(self) -> None:
        """Save a checkpoint of this step, or count a failed save; with ``async_save`` in the background."""
        await self.saver.save(self.progress, self.best if self.is_best() else None)

    # ---- bookkeeping

    async def call_actors(self, method: str, *args: object, timeout_s: float | None = None) -> list[Any]:
        timeout_s = timeout_s or self.config.actor_rollout_ref.actor.timeout_s
        phase = f"{method}, step {self.progress.step}"
        return await self.workers.actors.call(method, *args, timeout_s=timeout_s, phase=phase)

    def advance(self, batch: ReadyBatch) -> None:
        responses_per_prompt = self.config.actor_rollout_ref.rollout.n
        prompts = len({sample.prompt.uid // responses_per_prompt for sample in batch.samples})
        skipped = sum(sample.is_skipped for sample in batch.samples)
        self.progress = replace(
            self.progress,
            step=self.progress.step + 1,
            prompts_trained=self.progress.prompts_trained + prompts,
            skipped_samples=self.progress.skipped_samples + skipped,
        )

    def validation_is_due(self) -> bool:
        return self._is_due(self.config.trainer.test_freq)

    def save_is_due(self) -> bool:
        return self._is_due(self.config.trainer.save_freq) or self.is_best()

    def _is_due(self, every: int) -> bool:
        step = self.progress.step
        return every > 0 and (step == self.last_step or step % every == 0)

    def choose_best(self, metrics: Mapping[str, float], *, has_checkpoint: bool = True) -> Best | None:
        """Return the weights as they are if ``trainer.best_metric`` is higher than ever before, else None.

        ``has_checkpoint=False``: weights that the run starts from without having a checkpoint of them. Their value is
        what a checkpoint must exceed to be called the best.
        """
        metric = self.config.trainer.best_metric
        if metric is None or (self.best is not None and metrics[metric] <= self.best.value):
            return None
        self.best = Best(metric, metrics[metric], self.progress.step, has_checkpoint)
        return self.best

    def is_best(self) -> bool:
        """Return True if the weights as they are did best of all."""
        return self.best is not None and self.best.step == self.progress.step

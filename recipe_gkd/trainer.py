"""The training loop: ``Trainer.loop`` is the algorithm, ``schedule.Pipeline`` decides when its stages run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from recipe_gkd.actor.microbatch import shard_batch
from recipe_gkd.checkpoints import CheckpointWriter, Progress
from recipe_gkd.config import Config
from recipe_gkd.data import PromptLoader
from recipe_gkd.errors import GkdError
from recipe_gkd.flow import Flow, ReadyBatch, staleness_bound
from recipe_gkd.metrics.loggers import Loggers
from recipe_gkd.metrics.steps import StepMetrics, span
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.samples import Answer, Prompt, Sample, TeacherTopK
from recipe_gkd.schedule import Pipeline
from recipe_gkd.workers import Workers
from teacher.client import TeacherClient
from teacher.records import TeacherSequence

log = logging.getLogger(__name__)

MARGIN_S = 3.0
"""A worker's own deadline ends first: its error says more than that it did not answer."""
LAST_CHANCE_S = 1.0
"""What workers, of which one has failed, have to say that a checkpoint is written."""


class Trainer:
    """Student answers; the teacher's top-k at every position of the answers; an update towards it; and again."""

    def __init__(
        self, config: Config, workers: Workers, teacher: TeacherClient, loader: PromptLoader, progress: Progress
    ) -> None:
        self.config, self.workers, self.teacher, self.loader = config, workers, teacher, loader
        self.progress = progress
        self.saving: CheckpointWriter | None = None
        self.save_is_under_way = False
        """Whether the workers have all that they need to complete it."""
        self.last_step = loader.last_step(progress.prompts_trained, progress.step)

    async def fit(self) -> None:
        """Train to the last step. Raises whatever ended it early; complete checkpoints stay, half a one does not."""
        try:
            await self.loop()
            await self.finish_save()
        except BaseException as error:  # one that was being written in the background may be whole by now
            broken = isinstance(error, GkdError)
            if self.save_is_under_way:
                with suppress(GkdError):
                    await self.finish_save(wait=not broken, timeout_s=LAST_CHANCE_S if broken else None)
            raise
        finally:
            if self.saving is not None:
                self.saving.discard()

    async def loop(self) -> None:
        """The algorithm."""
        trainer = self.config.trainer
        with (
            Loggers(trainer, first_step=self.progress.step, last_step=self.last_step) as loggers,
            StepMetrics(self.config, n_rollouts=len(self.workers.rollouts)) as steps,
        ):
            async with self.pipeline(steps.timeline) as pipeline:
                async for batch in pipeline:
                    async with pipeline.updating(batch):
                        with span(batch.metrics, "timing/update_actor"):
                            batch.metrics |= await self.update(batch)
                    self.advance(batch)
                    if self.saving or self.save_is_due():
                        async with pipeline.actor("save_checkpoint", batch):
                            with span(batch.metrics, "timing/save_checkpoint"):
                                await (self.save() if self.save_is_due() else self.finish_save(wait=False))
                    steps.log(loggers, batch, self.progress.step)

    def pipeline(self, timeline: Timeline) -> Pipeline:
        trainer, settings = self.config.trainer, self.config.actor_rollout_ref
        flow = Flow(
            max_staleness=staleness_bound(trainer),
            n_lanes=len(self.workers.rollouts),
            capacity=len(self.workers.rollouts) * settings.rollout.max_num_seqs,
            answers_per_prompt=settings.rollout.n,
            requests_per_batch=settings.teacher.n_server_workers * settings.teacher.num_microbatches,
            inflight_update=trainer.inflight_update,
        )
        return Pipeline(
            self.loader.batches(self.progress.prompts_trained, first_step=self.progress.step),
            flow,
            generate=self.generate,
            score=self.score,
            sync=self.workers.weights.sync,
            replace=self.workers.replace_dead_rollouts,
            first_version=self.progress.step,
            timeline=timeline,
        )

    # ---- the stages

    async def generate(self, rank: int, prompts: Sequence[Prompt], step: int) -> AsyncIterator[list[Answer]]:
        """One rollout worker's share of a batch, as its answers finish."""
        async for answers in self.workers.rollouts.stream(
            rank,
            "generate",
            list(prompts),
            step,
            timeout_s=self.config.actor_rollout_ref.rollout.timeout_s + MARGIN_S,
            phase=f"generate, step {step}",
        ):
            yield answers

    async def score(self, group: Sequence[tuple[Prompt, Answer]]) -> list[Sample]:
        """Ask the teacher for its top-k at every response position; an empty answer has none, and is not asked for."""
        asked = [(prompt, answer) for prompt, answer in group if len(answer.ids)]
        sequences = [
            TeacherSequence(token_ids=np.concatenate([prompt.ids, answer.ids]), prompt_len=len(prompt.ids))
            for prompt, answer in asked
        ]
        opinions = {}
        if sequences:
            scores = await asyncio.wrap_future(self.teacher.submit(sequences))
            opinions = {
                answer.uid: TeacherTopK(
                    logps_TK=score.topk_logps_TK, ids_TK=score.topk_ids_TK, sampled_logps_T=score.sampled_logps_T
                )
                for (_, answer), score in zip(asked, scores, strict=True)
            }
        return [
            Sample(prompt=prompt, answer=answer, teacher=opinions.get(answer.uid) or TeacherTopK.empty())
            for prompt, answer in group
        ]

    async def update(self, batch: ReadyBatch) -> dict[str, float]:
        """One optimiser step on the whole batch; each data-parallel rank gets its share."""
        actors = self.workers.actors
        shards = [await asyncio.to_thread(ray.put, shard) for shard in shard_batch(batch.samples, self.workers.dp_size)]
        results = await actors.call_each(
            "update",
            [(shards[dp_rank], batch.step) for dp_rank in self.workers.dp_ranks],
            timeout_s=self.config.actor_rollout_ref.actor.timeout_s,
            phase=f"update, step {batch.step}",
        )
        return dict(results[0])

    async def save(self) -> None:
        """A complete checkpoint, or none; with ``async_save`` it is written while training goes on."""
        await self.finish_save()
        root = Path(self.config.trainer.default_local_dir).expanduser().absolute()
        self.saving, self.save_is_under_way = CheckpointWriter(root, self.progress), False
        checkpoint = self.config.actor_rollout_ref.actor.checkpoint
        await self.call_actors("save_checkpoint", str(self.saving.folder / "actor"))
        if "hf_model" in checkpoint.save_contents:
            await self.call_actors("save_hf", str(self.saving.folder / "huggingface"))
        self.save_is_under_way = True
        if not checkpoint.async_save:
            await self.finish_save()

    async def finish_save(self, wait: bool = True, timeout_s: float | None = None) -> None:
        """Complete the checkpoint that is being written, if there is one; without waiting, only if it is written."""
        if self.saving is not None and all(await self.call_actors("finish_saves", wait, timeout_s=timeout_s)):
            log.info("checkpoint of step %d: %s", self.saving.progress.step, self.saving.complete())
            self.saving = None

    # ---- bookkeeping

    async def call_actors(self, method: str, *args: object, timeout_s: float | None = None) -> list[Any]:
        timeout_s = timeout_s or self.config.actor_rollout_ref.actor.timeout_s
        phase = f"{method}, step {self.progress.step}"
        return await self.workers.actors.call(method, *args, timeout_s=timeout_s, phase=phase)

    def advance(self, batch: ReadyBatch) -> None:
        prompts = len(batch.samples) // self.config.actor_rollout_ref.rollout.n
        self.progress = replace(
            self.progress, step=self.progress.step + 1, prompts_trained=self.progress.prompts_trained + prompts
        )

    def save_is_due(self) -> bool:
        every, step = self.config.trainer.save_freq, self.progress.step
        return every > 0 and (step == self.last_step or step % every == 0)

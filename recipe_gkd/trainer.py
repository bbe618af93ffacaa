"""The training loop: ``Trainer.loop`` is the algorithm, ``schedule.Pipeline`` decides when its stages run."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from recipe_gkd.actor.microbatch import shard_batch
from recipe_gkd.checkpoints import CheckpointWriter, Progress
from recipe_gkd.config import Config
from recipe_gkd.data import PromptBatch, PromptLoader
from recipe_gkd.errors import GkdError
from recipe_gkd.metrics.batch import describe, host_memory_used_gb, span
from recipe_gkd.metrics.loggers import Loggers
from recipe_gkd.samples import Answer, Prompt, Sample, TeacherTopK
from recipe_gkd.schedule import MAX_STALENESS, Pipeline, ReadyBatch, group_size
from recipe_gkd.workers import Workers
from teacher.client import TeacherClient
from teacher.records import TeacherSequence

log = logging.getLogger(__name__)

MARGIN_S = 10.0
"""A worker's own deadline ends first: its error says more than that it did not answer."""


class Trainer:
    """Student answers; the teacher's top-k at every position of the answers; an update towards it; and again."""

    def __init__(
        self, config: Config, workers: Workers, teacher: TeacherClient, loader: PromptLoader, progress: Progress
    ) -> None:
        self.config, self.workers, self.teacher, self.loader = config, workers, teacher, loader
        self.progress = progress
        self.saving: CheckpointWriter | None = None
        self.last_step = loader.last_step(progress.prompts_trained, progress.step)

    async def fit(self) -> None:
        """Train to the last step. Raises whatever ended it early; complete checkpoints stay, half a one does not."""
        try:
            await self.loop()
            await self.finish_save()
        finally:
            if self.saving is not None:  # one that was being written in the background may be whole by now
                with suppress(GkdError):
                    await self.finish_save()
            if self.saving is not None:
                self.saving.discard()

    async def loop(self) -> None:
        """The algorithm."""
        step_began = time.monotonic()
        with Loggers(self.config.trainer, first_step=self.progress.step, last_step=self.last_step) as loggers:
            async with self.pipeline() as pipeline:
                async for batch in pipeline:
                    metrics = batch.metrics
                    async with pipeline.updating(batch):
                        with span(metrics, "timing/update_actor"):
                            metrics |= await self.update(batch)
                    self.advance(batch)
                    if self.saving or self.save_is_due():
                        async with pipeline.actor():
                            with span(metrics, "timing/save_checkpoint"):
                                await (self.save() if self.save_is_due() else self.finish_save(wait=False))
                    step_began = self.finish(batch, step_began)
                    loggers.log(metrics, self.progress.step)

    def pipeline(self) -> Pipeline:
        teacher = self.config.actor_rollout_ref.teacher
        return Pipeline(
            self.loader.batches(self.progress.prompts_trained, first_step=self.progress.step),
            generate=self.generate,
            score=self.score,
            sync=self.workers.weights.sync,
            max_staleness=MAX_STALENESS[self.config.trainer.scheduler],
            first_version=self.progress.step,
            score_group=lambda size: group_size(size, teacher.n_server_workers * teacher.num_microbatches),
        )

    # ---- the stages

    async def generate(self, batch: PromptBatch) -> AsyncIterator[list[Answer]]:
        """Deal the prompts round to the rollout workers, all answers to one prompt to the same; as they finish."""
        rollouts, settings = self.workers.rollouts, self.config.actor_rollout_ref.rollout
        groups = [batch.prompts[start : start + settings.n] for start in range(0, len(batch.prompts), settings.n)]
        shares = [list(itertools.chain(*groups[rank :: len(rollouts)])) for rank in range(len(rollouts))]
        async for answers in rollouts.stream_each(
            "generate",
            [(share, batch.step) for share in shares if share],
            timeout_s=settings.timeout_s + MARGIN_S,
            phase=f"generate, step {batch.step}",
        ):
            yield answers

    async def score(self, group: list[tuple[Prompt, Answer]]) -> list[Sample]:
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
        self.saving = CheckpointWriter(root, self.progress)
        checkpoint = self.config.actor_rollout_ref.actor.checkpoint
        await self.call_actors("save_checkpoint", str(self.saving.folder / "actor"))
        if "hf_model" in checkpoint.save_contents:
            await self.call_actors("save_hf", str(self.saving.folder / "huggingface"))
        if not checkpoint.async_save:
            await self.finish_save()

    async def finish_save(self, wait: bool = True) -> None:
        """Complete the checkpoint that is being written, if there is one; without waiting, only if it is written."""
        if self.saving is not None and all(await self.call_actors("finish_saves", wait)):
            log.info("checkpoint of step %d: %s", self.saving.progress.step, self.saving.complete())
            self.saving = None

    # ---- bookkeeping

    async def call_actors(self, method: str, *args: object) -> list[Any]:
        timeout_s, phase = self.config.actor_rollout_ref.actor.timeout_s, f"{method}, step {self.progress.step}"
        return await self.workers.actors.call(method, *args, timeout_s=timeout_s, phase=phase)

    def advance(self, batch: ReadyBatch) -> None:
        prompts = len(batch.samples) // self.config.actor_rollout_ref.rollout.n
        self.progress = replace(
            self.progress, step=self.progress.step + 1, prompts_trained=self.progress.prompts_trained + prompts
        )

    def save_is_due(self) -> bool:
        every, step = self.config.trainer.save_freq, self.progress.step
        return every > 0 and (step == self.last_step or step % every == 0)

    @staticmethod
    def finish(batch: ReadyBatch, step_began: float) -> float:
        """Complete the metrics of a step; returns when the next one began."""
        now = time.monotonic()
        batch.metrics.setdefault("timing/sync_rollout_weights", 0.0)
        batch.metrics |= describe(batch) | {
            "timing/step": now - step_began,
            "perf/cpu_memory_used_gb": host_memory_used_gb(),
        }
        batch.metrics["perf/tokens_per_second"] = batch.metrics["perf/total_num_tokens"] / (now - step_began)
        return now

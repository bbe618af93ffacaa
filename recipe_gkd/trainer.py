"""The training loop. ``Trainer.loop`` is the algorithm; ``recipe_gkd.pipeline`` decides when its stages run."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

from recipe_gkd.actor.objective.token_kl import TokenKl
from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.checkpoints.best import BestTracker
from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.checkpoints.saver import CheckpointSaver
from recipe_gkd.checkpoints.state import Progress, ResumeState
from recipe_gkd.cluster import Cluster
from recipe_gkd.config import Config
from recipe_gkd.config.conditions import saves_checkpoints
from recipe_gkd.config.objective import loss_name
from recipe_gkd.config.staleness import staleness_bound
from recipe_gkd.config.teachers import requests_per_batch
from recipe_gkd.config.timeouts import ACTOR_TIMEOUT, timeout_of
from recipe_gkd.data.batches import ReadyBatch
from recipe_gkd.data.prompts import PromptLoader
from recipe_gkd.data.samples import Prompt, Response, Reward, Sample
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import CheckpointError, ConversationError, GkdError, RewardError, WeightSyncError
from recipe_gkd.hybrid import open_devices
from recipe_gkd.hybrid.sync_probe import mismatch_guard
from recipe_gkd.metrics.conversations import conversation_metrics
from recipe_gkd.metrics.loggers.loggers import Loggers
from recipe_gkd.metrics.repetition import batch_repetition
from recipe_gkd.metrics.run_summary import RunSummary
from recipe_gkd.metrics.sample_record import SampleRecord
from recipe_gkd.metrics.steps import StepMetrics, span
from recipe_gkd.metrics.timeline import Timeline
from recipe_gkd.metrics.utilization import ActorUtilization
from recipe_gkd.pipeline.actor_lock import DRAIN_TIMEOUT_S, UpdateDropped
from recipe_gkd.pipeline.config import PipelineConfig
from recipe_gkd.pipeline.pipeline import Pipeline
from recipe_gkd.pipeline.stages import ComputeRewards, PipelineStages
from recipe_gkd.rewards import RewardItems, RewardScorer
from recipe_gkd.runtime.remote_group import R, Ts
from recipe_gkd.runtime.run_log import log_to_file
from recipe_gkd.runtime.stop_request import StopRequest
from recipe_gkd.runtime.threads import in_thread, start_in_thread
from recipe_gkd.teachers.router import Teachers
from recipe_gkd.teachers.routes import Routes
from recipe_gkd.teachers.scoring.setup import max_row_bytes
from recipe_gkd.validation.kl import KlStages, ResponseKl, measure_kl
from recipe_gkd.validation.validation import Validation
from teacher.errors import TeacherError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RewardContext:
    """The reward function, the data that it scores, and validation.

    Attributes:
        scorer: Processes that call the reward function. None without one.
        items: Source of the reward function's arguments for training responses. None if they get no rewards.
        validation: Periodic validation. None if the run does not validate.
    """

    scorer: RewardScorer | None = None
    items: RewardItems | None = None
    validation: Validation | None = None

    @property
    def compute_rewards(self) -> ComputeRewards | None:
        """Stage of the schedule that computes the rewards of training responses, if they get any."""
        if self.items is None or self.scorer is None:
            return None
        return partial(self._compute_rewards, self.items, self.scorer)

    @staticmethod
    async def _compute_rewards(
        items: RewardItems, scorer: RewardScorer, group: Sequence[tuple[Prompt, Response]]
    ) -> dict[int, Reward]:
        # Reference responses, and conversations that are not trained on, get no reward.
        sampled = [pair for pair in group if pair[0].reference_ids is None and not pair[1].is_left_out]
        described = await in_thread(lambda: [items.build_item(prompt, response) for prompt, response in sampled])
        rewards = zip([item.uid for item in described], await scorer.score(described), strict=True)
        return {uid: reward for uid, reward in rewards if reward is not None}


@dataclass(frozen=True)
class _Run:
    """Parts of a run that are open during the training loop."""

    pipeline: Pipeline
    loggers: Loggers
    steps: StepMetrics
    record: SampleRecord


def pipeline_config(config: Config, n_replicas: int, max_row_bytes: int | None = None) -> PipelineConfig:
    """Return the settings of the schedule.

    Args:
        max_row_bytes: Limit of the teachers' rows of batches that are not trained on yet. None: no limit.
    """
    settings = config.actor_rollout_ref
    return PipelineConfig(
        max_staleness=staleness_bound(config.trainer),
        n_replicas=n_replicas,
        capacity=n_replicas * settings.rollout.max_num_seqs,
        responses_per_prompt=settings.rollout.n,
        requests_per_batch=requests_per_batch(settings.teacher),
        inflight_update=config.trainer.inflight_update,
        on_request=settings.hybrid_engine or settings.teacher.sleep_between_batches,
        max_row_bytes=max_row_bytes,
    )


def progress_after(progress: Progress, batch: ReadyBatch, responses_per_prompt: int) -> Progress:
    """Return the position of the run after an update on ``batch``."""
    n_prompts = len({sample.prompt.uid // responses_per_prompt for sample in batch.samples})
    n_skipped = sum(sample.is_skipped for sample in batch.samples)
    return replace(
        progress,
        step=progress.step + 1,
        prompts_trained=progress.prompts_trained + n_prompts,
        skipped_samples=progress.skipped_samples + n_skipped,
    )


class Trainer:
    """Distillation of a teacher into the student.

    The student generates responses, the teacher scores them, and the student is trained toward the teacher's
    distribution at every position.

    Attributes:
        progress: Position of the run.
        summary: First and last metrics of the run. A restart of the actor ranks continues the same one.
        best: Best weights of the run.
        saver: Checkpoints of the run.
        last_step: Number of optimizer steps at the end of the run.
        failed_validations: Number of validations without a result.
        is_restarted: True if the actor ranks were started again in this process. Set it before :meth:`fit`.
    """

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        teachers: Teachers,
        loader: PromptLoader,
        start: ResumeState,
        reward_context: RewardContext | None = None,
    ) -> None:
        """Create a trainer.

        Args:
            cluster: Connected workers. The actors have loaded the weights of ``start``.
            teachers: Clients of the teachers.
            reward_context: Reward function and validation. None if the run has neither.
        """
        self.config, self.cluster, self.teachers, self.loader = config, cluster, teachers, loader
        self.start, self.reward_context = start, reward_context
        self.progress = start.progress
        self.summary = RunSummary(loss_name(config.gkd) or "loss")
        metric = config.trainer.best_metric
        validation = None if reward_context is None else reward_context.validation
        lower_is_better = validation is not None and metric in validation.kl_names
        self.best = BestTracker(metric, start.best, lower_is_better=lower_is_better)
        self.teachers.resume(start.progress.skipped_samples)
        self.mismatch = mismatch_guard(config, cluster)
        self.devices = open_devices(config, cluster, teachers, loader.data.ids, self.mismatch)
        self.root = folder_of(config.trainer).absolute()
        self.saver = CheckpointSaver(config, self.root, self.call_actors, best=start.best)
        self.failed_validations = 0
        self._is_stopping = self.is_restarted = False
        self.last_step = loader.last_step(self.progress.prompts_trained, self.progress.step)

    async def fit(self, stop: StopRequest | None = None) -> None:
        """Train to the last step, and complete the checkpoint of that step if one is due.

        Complete checkpoints are kept, even if the run fails. Incomplete ones are removed.

        Args:
            stop: Request to save between steps and to return. It is accepted if the run saves checkpoints.

        Raises:
            CheckpointError: More than ``trainer.save_failures_allowed`` saves failed, or the last one failed twice.
        """
        try:
            await self.loop(stop or StopRequest())
            await self.saver.finish_run(self.progress.step)
            self._log_summary()
        except BaseException as error:
            if self.cluster.conversations is not None:
                await self.cluster.conversations.close()
            await self.devices.close()
            await self.saver.give_up(workers_failed=await self.cluster.actor_is_lost(error))
            raise

    def _log_summary(self) -> None:
        try:
            summary = self.summary.render(saved=self.saver.newest, resumed_from=self.start.checkpoint)
            log.info("summary of this run:\n%s", summary)
        except OSError as error:
            log.warning("the training is complete, but its summary cannot be made: %s", error)

    async def loop(self, stop: StopRequest) -> None:
        """Train on every batch until a stop is requested; validate, save and log after it."""
        async with _open_run(self, stop) as run:
            await self._validate_before_training(run, stop)
            with suppress(UpdateDropped):
                async for batch in stop.until_requested(run.pipeline):
                    await self._train(run.pipeline, batch)
                    run.record.write(self.progress.step, batch.samples)
                    await self._validate_if_due(run.pipeline, batch, stop)
                    await self._save_if_due(run.pipeline, batch)
                    run.steps.log(run.loggers, batch, self.progress.step)
                    self.summary.observe(self.progress.step, batch.metrics)
            await self._save_after_stop(run.pipeline, stop)

    def pipeline(self, timeline: Timeline) -> Pipeline:
        """Return the schedule of the rest of the run. It has not started."""
        stages = PipelineStages(
            generate=self.generate,
            score=self.score,
            sync=self.devices.sync,
            compute_rewards=self.reward_context.compute_rewards if self.reward_context is not None else None,
            replace=self.cluster.replace_dead_rollouts,
        )
        batches = self.loader.batches(self.progress.prompts_trained, first_step=self.progress.step)
        limit = max_row_bytes(self.config, self.cluster.scoring)  # again after the actor ranks have moved
        config = pipeline_config(self.config, len(self.cluster.rollouts), limit)
        return Pipeline(batches, config, stages, first_version=self.progress.step, timeline=timeline)

    async def _train(self, pipeline: Pipeline, batch: ReadyBatch) -> None:
        batch.metrics |= self.teachers.step_metrics(batch.samples, batch.step, before=self.progress.skipped_samples)
        async with pipeline.actor_update(batch), self.devices.turn("update"):
            with span(batch.metrics, "timing/update_actor"):
                repetition = start_in_thread(batch_repetition, batch.samples)  # the driver is idle during the update
                batch.metrics |= conversation_metrics(batch.samples)
                batch.metrics |= await self.cluster.update(batch)
            repeated = await asyncio.wrap_future(repetition)
            batch.metrics |= repeated
            self.mismatch.observe_update(batch.step, batch.metrics)
            batch.metrics |= await self.devices.take_metrics()
            batch.metrics |= await self.cluster.metrics()
        self.advance(batch)

    async def _save_after_stop(self, pipeline: Pipeline, stop: StopRequest) -> None:
        """Save a checkpoint of the last step if a stop was requested, unless it has one, and complete it.

        This must not wait for loggers and for stages that do not end, which are closed after it.
        """
        self._is_stopping = stop.reason is not None
        if self.progress.step == self.last_step:
            stop.withdraw()
            return
        has_trained = self.progress.step > self.start.progress.step
        if self._is_stopping and has_trained:
            async with pipeline.actor_lock("save_checkpoint"):
                # A failed save is repeated below, with its best record: the tracker has dropped it.
                if not self._checkpoint_is_due() and self.saver.failed_step != self.progress.step:
                    await self.save()
                await self.saver.finish_run(self.progress.step)

    async def _validate_before_training(self, run: _Run, stop: StopRequest) -> None:
        if not self.config.trainer.val_before_train:
            return
        metrics = await self._validation_metrics(run.pipeline, stop)
        run.steps.log_validation(run.loggers, metrics, self.progress.step)
        self.summary.observe(self.progress.step, metrics)
        has_checkpoint = self.start.belongs_to_run(self.root)
        if best := self.best.observe(metrics, self.progress.step, has_checkpoint=has_checkpoint):
            try:
                self.saver.keep_best(best)
            except CheckpointError as error:
                log.warning("the initial weights are the best, but this cannot be recorded: %s", error)

    async def _validate_if_due(self, pipeline: Pipeline, batch: ReadyBatch, stop: StopRequest) -> None:
        if self._is_due(self.config.trainer.test_freq):
            with span(batch.metrics, "timing/validate"):
                batch.metrics |= await self._validation_metrics(pipeline, stop)
            self.best.observe(batch.metrics, self.progress.step)
        if self.reward_context is not None and self.reward_context.scorer is not None:
            batch.metrics["reward/failures"] = float(self.reward_context.scorer.failures)

    async def _validation_metrics(self, pipeline: Pipeline, stop: StopRequest) -> dict[str, float]:
        """Validate, unless a stop is requested, which cancels the validation. A failed one is a warning.

        Returns:
            Metrics of the validation, and the number of failed ones so far.
        """
        step = self.progress.step
        try:
            metrics = await stop.unless_requested(self.validate(pipeline), timeout_s=DRAIN_TIMEOUT_S)
        except Exception as error:
            if await self._ends_run(error):
                raise
            self.failed_validations += 1
            known = as_known_error(error, f"validation after step {step}")
            log_to_file(f"the validation after step {step} failed", error)
            log.warning("the validation after step %d failed, and the training continues: %s", step, known)
            metrics = {}
        if metrics is None:
            log.warning("%s: the validation after step %d is left out", stop.reason, step)
            metrics = {}
        return metrics | {"training/failed_validations": float(self.failed_validations)}

    async def _ends_run(self, error: Exception) -> bool:
        """Return True for an error of a validation that ends the run.

        These are failures of what the training needs too, and of a reward function or an environment whose failures end
        the run.
        """
        return isinstance(error, WeightSyncError | RewardError | ConversationError) or await self.cluster.actor_is_lost(
            error
        )

    async def _save_if_due(self, pipeline: Pipeline, batch: ReadyBatch) -> None:
        """Save a checkpoint if one is due. Otherwise complete the pending background save if it is written."""
        is_due = self._checkpoint_is_due()
        if not is_due and not self.saver.is_pending:
            return
        async with pipeline.actor_lock("save_checkpoint", batch):
            with span(batch.metrics, "timing/save_checkpoint"):
                await (self.save() if is_due else self.saver.finish(wait=False))
        batch.metrics["checkpoint/failed_saves"] = float(self.saver.failed_saves)
        self.best.current = self.saver.best_of(self.best.current)

    def _checkpoint_is_due(self) -> bool:
        return self._is_due(self.config.trainer.save_freq) or self.best.is_best(self.progress.step)

    async def save(self) -> None:
        """Save a checkpoint of this step, in the background with ``async_save``. A failed save is counted."""
        best = self.best.current if self.best.is_best(self.progress.step) else None
        await self.saver.save(self.progress, best)

    def advance(self, batch: ReadyBatch) -> None:
        """Count ``batch`` as trained on."""
        self.progress = progress_after(self.progress, batch, self.config.actor_rollout_ref.rollout.n)

    def _is_due(self, interval: int) -> bool:
        """Return True at multiples of ``interval`` and at the last step. An ``interval`` below 1 disables it."""
        step = self.progress.step
        return interval > 0 and (step == self.last_step or step % interval == 0)

    async def generate(self, rank: int, prompts: Sequence[Prompt], step: int) -> AsyncIterator[list[Response]]:
        """Yield the responses of one rollout worker; see :meth:`Cluster.generate`."""
        async with self.devices.turn("generate"):
            async for responses in self.cluster.generate(self.loader.data, rank, prompts, step):
                yield responses
        self.devices.prepare_update()

    async def score(self, group: Sequence[tuple[Prompt, Response]], step: int) -> list[Sample]:
        """Return the samples of a group of responses; see :meth:`~recipe_gkd.teachers.router.Teachers.score`."""
        async with self.devices.turn("score"):
            return await self.teachers.score(group, step)

    async def validate(self, pipeline: Pipeline) -> dict[str, float]:
        """Validate the actor's current weights. Generation for training continues while responses are scored."""
        assert self.reward_context is not None and self.reward_context.validation is not None  # ensured by the config
        validation, scorer = self.reward_context.validation, self.reward_context.scorer

        async def generate(rank: int, prompts: Sequence[Prompt], step: int) -> AsyncIterator[list[Response]]:
            async with self.devices.turn("generate"):
                data, timeout_s = validation.data, validation.timeout_s
                async for responses in self.cluster.generate_for_validation(data, timeout_s, rank, prompts, step):
                    yield responses

        try:
            responses = await pipeline.generate_for_validation(
                validation.prompts, generate, responses_per_prompt=validation.n
            )
        finally:
            if self.cluster.conversations is not None:  # of a failed validation, some may wait for a new worker
                await self.cluster.conversations.close("validation")
        kl = None
        if validation.routes is not None:
            kl = await self._validation_kl(pipeline, validation.routes, validation.pairs(responses))
        return await validation.report(responses, scorer, self.progress.step, kl)

    async def _validation_kl(
        self, pipeline: Pipeline, routes: Routes, pairs: Sequence[tuple[Prompt, Response]]
    ) -> ResponseKl:
        """Return the KL divergences of validation responses; they need the teacher, and then the actor."""
        config, step, teachers = self.config, self.progress.step, self.teachers.for_data(routes)

        async def score(group: Sequence[tuple[Prompt, Response]]) -> list[Sample]:
            async with self.devices.turn("score"):
                return await teachers.score(group, step)

        async def token_kl(samples: Sequence[Sample]) -> list[TokenKl]:
            async with pipeline.actor_lock("validate", may_fail=True), self.devices.turn("update"):
                return await self.cluster.token_kl(samples, step)

        settings = config.actor_rollout_ref
        batch_size = config.data.train_batch_size * settings.rollout.n
        return await measure_kl(
            pairs,
            KlStages(score=score, token_kl=token_kl),
            group_size=math.ceil(batch_size / requests_per_batch(settings.teacher)),
            # A teacher that shares its devices with the actor is woken once.
            chunk_size=len(pairs) if settings.teacher.sleep_between_batches else batch_size,
        )

    async def call_actors(
        self, method: Callable[[ActorWorker, *Ts], R], *args: *Ts, timeout_s: float | None = None
    ) -> list[R]:
        """Call a method on every actor rank and return the results in the order of the ranks."""
        timeout_s = timeout_s or timeout_of(self.config, ACTOR_TIMEOUT)
        phase = f"{method.__name__}, step {self.progress.step}"
        needs_states = method.__name__ != ActorWorker.finish_saves.__name__
        async with self._turn_for_save() if needs_states else nullcontext():
            return await self.cluster.actors.call(method, *args, timeout_s=timeout_s, phase=phase)

    @asynccontextmanager
    async def _turn_for_save(self) -> AsyncIterator[None]:
        """Use the devices for the actor. After a stop, a rollout engine or teacher that fails to leave is a warning."""
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self.devices.turn("update"))
            except (GkdError, TeacherError) as error:
                if not self._is_stopping or await self.cluster.actor_is_lost(error):
                    raise
                log.warning("the checkpoint is saved although the devices could not be prepared: %s", error)
            yield


@asynccontextmanager
async def _open_run(trainer: Trainer, stop: StopRequest) -> AsyncIterator[_Run]:
    """Open loggers and metrics, start the schedule and accept a stop; close them in the reverse order."""
    cluster, progress = trainer.cluster, trainer.progress
    loggers = Loggers(
        trainer.config.trainer,
        completed_steps=progress.step,
        last_step=trainer.last_step,
        may_fail=trainer.is_restarted,
        loss_name=loss_name(trainer.config.gkd) or "loss",
    )
    context = trainer.reward_context
    validation = None if context is None else context.validation
    async with AsyncExitStack() as files:
        await files.enter_async_context(loggers)
        if validation is not None:
            files.push_async_callback(validation.close)
        utilization = ActorUtilization.of(trainer.config, cluster.actor_devices)
        with (
            StepMetrics(
                trainer.config, n_rollouts=len(cluster.rollouts), capacity=cluster.capacity, utilization=utilization
            ) as steps,
            SampleRecord(trainer.root, progress.step, trainer.config.actor_rollout_ref.rollout.n) as record,
        ):
            async with trainer.pipeline(steps.timeline) as pipeline:
                if cluster.conversations is not None:
                    cluster.conversations.on_outside = pipeline.add_outside
                with stop.accepted(pipeline.drop) if saves_checkpoints(trainer.config) else nullcontext():
                    yield _Run(pipeline, loggers, steps, record)

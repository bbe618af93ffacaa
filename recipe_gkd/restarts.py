"""The training loop of a run, which begins again with the newest checkpoint if actor ranks are lost."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.checkpoints.newest import newest_complete
from recipe_gkd.checkpoints.resume import ResumePoint, load_first_usable, resume_points
from recipe_gkd.checkpoints.run_folder import RunFolder, folder_of
from recipe_gkd.checkpoints.state import Progress, ResumeState
from recipe_gkd.checkpoints.store import forget_best, read_best
from recipe_gkd.cluster import Cluster
from recipe_gkd.cluster_start import start_cluster
from recipe_gkd.config import Config
from recipe_gkd.config.conditions import saves_checkpoints
from recipe_gkd.config.objective import loss_name
from recipe_gkd.config.timeouts import ACTOR_TIMEOUT, timeout_of
from recipe_gkd.conversations.stage import ConversationStage
from recipe_gkd.data.prompts import PromptLoader
from recipe_gkd.errors import GkdError
from recipe_gkd.hybrid import teacher_asleep
from recipe_gkd.metrics.run_summary import RunSummary
from recipe_gkd.ray_cluster.connection import choose_device
from recipe_gkd.runtime.run_log import FILE_ONLY, FROM_MODEL_FOLDER, RESUMED, as_event
from recipe_gkd.runtime.stop_request import StopRequest
from recipe_gkd.teachers.router import Teachers
from recipe_gkd.trainer import RewardContext, Trainer

log = logging.getLogger("recipe_gkd")


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Inputs of a training that were validated before any worker starts.

    Attributes:
        points: Checkpoints that the run may resume from, in the order of preference. Empty for a new run.
        fresh: Progress of a new run on these data.
        stop_token_ids: Ids at which the teachers end a turn.
        n_tokens: Number of ids of the student's tokenizer.
        conversations: Conversations of several turns. None: a response is one turn.
    """

    loader: PromptLoader
    points: Sequence[ResumePoint]
    fresh: Progress
    stop_token_ids: Sequence[int]
    n_tokens: int
    conversations: ConversationStage | None = None

    @property
    def progress(self) -> Progress:
        """Progress at the start of the run if its preferred checkpoint can be loaded."""
        return self.points[0].progress if self.points else self.fresh

    def last_step(self, progress: Progress) -> int:
        """Return the number of optimizer steps at the end of a run that continues from ``progress``."""
        return self.loader.last_step(progress.prompts_trained, progress.step)


async def train(
    config: Config,
    plan: TrainingPlan,
    teachers: Teachers,
    reward_context: RewardContext,
    folder: RunFolder,
    stop: StopRequest,
) -> None:
    """Start the workers, and train."""
    # Cluster may have another working directory.
    config = replace(config, trainer=replace(config.trainer, default_local_dir=str(folder.path.absolute())))
    async with (
        teacher_asleep(config, teachers),
        start_cluster(
            config,
            choose_device(config.trainer.device),
            total_steps=plan.last_step(plan.progress),
            stop_token_ids=plan.stop_token_ids,
            n_tokens=plan.n_tokens,
            teacher_specs=teachers.client_specs(),
            caches=teachers.caches,
        ) as cluster,
    ):
        if cluster.scoring is not None:
            teachers.requests = cluster.scoring
        cluster.conversations = plan.conversations
        folder.accept()
        await train_with_restarts(config, cluster, plan, teachers, reward_context, folder, stop)


async def train_with_restarts(
    config: Config,
    cluster: Cluster,
    plan: TrainingPlan,
    teachers: Teachers,
    reward_context: RewardContext,
    folder: RunFolder,
    stop: StopRequest,
) -> None:
    """Resume from the first checkpoint of the plan that the workers can load, and train.

    If an actor rank is lost, all of them are started again, and the run continues from its newest checkpoint.
    """
    points, trainer, is_restarted = plan.points, None, False
    summary = RunSummary(loss_name(config.gkd) or "loss")
    while True:
        try:
            start = await load_weights(config, cluster, plan, points)
            folder.begin_training()
            trainer = Trainer(config, cluster, teachers, plan.loader, start, reward_context)
            trainer.is_restarted, trainer.summary = is_restarted, summary
            return await trainer.fit(stop)
        except GkdError as error:
            if stop.reason is not None:
                newest = None if trainer is None else trainer.saver.newest or trainer.start.checkpoint
                await _end_without_actors(error, cluster, stop, newest)
                return None
            with stop.accepted() if saves_checkpoints(config) else nullcontext():
                await stop.unless_requested(cluster.restart_actors(error))
        if stop.reason is not None:
            return None  # the newest checkpoint is all that can be saved
        if trainer is not None and trainer.saver.newest is not None:
            points = newest_point(config, trainer.saver.newest, plan)
        trainer, is_restarted = None, True
        gc.collect()  # cycles of the error and its frames, which refer to rows in the object stores
        log.warning("the actor ranks were started again; steps after the newest checkpoint are repeated")


async def _end_without_actors(error: GkdError, cluster: Cluster, stop: StopRequest, newest: Path | None) -> None:
    """Return if the run ends as requested although an actor rank was lost, because an earlier checkpoint exists.

    Args:
        newest: Checkpoint that the run has saved last, or has resumed from.

    Raises:
        GkdError: ``error``, if no rank was lost or there is no checkpoint.
    """
    if newest is None or not await cluster.actor_is_lost(error):
        raise error
    log.warning(
        "an actor rank was lost after %s: %s\nthe newest checkpoint is %s; later steps will be repeated",
        stop.reason, error, newest,
    )  # fmt: skip


def newest_point(config: Config, checkpoint: Path, plan: TrainingPlan) -> list[ResumePoint]:
    """Return the newest complete checkpoint in a list; a background save may have finished after ``checkpoint``."""
    checkpoint = newest_complete(checkpoint.parent).folder or checkpoint
    trainer = replace(config.trainer, resume_mode="resume_path", resume_from_path=str(checkpoint))
    return resume_points(replace(config, trainer=trainer), plan.fresh)


async def load_weights(
    config: Config, cluster: Cluster, plan: TrainingPlan, points: Sequence[ResumePoint]
) -> ResumeState:
    """Load the first checkpoint that the actors can load. Without one, the run starts from the model folder."""
    root = folder_of(config.trainer)
    timeout_s = timeout_of(config, ACTOR_TIMEOUT)

    async def load(path: str) -> None:
        await cluster.actors.call(ActorWorker.load_checkpoint, path, timeout_s=timeout_s, phase="load_checkpoint")

    if points:
        point = await load_first_usable(points, load, may_skip=config.trainer.resume_mode == "auto")
        log.info("%s %s", RESUMED, point.folder, extra=as_event("load", step=point.progress.step))
        best = read_best(root, config.trainer.best_metric, until=point.progress.step)
        start = ResumeState(point.progress, point.folder, best)
    else:
        log.info(FROM_MODEL_FOLDER, extra=FILE_ONLY | as_event("load", step=0))
        forget_best(root)
        start = ResumeState(plan.fresh)
    if (total_steps := plan.last_step(start.progress)) != plan.last_step(plan.progress):  # not the planned checkpoint
        await cluster.actors.call(ActorWorker.set_total_steps, total_steps, timeout_s=timeout_s, phase="resume")
    return start

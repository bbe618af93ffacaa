"""The training command: compose the configuration, validate it, start Ray and the workers, and train.

python -m recipe_gkd.main_gkd --config-name on_policy_distill_trainer key=value ...
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf

from recipe_gkd.actor.ray_worker import ActorWorker
from recipe_gkd.checkpoints.folders import recover
from recipe_gkd.checkpoints.model_identity import identify_model
from recipe_gkd.checkpoints.newest import newest_complete
from recipe_gkd.checkpoints.resume import ResumePoint, load_first_usable, resume_points
from recipe_gkd.checkpoints.resume_hint import resume_hint
from recipe_gkd.checkpoints.run_folder import CONFIG, LOG, RunFolder, folder_of, run_folder
from recipe_gkd.checkpoints.state import Progress, ResumeState
from recipe_gkd.checkpoints.store import forget_best, read_best
from recipe_gkd.cluster import Cluster
from recipe_gkd.cluster_start import start_cluster
from recipe_gkd.commands.arguments import config_parser
from recipe_gkd.config import Config
from recipe_gkd.config.conditions import failure_mode, needs_rewards, saves_checkpoints, trains_on_rewards
from recipe_gkd.config.durations import duration_s
from recipe_gkd.config.load import read_config
from recipe_gkd.config.stored import report_changes, stored_config
from recipe_gkd.config.timeouts import ACTOR_TIMEOUT, timeout_of
from recipe_gkd.conversations.context import ConversationContext
from recipe_gkd.conversations.pool import EnvironmentPool
from recipe_gkd.conversations.setup import check_turns, open_environments
from recipe_gkd.conversations.stage import ConversationStage
from recipe_gkd.data.prompts import PromptData, PromptLoader
from recipe_gkd.data.rows import TRAINING, read_data_set
from recipe_gkd.diagnostics.exit_messages import leave_dead_streams, report_error, report_saved_stop, report_stop
from recipe_gkd.errors import DataError, GkdError
from recipe_gkd.hybrid import teacher_asleep
from recipe_gkd.metrics.loggers.logger_checks import check_loggers
from recipe_gkd.metrics.loggers.prometheus_logger import check_metrics_port
from recipe_gkd.metrics.run_events import RunEvents
from recipe_gkd.model_files import Student
from recipe_gkd.preflight import (
    check_recorded_prompts,
    check_teachers,
    read_prompts,
    read_student,
    read_teacher_prompts,
    with_model_path,
)
from recipe_gkd.ray_cluster.connection import choose_device, connected_cluster
from recipe_gkd.rewards import RewardItems, RewardScorer
from recipe_gkd.rewards.items import TruthUse
from recipe_gkd.runtime.closed_output import until_closed
from recipe_gkd.runtime.durable_files import write_durably
from recipe_gkd.runtime.run_log import FILE_ONLY, as_event, log_background_error, start_logging
from recipe_gkd.runtime.signals import Terminated, hangup_ignored, raise_on_signals, run_until_terminated
from recipe_gkd.runtime.stop_request import StopRequest
from recipe_gkd.runtime.threads import run_until
from recipe_gkd.runtime.wait_log import waiting_for
from recipe_gkd.teachers.cache.setup import open_caches
from recipe_gkd.teachers.router import Teachers, open_teachers
from recipe_gkd.teachers.routes import read_routes
from recipe_gkd.teachers.worker_count import with_worker_count
from recipe_gkd.trainer import RewardContext, Trainer
from recipe_gkd.validation.validation import read_validation

log = logging.getLogger("recipe_gkd")

LAST_RECOVERY_S = 10.0
"""Deadline for the removal of incomplete saves at the end of a run."""


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the training command.

    Returns:
        Exit status: 0 if the training is complete, 1 after an error, 75 if it was saved between steps after SIGTERM,
        SIGUSR1, SIGHUP or ``trainer.save_before``. 128 + the number of the signal if a signal ended it at once.
    """
    try:
        return _run_command(argv)
    finally:
        leave_dead_streams()


def _run_command(argv: Sequence[str] | None) -> int:
    arguments = _parse(argv)
    hint: Callable[[], str] = str
    folder: RunFolder | None = None
    try:
        loaded = read_config(arguments.config_name, arguments.overrides, arguments.config_dir)
        if arguments.cfg:
            for text in loaded.warnings:
                print(f"warning: {text}", file=sys.stderr)
            with until_closed():
                print(OmegaConf.to_yaml(loaded.composed))
            return 0
        with run_folder(loaded.config) as folder:
            start_logging(folder.path / LOG)
            for text in loaded.warnings:
                log.warning("%s", text)
            raise_on_signals()
            hint = partial(resume_hint, loaded.config.trainer, sys.argv[1:] if argv is None else argv)
            with RunEvents(folder.path) as events:
                stopped_by = events.stopped_by = run(loaded.config, stored_config(loaded.composed), folder)
    except Exception as error:  # noqa: BLE001 - the only handler that reports errors to the user
        return report_error(error, hint() if folder is not None and folder.is_accepted else "")
    except KeyboardInterrupt:
        return report_stop("interrupted", signal.SIGINT, hint())
    except Terminated as stop:
        return report_stop("terminated", stop.number, hint())
    return 0 if stopped_by is None else report_saved_stop(stopped_by, hint())


def run(config: Config, stored: str, folder: RunFolder) -> str | None:
    """Validate everything that needs no worker first, so that mistakes fail fast. Then start Ray and train.

    Args:
        stored: The configuration as YAML, which is written to the run folder.
        folder: Locked run folder.

    Returns:
        Cause of the end before the last step, such as ``"SIGTERM"``. None if the training is complete.
    """
    check_metrics_port(config.trainer.metrics_port)
    check_loggers(config.trainer.logger)
    with waiting_for("start, read the student's files", None, config.actor_rollout_ref.model.path):
        student = read_student(config)
    config = with_model_path(config, student.path)
    with waiting_for("start, read the data", None, "data.train_files"):
        data_set = read_data_set(config.data.train_files, config.data, TRAINING, config.data.train_max_samples)
    routes = read_routes(data_set, config)
    with open_teachers(config, routes) as teachers, ExitStack() as opened:
        environments = opened.enter_context(open_environments(config, data_set))
        log.info("student %s: %d ids, output layer of %d", student.path, student.n_tokens, student.vocab_size)
        with waiting_for("start, check the teachers", None, ", ".join(teachers.sources)):
            stop_token_ids = check_teachers(teachers.sources, student, config)
            teachers.use_caches(open_caches(config, teachers.clients))
        config = with_worker_count(config, teachers.clients)
        with waiting_for("start, tokenize the data", None, "the tokenizer"):
            data = read_prompts(config, data_set, student, stop_token_ids)
            read_teacher_prompts(config, data, routes, teachers.clients, student)
            check_recorded_prompts(teachers.recorded_references, data)
        scorer = opened.enter_context(_open_scorer(config))
        truth_use: TruthUse = "unused" if scorer is None else scorer.truth_use
        validation = read_validation(config, student.tokenizer, truth_use=truth_use, tools=data_set.default_tools)
        if validation is not None and validation.routes is not None:
            of_validation = teachers.for_data(validation.routes)
            read_teacher_prompts(config, validation.data, validation.routes, of_validation.clients, student)
        recover(folder.path)
        with waiting_for("start, read the model's weight files and the checkpoints", None, str(student.path)):
            plan = _plan_training(config, data, student, stop_token_ids, environments)
        last_step = plan.last_step(plan.progress)
        if plan.progress.step == last_step:
            log.info("%s: step %d is done, and there is nothing left to train", plan.points[0].folder, last_step)
            report_changes(folder.path / CONFIG, stored, "was trained")
            return None
        if plan.progress.step:
            report_changes(folder.path / CONFIG, stored, "was trained so far")
        log.info("%d prompts, steps %d to %d", len(data), plan.progress.step + 1, last_step)
        reward_context = RewardContext(scorer, _reward_items(config, data, student, scorer), validation)
        write_durably(folder.path / CONFIG, stored)
        with hangup_ignored():
            opened.enter_context(connected_cluster(config))
        raise_on_signals()  # again, because Ray sets its own handler
        save_before = config.trainer.save_before
        stop = StopRequest(None if save_before is None else duration_s(save_before))
        training = _train(config, plan, teachers, reward_context, folder, stop)
        try:
            asyncio.run(run_until_terminated(training, log_background_error, stop))
        finally:
            _recover_at_the_end(folder.path)
        return stop.reason


def _plan_training(
    config: Config,
    data: PromptData,
    student: Student,
    stop_token_ids: Sequence[int],
    environments: EnvironmentPool | None,
) -> TrainingPlan:
    check_turns(config, data, student.tokenizer)
    loader = PromptLoader(
        data,
        config.data,
        n=config.actor_rollout_ref.rollout.n,
        epochs=config.trainer.total_epochs,
        max_steps=config.trainer.total_training_steps,
        sft_share=config.gkd.sft_share,
        warmup_steps=config.gkd.warmup_steps,
    )
    fresh = Progress(
        step=0,
        prompts_trained=0,
        n_prompts=len(data),
        data_seed=config.data.seed,
        shuffle=config.data.shuffle,
        data_fingerprint=data.fingerprint,
        references_fingerprint=data.references_fingerprint,
        teacher_prompts_fingerprint=data.teacher_prompts_fingerprint,
        model=identify_model(student.path, student.fingerprint),
    )
    return TrainingPlan(
        loader=loader,
        points=resume_points(config, fresh),
        fresh=fresh,
        stop_token_ids=stop_token_ids,
        n_tokens=student.n_tokens,
        conversations=None
        if environments is None
        else ConversationStage(ConversationContext(config, student.tokenizer, environments)),
    )


def _recover_at_the_end(root: Path) -> None:
    """Remove incomplete saves of actors that were ended. Never raises an error, so that the run's error is kept."""

    def attempt() -> bool:
        try:
            recover(root)
        except OSError as error:
            log.warning("incomplete saves may be left in %s: %s; the next run removes them", root, error)
        return True

    if run_until(time.monotonic() + LAST_RECOVERY_S, [attempt]) != [True]:
        log.warning(
            "the disk of %s did not answer within %g s; incomplete saves may be left there, and the next run removes "
            "them",
            root,
            LAST_RECOVERY_S,
        )


def _open_scorer(config: Config) -> AbstractContextManager[RewardScorer | None]:
    """Start the processes of the reward functions, if anything needs rewards."""
    if not needs_rewards(config):
        return nullcontext()
    with waiting_for("start, load the reward functions", None, "custom_reward_function.path"):
        return RewardScorer(replace(config.custom_reward_function, on_failure=failure_mode(config)))


def _reward_items(
    config: Config, data: PromptData, student: Student, scorer: RewardScorer | None
) -> RewardItems | None:
    """Return the source of the reward function's arguments for training responses, None if they get no rewards.

    They get rewards if a loss needs them. Otherwise rewards are only measured, if the configuration allows it.

    Raises:
        DataError: The data has no ground truth, but a function needs it.
    """
    if scorer is None or not trains_on_rewards(config):
        return None
    is_required, use = config.gkd.use_rl_loss, scorer.truth_use
    try:
        return RewardItems(
            data,
            config.data,
            student.tokenizer,
            require_truth=is_required,
            truth_use=use,
            skip_special_tokens=config.custom_reward_function.skip_special_tokens,
        )
    except DataError as error:
        if config.gkd.use_rl_loss:
            raise
        hint = (
            "if the training data has none, set custom_reward_function.on_training=false: then only validation "
            "responses are scored"
        )
        raise error.replaced(details=(*error.details, hint)) from error


async def _train(
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
        await _train_with_restarts(config, cluster, plan, teachers, reward_context, stop)


async def _train_with_restarts(
    config: Config,
    cluster: Cluster,
    plan: TrainingPlan,
    teachers: Teachers,
    reward_context: RewardContext,
    stop: StopRequest,
) -> None:
    """Resume from the first checkpoint of the plan that the workers can load, and train.

    If an actor rank is lost, all of them are started again, and the run continues from its newest checkpoint.
    """
    points, trainer, is_restarted = plan.points, None, False
    while True:
        try:
            start = await _load(config, cluster, plan, points)
            trainer = Trainer(config, cluster, teachers, plan.loader, start, reward_context)
            trainer.is_restarted = is_restarted
            return await trainer.fit(stop)
        except GkdError as error:
            if stop.reason is not None:
                await _end_without_actors(error, config, cluster, stop)
                return None
            with stop.accepted() if saves_checkpoints(config) else nullcontext():
                await stop.unless_requested(cluster.restart_actors(error))
        if stop.reason is not None:
            return None  # the newest checkpoint is all that can be saved
        if trainer is not None and trainer.saver.newest is not None:
            points = _newest_point(config, trainer.saver.newest, plan)
        trainer, is_restarted = None, True
        gc.collect()  # cycles of the error and its frames, which refer to rows in the object stores
        log.warning("the actor ranks were started again; steps after the newest checkpoint are repeated")


async def _end_without_actors(error: GkdError, config: Config, cluster: Cluster, stop: StopRequest) -> None:
    """Return if the run ends as requested although an actor rank was lost, because an earlier checkpoint exists.

    Raises:
        GkdError: ``error``, if no rank was lost or there is no checkpoint.
    """
    newest = newest_complete(folder_of(config.trainer)).folder
    if newest is None or not await cluster.actor_is_lost(error):
        raise error
    log.warning(
        "an actor rank was lost after %s: %s\nthe newest checkpoint is %s; later steps will be repeated",
        stop.reason, error, newest,
    )  # fmt: skip


def _newest_point(config: Config, checkpoint: Path, plan: TrainingPlan) -> list[ResumePoint]:
    """Return the newest complete checkpoint in a list; a background save may have finished after ``checkpoint``."""
    checkpoint = newest_complete(checkpoint.parent).folder or checkpoint
    trainer = replace(config.trainer, resume_mode="resume_path", resume_from_path=str(checkpoint))
    return resume_points(replace(config, trainer=trainer), plan.fresh)


async def _load(config: Config, cluster: Cluster, plan: TrainingPlan, points: Sequence[ResumePoint]) -> ResumeState:
    """Load the first checkpoint that the actors can load. Without one, the run starts from the model folder."""
    root = folder_of(config.trainer)
    timeout_s = timeout_of(config, ACTOR_TIMEOUT)

    async def load(path: str) -> None:
        await cluster.actors.call(ActorWorker.load_checkpoint, path, timeout_s=timeout_s, phase="load_checkpoint")

    if points:
        point = await load_first_usable(points, load, may_skip=config.trainer.resume_mode == "auto")
        log.info("resumed from %s", point.folder, extra=as_event("load", step=point.progress.step))
        best = read_best(root, config.trainer.best_metric, until=point.progress.step)
        start = ResumeState(point.progress, point.folder, best)
    else:
        log.info("the weights come from the model folder", extra=FILE_ONLY | as_event("load", step=0))
        forget_best(root)
        start = ResumeState(plan.fresh)
    if (total_steps := plan.last_step(start.progress)) != plan.last_step(plan.progress):  # not the planned checkpoint
        await cluster.actors.call(ActorWorker.set_total_steps, total_steps, timeout_s=timeout_s, phase="resume")
    return start


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = config_parser("main_gkd", __doc__)
    parser.add_argument("--cfg", choices=["job"], help="validate the composed configuration, print it and exit")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    sys.exit(main())

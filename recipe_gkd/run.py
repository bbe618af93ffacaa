"""A run: validate everything that needs no worker, start Ray, and train."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

from recipe_gkd.checkpoints.folders import recover
from recipe_gkd.checkpoints.model_identity import identify_model
from recipe_gkd.checkpoints.resume import resume_points
from recipe_gkd.checkpoints.run_folder import CONFIG, RunFolder
from recipe_gkd.checkpoints.state import Progress
from recipe_gkd.config import Config
from recipe_gkd.config.conditions import failure_mode, needs_rewards, trains_on_rewards
from recipe_gkd.config.data_types import conversion_warnings, slow_type_advice, with_data_types
from recipe_gkd.config.durations import duration_s
from recipe_gkd.config.stored import report_changes, stored_types, with_chosen_types
from recipe_gkd.conversations.context import ConversationContext
from recipe_gkd.conversations.pool import EnvironmentPool
from recipe_gkd.conversations.setup import check_turns, open_environments
from recipe_gkd.conversations.stage import ConversationStage
from recipe_gkd.data.prompts import PromptData, PromptLoader
from recipe_gkd.data.rows import TRAINING, read_data_set
from recipe_gkd.errors import DataError
from recipe_gkd.metrics.loggers.logger_checks import check_loggers
from recipe_gkd.metrics.loggers.prometheus_logger import check_metrics_port
from recipe_gkd.model_files import Student
from recipe_gkd.preflight import (
    check_recorded_prompts,
    check_teachers,
    find_stop_ids,
    read_prompts,
    read_student,
    read_teacher_prompts,
    with_model_path,
)
from recipe_gkd.ray_cluster.connection import choose_device, connected_cluster
from recipe_gkd.restarts import TrainingPlan, train
from recipe_gkd.rewards import RewardItems, RewardScorer
from recipe_gkd.rewards.items import TruthUse
from recipe_gkd.runtime.run_log import log_background_error
from recipe_gkd.runtime.signals import exit_as_termination, hangup_ignored, raise_on_signals, run_until_terminated
from recipe_gkd.runtime.stop_request import StopRequest
from recipe_gkd.runtime.threads import run_until
from recipe_gkd.runtime.wait_log import waiting_for
from recipe_gkd.teachers.cache.setup import open_caches
from recipe_gkd.teachers.router import Teachers, open_teachers
from recipe_gkd.teachers.routes import read_routes
from recipe_gkd.teachers.worker_count import with_worker_count
from recipe_gkd.trainer import RewardContext
from recipe_gkd.validation.validation import Validation, read_validation

log = logging.getLogger("recipe_gkd")

LAST_RECOVERY_S = 10.0
"""Deadline for the removal of incomplete saves at the end of a run."""


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
        if validation is not None:
            _prepare_validation(config, validation, teachers, student)
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
        with hangup_ignored(), exit_as_termination():
            opened.enter_context(connected_cluster(config))
            raise_on_signals()  # again, because Ray sets its own handler, which exits
        config = _choose_data_types(config, folder if plan.progress.step else None)
        folder.store_config(with_chosen_types(stored, config))
        save_before = config.trainer.save_before
        stop = StopRequest(None if save_before is None else duration_s(save_before))
        training = train(config, plan, teachers, reward_context, folder, stop)
        try:
            asyncio.run(run_until_terminated(training, log_background_error, stop))
        finally:
            _recover_at_the_end(folder.path)
        return stop.reason


def _choose_data_types(config: Config, resumed: RunFolder | None) -> Config:
    """Return the configuration with a data type in each place of ``auto``: of the resumed run, or for the devices."""
    device = choose_device(config.trainer.device)
    config = with_data_types(config, device, {} if resumed is None else stored_types(resumed.path / CONFIG))
    settings = config.actor_rollout_ref
    log.info("data types: actor %s, rollout engines %s", settings.actor.dtype, settings.rollout.dtype)
    for text in conversion_warnings(config):
        log.warning("%s", text)
    if text := slow_type_advice(config, device):
        log.info("%s", text)
    return config


def _prepare_validation(config: Config, validation: Validation, teachers: Teachers, student: Student) -> None:
    """Read the teachers' own prompts of the validation data, and check that they can begin conversations."""
    if validation.routes is not None:
        clients = teachers.for_data(validation.routes).clients
        read_teacher_prompts(config, validation.data, validation.routes, clients, student)
    check_turns(config, validation.data, student.tokenizer)


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
        stop_token_ids=_stop_ids(student, stop_token_ids),
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


def _stop_ids(student: Student, teacher_ids: Sequence[int]) -> tuple[int, ...]:
    """Return the ids at which responses end. Log those of the teachers that the student's folder does not declare."""
    found = find_stop_ids(student, teacher_ids)
    if added := sorted(found - find_stop_ids(student, ())):
        log.info(
            "responses also end at the teachers' ids %s, which %s does not declare; saved Hugging Face folders declare "
            "them in generation_config.json",
            added,
            student.path,
        )
    return tuple(sorted(found))


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

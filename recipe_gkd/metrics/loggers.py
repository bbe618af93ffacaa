"""Destinations of the metrics, chosen by ``trainer.logger``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack

from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.config.schema import TrainerConfig
from recipe_gkd.metrics.console_logger import ConsoleLogger
from recipe_gkd.metrics.jsonl_logger import JsonlLogger
from recipe_gkd.metrics.logger_interface import Logger, RunInfo
from recipe_gkd.metrics.tensorboard_logger import TensorBoardLogger
from recipe_gkd.metrics.user_logger import CLOSE_AFTER_ERROR_TIMEOUT_S, CLOSE_TIMEOUT_S, UserLogger
from recipe_gkd.runtime.tasks import FirstErrorTaskGroup


class Loggers:
    """All loggers of a run. An async context manager that opens and closes them.

    Example::

        async with Loggers(config.trainer, completed_steps=0, last_step=100) as loggers:
            loggers.log(1, metrics)
    """

    def __init__(self, config: TrainerConfig, *, completed_steps: int, last_step: int) -> None:
        """Store the arguments.

        Args:
            config: Section ``trainer`` of the configuration.
            completed_steps: Number of steps that are completed at the start.
            last_step: Last step of the run.
        """
        self._specs = config.logger
        self._run = RunInfo(folder_of(config), config.project_name, config.experiment_name, completed_steps, last_step)
        self._built_in: list[Logger] = []
        self._user: list[UserLogger] = []

    async def __aenter__(self) -> Loggers:
        """Create the run folder and the loggers. Constructors of users' loggers do not block the event loop.

        Raises:
            ConfigError: A user's logger class cannot be loaded or constructed.
        """
        self._run.folder.mkdir(parents=True, exist_ok=True)
        try:
            for spec in self._specs:
                if (logger := _create_built_in(spec, self._run)) is not None:
                    self._built_in.append(logger)
                else:
                    self._user.append(UserLogger(spec, self._run))
            async with FirstErrorTaskGroup() as tasks:
                for opening in [tasks.start(user_logger.wait_until_open()) for user_logger in self._user]:
                    await opening
        except BaseException:
            await self._close(CLOSE_AFTER_ERROR_TIMEOUT_S)
            raise
        return self

    async def __aexit__(self, error_class: type[BaseException] | None, *_: object) -> None:
        await self._close(CLOSE_TIMEOUT_S if error_class is None else CLOSE_AFTER_ERROR_TIMEOUT_S)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of a step to all loggers."""
        loggers: list[Logger | UserLogger] = [*self._built_in, *self._user]
        for logger in loggers:
            logger.log(step, metrics)

    async def _close(self, timeout_s: float) -> None:
        """Close the built-in loggers first, because a signal cancels the wait for the users' loggers."""
        try:
            with ExitStack() as stack:
                for logger in self._built_in:
                    stack.callback(logger.close)
        finally:
            await asyncio.gather(*(logger.close(timeout_s) for logger in self._user))


def _create_built_in(spec: str, run: RunInfo) -> Logger | None:
    match spec:
        case "console":
            return ConsoleLogger(run.completed_steps, run.last_step)
        case "jsonl":
            return JsonlLogger(run.folder / "metrics.jsonl", run.completed_steps)
        case "tensorboard":
            folder = run.folder / "tensorboard" / run.project_name / run.experiment_name
            return TensorBoardLogger(folder, run.completed_steps)
        case _:
            return None

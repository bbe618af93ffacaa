"""Destinations of the metrics, chosen by ``trainer.logger``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.config.schema import TrainerConfig
from recipe_gkd.metrics.console_logger import ConsoleLogger
from recipe_gkd.metrics.jsonl_logger import JsonlLogger
from recipe_gkd.metrics.logger_interface import Logger, RunInfo
from recipe_gkd.metrics.tensorboard_logger import TensorBoardLogger
from recipe_gkd.metrics.user_logger import UserLogger


class Loggers:
    """All loggers of a run. A context manager that closes them."""

    def __init__(self, config: TrainerConfig, *, first_step: int, last_step: int) -> None:
        """Create the run folder and the loggers.

        Args:
            config: Section ``trainer`` of the configuration.
            first_step: Number of steps that are already done.
            last_step: Last step of the run.

        Raises:
            ConfigError: A user's logger class cannot be loaded or constructed.
        """
        run = RunInfo(folder_of(config), config.project_name, config.experiment_name, first_step, last_step)
        run.folder.mkdir(parents=True, exist_ok=True)
        self._loggers: list[Logger] = []
        with ExitStack() as stack:
            for spec in config.logger:
                logger = _create(spec, run)
                stack.callback(logger.close)
                self._loggers.append(logger)
            self._closing = stack.pop_all()

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of a step to all loggers."""
        for logger in self._loggers:
            logger.log(step, metrics)


def _create(spec: str, run: RunInfo) -> Logger:
    match spec:
        case "console":
            return ConsoleLogger(run.first_step, run.last_step)
        case "jsonl":
            return JsonlLogger(run.folder / "metrics.jsonl", run.first_step)
        case "tensorboard":
            folder = run.folder / "tensorboard" / run.project_name / run.experiment_name
            return TensorBoardLogger(folder, run.first_step)
        case _:
            return UserLogger(spec, run)

"""Destinations of the metrics, chosen by ``trainer.logger`` and ``trainer.metrics_port``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.config.schema import TrainerConfig
from recipe_gkd.errors import ConfigError
from recipe_gkd.metrics.loggers.background_logger import (
    CLOSE_AFTER_ERROR_TIMEOUT_S,
    CLOSE_TIMEOUT_S,
    BackgroundLogger,
    LoggerSource,
)
from recipe_gkd.metrics.loggers.console_logger import ConsoleLogger
from recipe_gkd.metrics.loggers.jsonl_logger import JsonlLogger
from recipe_gkd.metrics.loggers.logger_interface import GLOBAL_STEP, Logger, RunInfo
from recipe_gkd.metrics.loggers.prometheus_logger import PrometheusLogger
from recipe_gkd.metrics.loggers.tensorboard_logger import TensorBoardLogger
from recipe_gkd.metrics.loggers.tracking_services import tracking_source
from recipe_gkd.runtime.tasks import FirstErrorTaskGroup
from recipe_gkd.runtime.user_code import load_attribute, split_spec

log = logging.getLogger(__name__)


class Loggers:
    """All loggers of a run. An async context manager that opens and closes them.

    Example::

        async with Loggers(config.trainer, completed_steps=0, last_step=100) as loggers:
            loggers.log(1, metrics)
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        completed_steps: int,
        last_step: int,
        may_fail: bool = False,
        loss_name: str = "loss",
    ) -> None:
        """Store the arguments.

        Args:
            config: Section ``trainer`` of the configuration.
            completed_steps: Number of steps that are completed at the start.
            may_fail: True if a logger that cannot be opened is a warning, because the run has begun before.
            loss_name: Name of the distillation loss.
        """
        self._may_fail = may_fail
        self._specs, self._metrics_port = config.logger, config.metrics_port
        self._run = RunInfo(
            folder_of(config), config.project_name, config.experiment_name, completed_steps, last_step, loss_name
        )
        self._built_in: list[Logger] = []
        self._background: list[BackgroundLogger] = []

    async def __aenter__(self) -> Loggers:
        """Create the run folder and the loggers. Slow constructors do not block the event loop.

        Raises:
            ConfigError: A user's logger class cannot be loaded or constructed, or a tracking service is not available,
                or the port of ``/metrics`` is in use. Not raised with ``may_fail``.
        """
        self._run.folder.mkdir(parents=True, exist_ok=True)
        try:
            if self._metrics_port is not None:
                with self._tolerated():
                    self._built_in.append(PrometheusLogger(self._metrics_port, self._run))
            for spec in self._specs:
                with self._tolerated():
                    if (logger := _create_built_in(spec, self._run)) is not None:
                        self._built_in.append(logger)
                    else:
                        self._background.append(BackgroundLogger(_source_of(spec), self._run))
            async with FirstErrorTaskGroup() as tasks:
                for opening in [tasks.start(self._wait_until_open(logger)) for logger in self._background]:
                    await opening
        except BaseException:
            await self._close(CLOSE_AFTER_ERROR_TIMEOUT_S, has_failed=True)
            raise
        return self

    async def __aexit__(self, error_class: type[BaseException] | None, *_: object) -> None:
        has_failed = error_class is not None
        await self._close(CLOSE_AFTER_ERROR_TIMEOUT_S if has_failed else CLOSE_TIMEOUT_S, has_failed=has_failed)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass the metrics of a step, with ``training/global_step``, to all loggers. A failing one is disabled."""
        metrics = {GLOBAL_STEP: float(step), **metrics}
        for logger in list(self._built_in):
            try:
                logger.log(step, metrics)
            except Exception:  # the metrics are worth less than the run
                log.warning("%s failed, and is not used any more", type(logger).__name__, exc_info=True)
                self._built_in.remove(logger)
        for background in self._background:
            background.log(step, metrics)

    async def _wait_until_open(self, logger: BackgroundLogger) -> None:
        with self._tolerated():
            await logger.wait_until_open()

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Make a :class:`ConfigError` of the body a warning, if the loggers may fail."""
        try:
            yield
        except ConfigError as error:
            if not self._may_fail:
                raise
            log.warning("%s\nthe run continues without this logger", error)

    async def _close(self, timeout_s: float, *, has_failed: bool) -> None:
        """Close the built-in loggers first, because a signal cancels the wait for the others."""
        try:
            for logger in self._built_in:
                try:
                    logger.close()
                except Exception:  # as in log()
                    log.warning("%s could not be closed", type(logger).__name__, exc_info=True)
        finally:
            await asyncio.gather(*(logger.close(timeout_s, has_failed=has_failed) for logger in self._background))


def _source_of(spec: str) -> LoggerSource:
    if (source := tracking_source(spec)) is not None:
        return source
    path, name = split_spec(spec, key="trainer.logger")
    logger_class = load_attribute(path, name, key="trainer.logger")
    return LoggerSource(spec, logger_class, call=f"{name}(run_info)", remedy="correct the class")


def _create_built_in(spec: str, run: RunInfo) -> Logger | None:
    match spec:
        case "console":
            return ConsoleLogger(run.completed_steps, run.last_step, loss_name=run.loss_name)
        case "jsonl":
            return JsonlLogger(run.folder / "metrics.jsonl", run.completed_steps)
        case "tensorboard":
            folder = run.folder / "tensorboard" / run.project_name / run.experiment_name
            return TensorBoardLogger(folder, run.completed_steps)
        case _:
            return None

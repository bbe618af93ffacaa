"""Metrics for a logger class from a user's own file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from recipe_gkd.errors import ConfigError
from recipe_gkd.metrics.logger_interface import RunInfo
from recipe_gkd.runtime.user_code import load_attribute, split_spec

log = logging.getLogger(__name__)


class UserLogger:
    """Adapter that keeps exceptions of a user's logger out of the training loop.

    See :class:`recipe_gkd.metrics.logger_interface.Logger` for the contract.
    """

    def __init__(self, spec: str, run: RunInfo) -> None:
        """Load and construct the class.

        Args:
            spec: ``FILE.py:Name``.
            run: Argument of the class.

        Raises:
            ConfigError: The file or the class does not exist, or its constructor raised an exception.
        """
        self._spec = spec
        self._is_disabled = False
        path, name = split_spec(spec, key="trainer.logger")
        logger_class = load_attribute(path, name, key="trainer.logger")
        try:
            self._logger: Any = logger_class(run)
        except Exception as error:
            raise ConfigError(
                f"trainer.logger={spec}: {name}(run_info) raised {type(error).__name__}: {error}; correct the class"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass a copy of the metrics to the user's logger, unless it is disabled."""
        self._call("log", self._logger.log, step, dict(metrics))

    def close(self) -> None:
        """Close the user's logger, unless it is disabled."""
        self._call("close", self._logger.close)

    def _call(self, method: str, function: Callable[..., object], *args: object) -> None:
        if self._is_disabled:
            return
        try:
            function(*args)
        except Exception as error:  # a failed logger must not end a run of hours
            self._is_disabled = True
            log.warning(
                "trainer.logger=%s is disabled for the rest of this run: %s() raised %s: %s",
                self._spec,
                method,
                type(error).__name__,
                error,
                exc_info=True,
            )

"""Metrics for a logger class from a user's own file."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from recipe_gkd.errors import ConfigError
from recipe_gkd.metrics.logger_interface import RunInfo
from recipe_gkd.runtime.user_code import load_attribute, split_spec

log = logging.getLogger(__name__)

MAX_QUEUED_STEPS = 1000
CLOSE_TIMEOUT_S = 30.0


class UserLogger:
    """Adapter that keeps exceptions and waits of a user's logger out of the training loop.

    The methods of the logger are called from a daemon thread. See
    :class:`recipe_gkd.metrics.logger_interface.Logger` for the contract.
    """

    def __init__(self, spec: str, run: RunInfo) -> None:
        """Load and construct the class, and start its thread.

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
        self._steps: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MAX_QUEUED_STEPS)
        self._thread = threading.Thread(target=self._run, name=f"logger {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a copy of the metrics for the user's logger, unless it is disabled."""
        if self._is_disabled:
            return
        try:
            self._steps.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._disable(f"log() is {MAX_QUEUED_STEPS} steps behind")

    def close(self) -> None:
        """Let the user's logger write the queued steps and close it, for at most ``CLOSE_TIMEOUT_S`` seconds."""
        if self._is_disabled:
            return
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        with suppress(queue.Full):
            self._steps.put(None, timeout=CLOSE_TIMEOUT_S)
        self._thread.join(deadline - time.monotonic())
        if self._thread.is_alive():
            self._disable(f"log() or close() did not return within {CLOSE_TIMEOUT_S:g} s")

    def _run(self) -> None:
        while (item := self._steps.get()) is not None and not self._is_disabled:
            self._call("log", self._logger.log, *item)
        if not self._is_disabled:
            self._call("close", self._logger.close)

    def _call(self, method: str, function: Callable[..., object], *args: object) -> None:
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - a failed logger must not end a run of hours
            self._disable(f"{method}() raised {type(error).__name__}: {error}", exc_info=True)

    def _disable(self, reason: str, *, exc_info: bool = False) -> None:
        self._is_disabled = True
        log.warning("trainer.logger=%s is disabled for the rest of this run: %s", self._spec, reason, exc_info=exc_info)

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
from recipe_gkd.runtime.threads import in_thread
from recipe_gkd.runtime.user_code import load_attribute, split_spec

log = logging.getLogger(__name__)

MAX_QUEUED_STEPS = 1000
OPEN_TIMEOUT_S = 120.0
"""Deadline of the constructor. Clients of tracking services try to connect for up to 90 s."""
CLOSE_TIMEOUT_S = 30.0
CLOSE_AFTER_ERROR_TIMEOUT_S = 3.0
"""Deadline of the last calls after an error. The diagnosis of the workers begins after them."""


class UserLogger:
    """Adapter that keeps exceptions and waits of a user's logger out of the training loop.

    The logger is constructed and called in a daemon thread. See
    :class:`recipe_gkd.metrics.logger_interface.Logger` for the contract.

    Lifecycle::

        logger = UserLogger(spec, run)     # loads the class and starts the thread
        await logger.wait_until_open()     # the constructor has returned
        logger.log(step, metrics)          # never waits
        await logger.close(timeout_s)
    """

    def __init__(self, spec: str, run: RunInfo) -> None:
        """Load the class, and start the thread that constructs and calls the logger.

        Args:
            spec: ``FILE.py:Name``.
            run: Argument of the class.

        Raises:
            ConfigError: The file or the class does not exist.
        """
        self._spec = spec
        self._is_disabled = False
        path, self._name = split_spec(spec, key="trainer.logger")
        logger_class = load_attribute(path, self._name, key="trainer.logger")
        self._steps: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MAX_QUEUED_STEPS)
        self._constructor_ended = threading.Event()
        self._constructor_error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(logger_class, run), name=f"logger {self._name}", daemon=True
        )
        self._thread.start()

    async def wait_until_open(self) -> None:
        """Wait until the user's logger is constructed.

        Raises:
            ConfigError: The constructor raised an exception, or did not return within ``OPEN_TIMEOUT_S`` seconds.
        """
        has_ended = await in_thread(self._constructor_ended.wait, OPEN_TIMEOUT_S)
        error, call = self._constructor_error, f"trainer.logger={self._spec}: {self._name}(run_info)"
        if has_ended and error is None:
            return
        self._is_disabled = True
        if not has_ended:
            raise ConfigError(
                f"{call} did not return within {OPEN_TIMEOUT_S:g} s; correct the class, which may wait for an input or "
                "for a service"
            )
        raise ConfigError(f"{call} raised {type(error).__name__}: {error}; correct the class") from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a copy of the metrics for the user's logger, unless it is disabled."""
        if self._is_disabled:
            return
        try:
            self._steps.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._disable(f"log() is {MAX_QUEUED_STEPS} steps behind")

    async def close(self, timeout_s: float) -> None:
        """Let the user's logger write the queued steps and close it, for at most ``timeout_s`` seconds."""
        if not self._is_disabled and not await in_thread(self._end_thread, timeout_s):
            self._disable(f"its last call did not return within {timeout_s:g} s")

    def _end_thread(self, timeout_s: float) -> bool:
        """Return True if the thread has ended after the queued steps, within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        with suppress(queue.Full):
            self._steps.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self, logger_class: Callable[[RunInfo], Any], run: RunInfo) -> None:
        try:
            logger = logger_class(run)
        except BaseException as error:  # noqa: BLE001 - wait_until_open() raises it
            self._constructor_error = error
            return
        finally:
            self._constructor_ended.set()
        while (item := self._steps.get()) is not None and not self._is_disabled:
            self._call("log", logger.log, *item)
        if not self._is_disabled:
            self._call("close", logger.close)

    def _call(self, method: str, function: Callable[..., object], *args: object) -> None:
        try:
            function(*args)
        except BaseException as error:  # noqa: BLE001 - a failed logger, which may call sys.exit, must not end the run
            self._disable(f"{method}() raised {type(error).__name__}: {error}", exc_info=True)

    def _disable(self, reason: str, *, exc_info: bool = False) -> None:
        self._is_disabled = True
        log.warning("trainer.logger=%s is disabled for the rest of this run: %s", self._spec, reason, exc_info=exc_info)

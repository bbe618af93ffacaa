"""Loggers in separate threads: classes from a user's file, and clients of tracking services."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from recipe_gkd.errors import ConfigError
from recipe_gkd.metrics.loggers.logger_interface import Logger, RunInfo
from recipe_gkd.runtime.threads import in_thread

log = logging.getLogger(__name__)

MAX_QUEUED_STEPS = 1000
OPEN_TIMEOUT_S = 120.0
"""Deadline of the constructor. Clients of tracking services try to connect for up to 90 s."""
CLOSE_TIMEOUT_S = 30.0
CLOSE_AFTER_ERROR_TIMEOUT_S = 3.0
"""Deadline of the last calls after an error. The diagnosis of the workers begins after them."""


@dataclass(frozen=True)
class LoggerSource:
    """Constructor of a logger, and texts for its errors.

    Attributes:
        spec: Its element of ``trainer.logger``.
        create: Function or class that returns the logger.
        call: Name of the constructor's call.
        remedy: What the user does if the constructor fails.
    """

    spec: str
    create: Callable[[RunInfo], Logger]
    call: str
    remedy: str


class BackgroundLogger:
    """Adapter that keeps exceptions and waits of a logger out of the training loop.

    The logger is constructed and called in a daemon thread. See
    :class:`recipe_gkd.metrics.loggers.logger_interface.Logger` for the contract.

    Lifecycle::

        logger = BackgroundLogger(source, run)     # starts the thread
        await logger.wait_until_open()             # the constructor has returned
        logger.log(step, metrics)                  # never waits
        await logger.close(timeout_s)
    """

    def __init__(self, source: LoggerSource, run: RunInfo) -> None:
        """Start the thread that constructs and calls the logger.

        Args:
            source: Constructor of the logger.
            run: Argument of the constructor.
        """
        self._source = source
        self._is_disabled = self._has_failed = False
        self._steps: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MAX_QUEUED_STEPS)
        self._constructor_ended = threading.Event()
        self._constructor_error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, args=(source.create, run), name=f"logger {source.spec}", daemon=True
        )
        self._thread.start()

    async def wait_until_open(self) -> None:
        """Wait until the logger is constructed.

        Raises:
            ConfigError: The constructor raised an exception, or did not return within ``OPEN_TIMEOUT_S`` seconds.
        """
        has_ended = await in_thread(self._constructor_ended.wait, OPEN_TIMEOUT_S)
        error, call = self._constructor_error, f"trainer.logger={self._source.spec}: {self._source.call}"
        if has_ended and error is None:
            return
        self._is_disabled = True
        if not has_ended:
            raise ConfigError(
                f"{call} did not return within {OPEN_TIMEOUT_S:g} s, and may wait for an input or for a service",
                remedy=self._source.remedy,
                keys=("trainer.logger",),
            )
        what = f"{call} raised {type(error).__name__}: {error}"
        raise ConfigError(what, remedy=self._source.remedy, keys=("trainer.logger",)) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue a copy of the metrics for the logger, unless it is disabled."""
        if self._is_disabled:
            return
        try:
            self._steps.put_nowait((step, dict(metrics)))
        except queue.Full:
            self._disable(f"log() is {MAX_QUEUED_STEPS} steps behind")

    async def close(self, timeout_s: float, *, has_failed: bool = False) -> None:
        """Let the logger write the queued steps and close it.

        Args:
            timeout_s: Longest time for these calls, in seconds.
            has_failed: True if the run ends with an error. Then ``fail`` is called instead of ``close``, if it exists.
        """
        self._has_failed = has_failed
        if not self._is_disabled and not await in_thread(self._end_thread, timeout_s):
            self._disable(f"its last call did not return within {timeout_s:g} s")

    def _end_thread(self, timeout_s: float) -> bool:
        """Return True if the thread has ended after the queued steps, within ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        with suppress(queue.Full):
            self._steps.put(None, timeout=timeout_s)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self, create: Callable[[RunInfo], Logger], run: RunInfo) -> None:
        try:
            logger = create(run)
        except BaseException as error:  # noqa: BLE001 - wait_until_open() raises it
            self._constructor_error = error
            return
        finally:
            self._constructor_ended.set()
        while (item := self._steps.get()) is not None and not self._is_disabled:
            self._call("log", logger.log, *item)
        if self._is_disabled:
            return
        if self._has_failed and callable(fail := getattr(logger, "fail", None)):
            self._call("fail", fail)
        else:
            self._call("close", logger.close)

    def _call(self, method: str, function: Callable[..., object], *args: object) -> None:
        try:
            function(*args)
        except BaseException as error:  # noqa: BLE001 - a failed logger, which may call sys.exit, must not end the run
            self._disable(f"{method}() raised {type(error).__name__}: {error}", exc_info=True)

    def _disable(self, reason: str, *, exc_info: bool = False) -> None:
        log.warning(
            "trainer.logger=%s is disabled for the rest of this run: %s", self._source.spec, reason, exc_info=exc_info
        )
        self._is_disabled = True  # last, so that close() waits for the line above

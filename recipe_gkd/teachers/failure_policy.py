"""Policy for failed requests to a teacher: ``actor_rollout_ref.teacher.on_failure`` and its budgets.

The client has already retried: until the deadline of a request it reconnects and sends it again, and the service passes
the work of a dead worker to another.

=================  ================================  ==========================================
``on_failure``     unavailable, timeout              request refused
=================  ================================  ==========================================
``fail``           ends the run                      ends the run
``wait``           retried for up to ``max_wait_s``  ends the run
``skip_samples``   samples skipped, up to            samples skipped, up to
                   ``max_skipped_samples``           ``max_skipped_samples``
=================  ================================  ==========================================

All other errors end the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from recipe_gkd.config.keys import TEACHER
from recipe_gkd.config.schema import TeacherConfig
from recipe_gkd.config.timeouts import TEACHER_TIMEOUT
from recipe_gkd.data.samples import StoredTopK, TeacherTopK
from recipe_gkd.runtime.clock import now
from recipe_gkd.runtime.keyed_timeout import KeyedTimeout
from recipe_gkd.teachers.scoring.requests import TeacherRequest
from teacher import LIMITS
from teacher.errors import TeacherError, TeacherRequestError, TeacherTimeout, TeacherUnavailable

log = logging.getLogger(__name__)

WARN_INTERVAL_S = 60.0
MIN_RETRY_INTERVAL_S = 1.0
READY_TIMEOUT_S = 10.0
"""Time that a service gets to repeat a sleep or wake-up without the workers that failed."""

Scores = Sequence[TeacherTopK | StoredTopK]
SendRequest = Callable[[float], Awaitable[Scores]]
"""Function that sends a request with a time limit in seconds."""


class FailurePolicy:
    """Sender of requests that handles their failures. One instance serves all teachers of a run.

    Attributes:
        n_skipped: Skipped samples of the run, including samples of batches in flight.
        last_error: Error of the last skipped request.
    """

    def __init__(self, config: TeacherConfig) -> None:
        """Create a policy without skipped samples."""
        self._config = config
        self.n_skipped = 0
        self.last_error: TeacherError | None = None
        self._warned_at: dict[str, float] = {}  # by teacher

    async def send(self, send_request: SendRequest, request: TeacherRequest) -> Scores | None:
        """Send a request and return its results, or None if its samples are skipped.

        Args:
            send_request: Function that sends the request. It is called again for a retry.
            request: Description of the request.

        Raises:
            TeacherError: The error ends the run. ``step``, ``teacher`` and ``samples`` describe the request.
        """
        try:
            return await self._send(send_request, request)
        except TeacherError as error:
            raise located(error, request) from error

    async def _send(self, send_request: SendRequest, request: TeacherRequest) -> Scores | None:
        config, timeout_s = self._config, KeyedTimeout(self._config.timeout_s, TEACHER_TIMEOUT)
        match config.on_failure:
            case "wait":
                return await self._send_with_retries(send_request, request)
            case "skip_samples":
                try:
                    return await send_request(timeout_s)
                except (TeacherTimeout, TeacherUnavailable, TeacherRequestError) as error:
                    self._skip(request, error)
                    return None
            case _:
                return await send_request(timeout_s)

    async def _send_with_retries(self, send_request: SendRequest, request: TeacherRequest) -> Scores:
        max_wait_s = self._config.max_wait_s
        timeout_s: float = KeyedTimeout(self._config.timeout_s, TEACHER_TIMEOUT)
        failed_at: float | None = None
        while True:
            sent_at = now()
            try:
                scored = await send_request(timeout_s)
            except (TeacherTimeout, TeacherUnavailable) as error:
                failed_at = now() if failed_at is None else failed_at
                left_s = failed_at + max_wait_s - now()
                if left_s <= 0:
                    raise error.replaced(
                        what=f"no result after retries for {max_wait_s:g} s",
                        options=(f"{TEACHER}.max_wait_s",),
                        remedy=f"start the service and resume from the last checkpoint, or raise {TEACHER}.max_wait_s",
                        details=(f"the last error: {error}",),
                    ) from error
                self._warn_waiting(request, left_s, error)
                pause_s = min(left_s, max(0.0, sent_at + MIN_RETRY_INTERVAL_S - now()))
                await asyncio.sleep(pause_s)  # the service does not report its return, so it is polled
                timeout_s = self._retry_timeout_s(left_s - pause_s, error)
            else:
                if failed_at is not None:
                    log.warning("%s: scored, %.0f s after its first failure", request, now() - failed_at)
                return scored

    async def repeat(self, call: Callable[[float], Awaitable[None]], name: str) -> None:
        """Call the services of all teachers, and repeat a call that failed because a service or worker is down.

        The call is repeated once, because a service continues without a worker that died. With ``on_failure=wait`` it
        is repeated for up to ``max_wait_s``.

        Args:
            call: Function that makes the call within the given time, in seconds.
            name: Name of the call, for messages.

        Raises:
            TeacherError: The call failed.
        """
        max_wait_s = self._config.max_wait_s if self._config.on_failure == "wait" else 0.0
        first: TeacherError | None = None
        give_up_at = 0.0
        timeout_s: float = KeyedTimeout(self._config.timeout_s, TEACHER_TIMEOUT)
        while True:
            try:
                await call(timeout_s)
                return
            except (TeacherTimeout, TeacherUnavailable) as error:
                if first is None:
                    first, give_up_at = error, now() + max_wait_s
                    # Without `wait` only the answer of workers that are ready is awaited.
                    timeout_s = timeout_s if max_wait_s else min(timeout_s, READY_TIMEOUT_S)
                elif now() >= give_up_at:
                    raise error.replaced(
                        workers=tuple(dict.fromkeys((*error.workers, *first.workers))),
                        details=(*error.details, f"the first attempt failed with: {first}"),
                    ) from error
                log.warning("teacher %s: repeating: %s: %s", name, type(error).__name__, error)
                await asyncio.sleep(MIN_RETRY_INTERVAL_S)  # the service does not report its return, so it is polled

    def _retry_timeout_s(self, left_s: float, error: TeacherError) -> float:
        """Return the time limit of a retry, in seconds.

        A teacher that timed out is slow. It gets all the remaining time, so that it does not start again and again.
        """
        timeout_s = min(max(left_s, 1e-3), LIMITS.timeout_s)
        return min(timeout_s, self._config.timeout_s) if isinstance(error, TeacherUnavailable) else timeout_s

    def _warn_waiting(self, request: TeacherRequest, left_s: float, error: TeacherError) -> None:
        """Log the first failure at once, then one warning per teacher and interval."""
        if now() - self._warned_at.get(request.teacher, -WARN_INTERVAL_S) < WARN_INTERVAL_S:
            return
        self._warned_at[request.teacher] = now()
        log.warning(
            "%s: retrying for up to %.0f s more (%s.max_wait_s=%g): %s: %s",
            request, left_s, TEACHER, self._config.max_wait_s, type(error).__name__, error,
        )  # fmt: skip

    def _skip(self, request: TeacherRequest, error: TeacherError) -> None:
        budget = self._config.max_skipped_samples
        self.n_skipped, self.last_error = self.n_skipped + len(request.uids), error
        log.warning(
            "%s: skipped, %d of at most %d in this run: %s: %s",
            request, self.n_skipped, budget, type(error).__name__, error,
        )  # fmt: skip
        if self.n_skipped > budget:
            raise of_several_requests(
                error,
                f"{self.n_skipped} samples were not scored by their teacher, more than {TEACHER}.max_skipped_samples="
                f"{budget}",
                option=f"{TEACHER}.max_skipped_samples",
                remedy="check the service and resume from the last checkpoint, or raise the budget",
            ) from error


def located(error: TeacherError, request: TeacherRequest) -> TeacherError:
    """Return a copy of an error with the step, the teacher, the samples and, if known, the sample of its request."""
    uids, uid = tuple(request.uids), error.uid
    if uid is None and error.sequence is not None and error.sequence < len(uids):
        uid = uids[error.sequence]
    return error.replaced(step=request.step, teacher=request.teacher, samples=uids, uid=uid)


def of_several_requests(last: TeacherError, what: str, *, option: str, remedy: str) -> TeacherError:
    """Return an error of the class of the last one, without the place of its request. ``details`` has the last error.

    Args:
        what: Summary of all failures.
        option: Configuration key that can be changed.
        remedy: What the user can do.
    """
    summary = last.replaced(what=what, options=(option,), remedy=remedy, details=(f"the last error: {last}",))
    return summary.replaced(phase="", operation="", address="", worker="", workers=(), sequence=None, uid=None)

"""What happens when a request to a teacher fails: ``actor_rollout_ref.teacher.on_failure``, and its budgets.

By then the client has done its part: until a request's deadline it reconnects and sends again, and the service gives
the work of a worker that died to another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from recipe_gkd.config.schema import TeacherConfig
from recipe_gkd.config.teachers import TEACHER
from recipe_gkd.runtime.clock import now
from teacher.errors import TeacherError, TeacherRequestError, TeacherTimeout, TeacherUnavailable
from teacher.records import ScoredSequence
from teacher.wire.messages import LIMITS

log = logging.getLogger(__name__)

SAY_EVERY_S = 60.0
"""While a teacher is waited for."""
AGAIN_AFTER_S = 1.0
"""Between one request and the next, where the first failed at once."""

Ask = Callable[[float], Awaitable[list[ScoredSequence]]]
"""With a deadline in seconds."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request, for messages."""

    teacher: str
    step: int
    uids: Sequence[int]

    def __str__(self) -> str:
        return f"step {self.step}: teacher {self.teacher}, {len(self.uids)} samples ({', '.join(map(str, self.uids))})"


class FailurePolicy:
    """Asks, and decides what becomes of a failure; one for all teachers of a run."""

    def __init__(self, config: TeacherConfig) -> None:
        self._config = config
        self.n_skipped = 0
        """Samples of the run, those of batches under way included."""
        self.last_error: TeacherError | None = None
        self._said_at: dict[str, float] = {}  # teacher -> when it was last said that it is waited for

    async def responses(self, ask: Ask, request: Asked) -> list[ScoredSequence] | None:
        """None: the samples of this request are skipped. Raises what ends the run."""
        config = self._config
        match config.on_failure:
            case "wait":
                return await self._persist(ask, request)
            case "skip_samples":
                try:
                    return await ask(config.timeout_s)
                except (TeacherTimeout, TeacherUnavailable, TeacherRequestError) as error:
                    self._skip(request, error)
                    return None
            case _:
                return await ask(config.timeout_s)

    async def _persist(self, ask: Ask, request: Asked) -> list[ScoredSequence]:
        """Ask again until there is an answer, or ``max_wait_s`` after the first failure."""
        longest, timeout_s = self._config.max_wait_s, self._config.timeout_s
        failed_at: float | None = None
        while True:
            asked_at = now()
            try:
                responses = await ask(timeout_s)
            except (TeacherTimeout, TeacherUnavailable) as error:
                failed_at = now() if failed_at is None else failed_at
                left_s = failed_at + longest - now()
                if left_s <= 0:
                    raise type(error)(
                        f"{request}: no answer, asked again for {longest:g} s ({TEACHER}.max_wait_s): {error}. Start "
                        "the service and resume from the last checkpoint, or raise max_wait_s"
                    ) from error
                self._say_waiting(request, left_s, error)
                pause_s = min(left_s, max(0.0, asked_at + AGAIN_AFTER_S - now()))
                await asyncio.sleep(pause_s)  # nobody says when the service is back: it is asked
                timeout_s = min(max(left_s - pause_s, 1e-3), LIMITS.timeout_s)
                if isinstance(error, TeacherUnavailable):  # else it is at work, and is not asked to begin once more
                    timeout_s = min(timeout_s, self._config.timeout_s)
            else:
                if failed_at is not None:
                    log.warning("%s: answered, %.0f s after its first failure", request, now() - failed_at)
                return responses

    def _say_waiting(self, request: Asked, left_s: float, error: TeacherError) -> None:
        """At once, and then every so often, whatever the number of requests that wait."""
        if now() - self._said_at.get(request.teacher, -SAY_EVERY_S) < SAY_EVERY_S:
            return
        self._said_at[request.teacher] = now()
        log.warning(
            "%s: asked again, for up to %.0f s more (%s.max_wait_s=%g): %s: %s",
            request, left_s, TEACHER, self._config.max_wait_s, type(error).__name__, error,
        )  # fmt: skip

    def _skip(self, request: Asked, error: TeacherError) -> None:
        budget = self._config.max_skipped_samples
        self.n_skipped, self.last_error = self.n_skipped + len(request.uids), error
        log.warning(
            "%s: skipped, %d of at most %d in this run: %s: %s",
            request, self.n_skipped, budget, type(error).__name__, error,
        )  # fmt: skip
        if self.n_skipped > budget:
            raise type(error)(
                f"{self.n_skipped} samples had no answer of their teacher, more than {TEACHER}.max_skipped_samples="
                f"{budget}; the last error: {request}: {error}. Look after the service and resume from the last "
                "checkpoint, or raise the budget"
            ) from error

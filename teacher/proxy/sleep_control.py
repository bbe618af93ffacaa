"""Sleep and wake-up of a service. This module uses no sockets; times come from ``time.monotonic()``.

A service that sleeps has released the memory of its devices, so that other processes can use them.

================  =========================================  ================  =====================================
state             event                                      next state        action
================  =========================================  ================  =====================================
awake             sleep request, a worker has no sleep mode  awake             the request is refused
awake             sleep request                              finishing         new score requests are refused
finishing         no score request is open                   falling asleep    all workers get SetAsleep
finishing         wake request, or no sleep request left     awake             sleep requests get an error
falling asleep    all workers sleep                          asleep            sleep requests get AsleepSet
falling asleep,   wake request                               waking            sleep requests get an error; all
asleep                                                                         workers get SetAsleep
waking            sleep request                              finishing         wake requests get an error
waking            all workers are awake, at least one        awake             wake requests get AsleepSet
falling asleep,   a worker fails, or a deadline passes       the same          requests get an error that names it
waking
================  =========================================  ================  =====================================

Decisions:

- **No request is lost.** Score requests of all clients that are open when a sleep request arrives are finished first.
  If that takes longer than the sleep request's time limit, it fails and the service continues to serve.
- **Requests to a sleeping service fail at once** with ``TeacherAsleep``, so that nothing waits for a
  wake-up that may never come. A service that wakes up accepts requests. Each worker gets them as soon as it is awake.
- **A worker that joins a sleeping service** sleeps before it gets a request. One without sleep mode is refused.
- **A restarted proxy** has no state. If a worker registers asleep before the first request of a client to sleep or
  wake up, the service sleeps, and so do workers that registered awake: a wrong sleep costs an error message, a wrong
  wake-up the memory of another process. After a first request the workers follow the latest one.
- **The latest request counts**, from whichever client. There is no owner.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from teacher.errors import (
    TeacherAsleep,
    TeacherError,
    TeacherRequestError,
    TeacherTimeout,
    TeacherUnavailable,
    TeacherWithoutWorker,
)
from teacher.proxy.dispatch import Dispatcher
from teacher.proxy.jobs import RegisteredWorker, RequestKey, StateChange
from teacher.wire.messages import AsleepSet, SetAsleep

UNREQUESTED_TIMEOUT_S = 600.0
"""Time limit of a worker that joins, to take the state of the service, in seconds."""


_SLEEP_OPTIONS = ("--sleep-mode",)


def asleep_error() -> TeacherAsleep:
    """Return the error of a score request to a service that sleeps."""
    return TeacherAsleep(
        "the teacher sleeps: its workers have released their devices",
        options=("actor_rollout_ref.teacher.sleep_between_batches",),
        remedy="wake it with `python -m teacher wake`, or wait for the training that uses it with "
        "actor_rollout_ref.teacher.sleep_between_batches=true",
    )


class StateCommand(NamedTuple):
    """Change that a worker is to make.

    Attributes:
        timeout_s: Its time limit, in seconds.
    """

    worker: RegisteredWorker
    change: StateChange
    timeout_s: float


@dataclass(eq=False)
class _Waiter:
    """Open request of a client to sleep or wake up.

    Attributes:
        asleep: Requested state.
        deadline: Time at which it expires.
        failures: Workers that were lost while they changed their state: name -> reason.
        error: Error that ends it.
    """

    asleep: bool
    deadline: float
    failures: dict[str, str] = field(default_factory=dict)
    error: TeacherError | None = None


class SleepControl:
    """State of a service and of the requests to change it."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._asleep = False  # state that the workers are to have
        self._is_finishing = False
        self._was_requested = False
        self._waiters: dict[RequestKey, _Waiter] = {}
        self._change_ids = itertools.count(1)

    @property
    def state(self) -> str:
        """State of the service, as in the table."""
        if self._is_finishing:
            return "finishing"
        if self._asleep:
            return "asleep" if self._is_complete() else "falling asleep"
        return "waking" if any(not worker.can_score for worker in self._dispatcher.workers.values()) else "awake"

    @property
    def refuses_requests(self) -> bool:
        """True if new score requests are refused."""
        return self._asleep

    @property
    def waiting(self) -> list[RequestKey]:
        """Open requests to sleep or wake up."""
        return list(self._waiters)

    # --- requests of clients ---

    def request(self, key: RequestKey, message: SetAsleep, now: float) -> None:
        """Accept a request. A copy of an open request is ignored.

        Raises:
            TeacherRequestError: A worker cannot sleep.
        """
        if key in self._waiters:
            return
        incapable = [worker.name for worker in self._dispatcher.workers.values() if not worker.has_sleep_mode]
        if message.asleep and incapable:
            raise TeacherRequestError(
                f"workers without sleep mode: {', '.join(incapable)}",
                workers=tuple(incapable),
                options=_SLEEP_OPTIONS,
                remedy="start them with SLEEP_MODE=1 (--sleep-mode)",
            )
        self._was_requested = True
        self._waiters[key] = _Waiter(message.asleep, now + message.timeout_s)
        if message.asleep == self._asleep:
            return
        self._asleep = self._is_finishing = message.asleep
        new, old = ("sleep", "wake up") if message.asleep else ("wake up", "sleep")
        for waiter in self._waiters.values():
            if waiter.asleep != message.asleep:
                waiter.error = TeacherUnavailable(f"the request to {old} was followed by one to {new}, which counts")

    def cancel(self, key: RequestKey) -> None:
        """Forget a request. Changes of workers that have begun continue."""
        self._waiters.pop(key, None)
        self._stop_finishing_without_request()

    def _stop_finishing_without_request(self) -> None:
        if self._is_finishing and not any(waiter.asleep for waiter in self._waiters.values()):
            self._asleep = self._is_finishing = False

    # --- events of workers ---

    def check_worker(self, worker: RegisteredWorker) -> None:
        """Check that a new worker can have the state of the service.

        Raises:
            TeacherRequestError: The service sleeps and the worker cannot.
        """
        if self._asleep and not worker.has_sleep_mode:
            raise TeacherRequestError(
                "the service sleeps, and this worker would occupy its devices",
                options=_SLEEP_OPTIONS,
                remedy="start it with SLEEP_MODE=1 (--sleep-mode), or wake the service first (python -m teacher wake)",
            )

    def adopt_state_of(self, worker: RegisteredWorker) -> bool:
        """Take the state of a worker that has registered, if this proxy got no request yet. Return True if it sleeps.

        The jobs that no worker has are then to be refused.
        """
        if not worker.is_asleep or self._was_requested or self._asleep:
            return False
        self._asleep = True
        return True

    def on_reply(self, identity: bytes, message: AsleepSet) -> None:
        """Record the new state of a worker. A reply to an earlier change is ignored."""
        worker = self._dispatcher.workers.get(identity)
        if worker is not None and worker.change is not None and worker.change.change_id == message.request_id:
            worker.is_asleep, worker.change = message.asleep, None

    def on_lost(self, worker: RegisteredWorker, reason: str) -> None:
        """Record the loss of a worker that did not sign off."""
        if worker.change is not None:
            for waiter in self._waiters.values():
                if waiter.asleep == worker.change.asleep:
                    waiter.failures[worker.name] = reason

    # --- periodic ---

    def commands(self, now: float) -> Iterator[StateCommand]:
        """Yield the changes that workers are to begin now."""
        if self._is_finishing:
            self._is_finishing = len(self._dispatcher.open_jobs) > 0
        if self._is_finishing:
            return
        deadlines = [waiter.deadline for waiter in self._waiters.values() if waiter.asleep == self._asleep]
        until = max([*deadlines, now + 1.0]) if deadlines else now + UNREQUESTED_TIMEOUT_S
        for worker in list(self._dispatcher.workers.values()):
            will_sleep = worker.change.asleep if worker.change is not None else worker.is_asleep
            if will_sleep != self._asleep and worker.has_sleep_mode:
                worker.change = StateChange(next(self._change_ids), self._asleep, until)
                yield StateCommand(worker, worker.change, until - now)

    def replies(self, now: float) -> Iterator[tuple[RequestKey, AsleepSet | TeacherError]]:
        """Close the requests that are complete, failed or late, and yield their replies."""
        for key, waiter in list(self._waiters.items()):
            if (reply := self._reply(key, waiter, now)) is not None:
                self._waiters.pop(key, None)
                yield key, reply
        self._stop_finishing_without_request()

    def next_deadline(self) -> float | None:
        """Return the earliest deadline of a request, None without one."""
        return min((waiter.deadline for waiter in self._waiters.values()), default=None)

    def _reply(self, key: RequestKey, waiter: _Waiter, now: float) -> AsleepSet | TeacherError | None:
        verb = "fall asleep" if waiter.asleep else "wake up"
        if waiter.error is not None:
            return waiter.error
        n_workers = len(self._dispatcher.workers)
        if self._is_complete() and (waiter.asleep or n_workers or waiter.failures):
            if waiter.failures:
                return TeacherUnavailable(
                    f"{len(waiter.failures)} workers did not {verb}: {_listed(waiter.failures)}",
                    workers=tuple(waiter.failures),
                )
            return AsleepSet(key.request_id, waiter.asleep, n_workers)
        return self._deadline_error(waiter, verb) if waiter.deadline <= now else None

    def _is_complete(self) -> bool:
        """Return True if all workers that can sleep have the state of the service."""
        return not self._is_finishing and all(
            worker.change is None and worker.is_asleep == self._asleep
            for worker in self._dispatcher.workers.values()
            if worker.has_sleep_mode
        )

    def _deadline_error(self, waiter: _Waiter, verb: str) -> TeacherError:
        if self._is_finishing:
            jobs = self._dispatcher.open_jobs
            return TeacherTimeout(
                f"{len(jobs)} requests of {len({job.key.client for job in jobs})} clients were not finished before the "
                "deadline, so the service stays awake",
                stage="finishing",
                remedy="raise the timeout, or stop the other clients",
            )
        late = [worker.name for worker in self._dispatcher.workers.values() if worker.change is not None]
        if not late:
            return TeacherWithoutWorker(
                f"the proxy has no worker to wake up (last removal: {self._dispatcher.last_removal})",
                remedy="add one with teacher/join_server.sh",
            )
        failures = f"; {_listed(waiter.failures)}" if waiter.failures else ""
        return TeacherTimeout(
            f"workers did not {verb} before the deadline: {', '.join(late)}{failures}",
            stage="changing",
            workers=(*late, *waiter.failures),
            remedy="raise the timeout, or see their logs",
        )


def _listed(failures: Mapping[str, str]) -> str:
    return "; ".join(f"worker {name} {reason}" for name, reason in failures.items())

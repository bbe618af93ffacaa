"""Client side of the proxy: requests in, replies out, deadlines, cancellations, lost clients.

A hello waits here for the first worker. A score request goes to the dispatcher, whose table has the states of a
request.
"""

from __future__ import annotations

import logging
from collections.abc import KeysView

from teacher.errors import TeacherError, TeacherProtocolError, TeacherTimeout, TeacherWithoutWorker
from teacher.proxy.admission import QueueFull
from teacher.proxy.dispatch import Dispatcher
from teacher.proxy.drain import DRAIN_REASON, Drain
from teacher.proxy.jobs import Job, RegisteredWorker, RequestKey
from teacher.proxy.outbox import Outbox
from teacher.proxy.proxy_sockets import ProxySockets, send_to_peer
from teacher.proxy.sleep_control import SleepControl, asleep_error
from teacher.proxy.status_tracker import StatusTracker
from teacher.records import TeacherInfo
from teacher.wire import protocol
from teacher.wire.frames import Frame
from teacher.wire.limits import PROTOCOL_VERSION
from teacher.wire.messages import (
    AsleepSet,
    Cancel,
    Failure,
    Hello,
    Info,
    Message,
    Probe,
    RetryLater,
    Score,
    SetAsleep,
    Status,
    StatusRequest,
)
from teacher.wire.sockets import DIAGNOSIS_HINT

logger = logging.getLogger(__name__)

_MAX_WAITING_HELLOS = 1024
_MAX_SLEEP_REQUESTS = 1024
_MIN_STATUS_AGE_PER_REQUEST_S = 1e-5
"""Age below which a status is reused, per open request, in seconds. Computing a status costs about that much."""


class ClientSide:
    """Handling of client messages, and replies to clients."""

    def __init__(
        self,
        sockets: ProxySockets,
        dispatcher: Dispatcher,
        tracker: StatusTracker,
        drain: Drain,
        sleep: SleepControl,
    ) -> None:
        self._frontend, self._backend = sockets.frontend, sockets.backend
        self._dispatcher, self._tracker, self._drain, self._sleep = dispatcher, tracker, drain, sleep
        self._outbox = Outbox(sockets.frontend)
        self._hello_deadlines: dict[RequestKey, float] = {}

    @property
    def blocked_clients(self) -> KeysView[bytes]:
        """Clients that do not read their replies."""
        return self._outbox.blocked_clients

    # --- messages from clients ---

    def on_message(self, client: bytes, peer: str, message: Message, frames: list[Frame], now: float) -> None:
        """Handle a valid message.

        Raises:
            TeacherProtocolError: Clients do not send this message.
        """
        self._tracker.record_client(client, peer, now)
        match message:
            case Score():
                self._on_score(RequestKey(client, message.request_id), message, frames, now)
            case Cancel():
                self._cancel(RequestKey(client, message.request_id))
            case Hello():
                self._on_hello(RequestKey(client, message.request_id), now + message.timeout_s)
            case SetAsleep():
                self._on_set_asleep(RequestKey(client, message.request_id), message, now)
            case StatusRequest():
                if now - self._tracker.latest_at > _MIN_STATUS_AGE_PER_REQUEST_S * len(self._dispatcher.open_jobs):
                    self._tracker.refresh(now, draining=self._drain.is_active)
                self.reply(client, protocol.encode(Status(message.request_id, self._tracker.latest)))
            case _:
                raise TeacherProtocolError(
                    f"a client cannot send {type(message).__name__}",
                    entry="kind",
                    remedy="if it is a worker, set it to the worker port",
                )

    def on_invalid_message(self, client: bytes, request_id: int, error: TeacherProtocolError) -> None:
        """Reply to a message that could not be decoded."""
        send_to_peer(self._frontend, client, protocol.encode(Failure(request_id, error)))

    def _on_score(self, key: RequestKey, message: Score, frames: list[Frame], now: float) -> None:
        if self._drain.is_active:
            self._retry_later(key, DRAIN_REASON)
            return
        if self._sleep.refuses_requests and not self._dispatcher.is_open(key):
            self.reply_error(key, asleep_error())
            return
        try:
            self._dispatcher.add_job(key, frames, message.n_tokens, message.n_ids, now + message.timeout_s, now)
        except QueueFull as full:
            self._tracker.count(retried_later=1)
            self._retry_later(key, str(full))

    def _on_set_asleep(self, key: RequestKey, message: SetAsleep, now: float) -> None:
        if self._drain.is_active:
            self._retry_later(key, DRAIN_REASON)
            return
        if len(self._sleep.waiting) >= _MAX_SLEEP_REQUESTS:
            self._retry_later(key, f"{_MAX_SLEEP_REQUESTS} requests to sleep or wake up are open already")
            return
        try:
            self._sleep.request(key, message, now)
        except TeacherError as error:
            self.reply_error(key, error)

    def _on_hello(self, key: RequestKey, deadline: float) -> None:
        if len(self._hello_deadlines) >= _MAX_WAITING_HELLOS:
            self._retry_later(key, f"{_MAX_WAITING_HELLOS} clients wait for a worker already")
            return
        self._hello_deadlines[key] = deadline
        self.answer_hellos()

    def _cancel(self, key: RequestKey) -> None:
        self._hello_deadlines.pop(key, None)
        self._sleep.cancel(key)
        if (canceled := self._dispatcher.cancel(key)) is not None:
            self._tracker.count(canceled=1)
            self._cancel_at_worker(*canceled)

    def _cancel_at_worker(self, job: Job, worker: RegisteredWorker | None) -> None:
        if worker is not None:
            send_to_peer(self._backend, worker.identity, protocol.encode(Cancel(job.job_id)))

    # --- replies to clients ---

    def reply(self, client: bytes, frames: list[Frame]) -> None:
        """Send a message to a client. A disconnected client's requests are canceled."""
        if not self._outbox.send(client, frames):
            self._on_client_lost(client, "its connection ended")

    def reply_error(self, key: RequestKey, error: TeacherError) -> None:
        """Send the error of a request."""
        self.reply(key.client, protocol.encode(Failure(key.request_id, error)))

    def _retry_later(self, key: RequestKey, reason: str) -> None:
        self.reply(key.client, protocol.encode(RetryLater(key.request_id, reason)))

    def answer_hellos(self) -> None:
        """Answer the waiting hellos if there is a worker."""
        if (model := self._dispatcher.info) is None:
            return
        n_workers = len(self._dispatcher.workers)
        info = TeacherInfo(**vars(model), protocol_version=PROTOCOL_VERSION, n_workers=n_workers)
        for key in list(self._hello_deadlines):
            self.reply(key.client, protocol.encode(Info(key.request_id, info)))
        self._hello_deadlines.clear()

    def expire(self, now: float) -> None:
        """Reply to the requests and hellos whose deadline has passed."""
        for job, worker in self._dispatcher.expire(now):
            self._tracker.count(expired=1)
            self._cancel_at_worker(job, worker)
            self.reply_error(job.key, _deadline_error(self._dispatcher, worker))
        for key in [key for key, deadline in self._hello_deadlines.items() if deadline <= now]:
            if self._hello_deadlines.pop(key, None) is not None:  # None if its client was lost in this loop
                self.reply_error(key, _no_worker_error(self._dispatcher))

    def next_deadline(self) -> float | None:
        """Return the earliest time at which ``expire`` or ``flush`` has work, None if there is none."""
        times = [
            *self._hello_deadlines.values(),
            self._dispatcher.next_deadline(),
            self._outbox.retry_at(),
            self._sleep.next_deadline(),
        ]
        return min((time for time in times if time is not None), default=None)

    def answer_sleep_requests(self, now: float) -> None:
        """Reply to the requests to sleep or wake up that are complete, failed or late."""
        for key, reply in list(self._sleep.replies(now)):
            if isinstance(reply, TeacherError):
                self.reply_error(key, reply)
            else:
                frames = protocol.encode(AsleepSet(key.request_id, asleep=reply.asleep, n_workers=reply.n_workers))
                self.reply(key.client, frames)

    def refuse_waiting(self) -> None:
        """Fail all requests that no worker has, because the service sleeps."""
        for job in self._dispatcher.drop_waiting():
            self.reply_error(job.key, asleep_error())

    def return_waiting(self) -> None:
        """Return all requests that no worker has, and all hellos, to their clients."""
        for key in [*(job.key for job in self._dispatcher.drop_waiting()), *self._hello_deadlines]:
            self._retry_later(key, DRAIN_REASON)
        self._hello_deadlines.clear()

    def return_all(self) -> None:
        """Return all open requests to their clients, before the sockets are closed."""
        for job in self._dispatcher.open_jobs:
            self._outbox.send(job.key.client, protocol.encode(RetryLater(job.key.request_id, DRAIN_REASON)))

    # --- lost clients ---

    def flush(self) -> None:
        """Send waiting replies, and drop the clients that are disconnected or never read."""
        for client in self._outbox.flush():
            self._on_client_lost(client, "it does not read its replies")

    def probe(self) -> None:
        """Detect disconnected clients with open requests. libzmq reports a disconnection only to a sender."""
        waiting = {job.key.client for job in self._dispatcher.open_jobs} | {key.client for key in self._sleep.waiting}
        for client in waiting - self.blocked_clients:
            if not send_to_peer(self._frontend, client, protocol.encode(Probe())):
                self._on_client_lost(client, "its connection ended")

    def _on_client_lost(self, client: bytes, reason: str) -> None:
        self._outbox.forget(client)
        keys = [job.key for job in self._dispatcher.open_jobs if job.key.client == client]
        if keys:
            name = self._tracker.name_of(client)
            logger.warning("canceled %d requests of the lost client %s: %s", len(keys), name, reason)
        keys += [key for key in self._sleep.waiting if key.client == client]
        for key in keys:
            self._cancel(key)


def _deadline_error(dispatcher: Dispatcher, worker: RegisteredWorker | None) -> TeacherError:
    """Return the error of a request whose deadline passed at a worker, or in the queue."""
    if worker is not None:
        return TeacherTimeout(
            "had the request but did not finish it in time: it may be slow, or its engine may hang",
            worker=f"worker {worker.name}",
            workers=(worker.name,),
            stage="scoring",
            remedy=f"raise the timeout, add workers, or {DIAGNOSIS_HINT}",
        )
    if n_workers := len(dispatcher.workers):
        return TeacherTimeout(
            f"all {n_workers} workers were busy until the deadline",
            stage="queued",
            remedy="add workers, or raise the timeout",
        )
    return _no_worker_error(dispatcher)


def _no_worker_error(dispatcher: Dispatcher) -> TeacherWithoutWorker:
    return TeacherWithoutWorker(
        f"the proxy has no worker (last removal: {dispatcher.last_removal})",
        remedy="look at the worker's log, or add one with teacher/join_server.sh",
    )

"""Worker side of the proxy: registration, assignment of requests, results, lost workers.

A worker as seen by the proxy:

============  ===============================================  ============  ==========================================
state         event                                            next state    action
============  ===============================================  ============  ==========================================
unknown       Ready with the service's model                   registered    Welcome; waiting hellos are answered
unknown       Ready with another model                         unknown       Failure with request id 0
unknown       any other message                                unknown       Reregister, once per heartbeat timeout
registered    ScoreReply or Failure                            registered    result is sent to the client
registered    Heartbeat                                        registered    progress is recorded
registered    AsleepSet                                        registered    state is recorded (``sleep_control``)
registered    Ready                                            registered    its requests are requeued; Welcome
registered    Goodbye                                          unknown       its requests are requeued
registered    connection lost, or silent (``liveness``)        unknown       its requests are requeued with a loss
============  ===============================================  ============  ==========================================
"""

from __future__ import annotations

import logging
import time

from teacher.errors import TeacherError, TeacherProtocolError
from teacher.proxy.client_side import ClientSide
from teacher.proxy.dispatch import Dispatcher
from teacher.proxy.drain import Drain
from teacher.proxy.jobs import RegisteredWorker
from teacher.proxy.proxy_sockets import ProxySockets, send_to_peer
from teacher.proxy.sleep_control import SleepControl
from teacher.proxy.status_tracker import StatusTracker
from teacher.records import ModelInfo
from teacher.wire import protocol
from teacher.wire.frames import Frame
from teacher.wire.messages import (
    AsleepSet,
    Failure,
    Goodbye,
    Heartbeat,
    Message,
    Ready,
    Reregister,
    ScoreReply,
    SetAsleep,
    Welcome,
)
from teacher.wire.sockets import WORKER_HEARTBEAT

logger = logging.getLogger(__name__)

CONNECTION_LOST = f"died or hung: its connection ended, or was silent for {WORKER_HEARTBEAT.timeout_s:g} s"
_MIN_REMAINING_S = 0.001


class WorkerSide:
    """Handling of worker messages, and assignment of requests to workers."""

    def __init__(
        self,
        sockets: ProxySockets,
        dispatcher: Dispatcher,
        tracker: StatusTracker,
        drain: Drain,
        sleep: SleepControl,
        clients: ClientSide,
    ) -> None:
        self._backend = sockets.backend
        self._dispatcher, self._tracker, self._drain, self._clients = dispatcher, tracker, drain, clients
        self._sleep = sleep
        self._next_reregister_at: dict[bytes, float] = {}

    # --- messages from workers ---

    def on_message(self, identity: bytes, peer: str, message: Message, frames: list[Frame], now: float) -> None:
        """Handle a valid message.

        Raises:
            TeacherProtocolError: Workers do not send this message.
        """
        if isinstance(message, Ready):
            self._register(identity, message, now)
        elif isinstance(message, Goodbye):
            self.remove(identity, f"left: {message.reason}", signed_off=not message.broken)
        elif not isinstance(message, ScoreReply | Failure | Heartbeat | AsleepSet):
            raise TeacherProtocolError(
                f"a worker cannot send {type(message).__name__}",
                entry="kind",
                remedy="if it is a client, set it to the proxy's client port",
            )
        elif identity not in self._dispatcher.workers:
            self._request_registration(identity, now)
        elif isinstance(message, Heartbeat):
            self._tracker.record_worker(identity, now, message)
        elif isinstance(message, AsleepSet):
            self._tracker.record_worker(identity, now)
            self._sleep.on_reply(identity, message)
        else:
            self._on_result(identity, message, frames, now)

    def on_invalid_message(self, identity: bytes, request_id: int, error: TeacherProtocolError) -> None:
        """Handle a message that could not be decoded.

        An invalid result ends its request, because another worker of the same version would send the same.
        """
        if (job := self._dispatcher.finish(identity, request_id)) is not None:
            self._clients.reply_error(job.key, error)
        else:
            send_to_peer(self._backend, identity, protocol.encode(Failure(request_id, error)))

    def _on_result(self, identity: bytes, message: ScoreReply | Failure, frames: list[Frame], now: float) -> None:
        self._tracker.record_worker(identity, now)
        if (job := self._dispatcher.finish(identity, message.request_id)) is None:
            return
        self._tracker.record_result(job, message, frames, now)
        if isinstance(message, Failure):
            self._clients.reply_error(job.key, message.error)
        else:
            self._clients.reply(job.key.client, protocol.readdress(frames, job.key.request_id))

    # --- registration ---

    def _register(self, identity: bytes, ready: Ready, now: float) -> None:
        if identity in self._dispatcher.workers:  # a worker that sends Ready has dropped all its requests
            self.remove(identity, "registered again", signed_off=True)
        self._next_reregister_at.pop(identity, None)
        worker = RegisteredWorker(
            *(identity, ready.name, ready.info, ready.capacity_tokens, ready.stall_timeout_s),
            has_sleep_mode=ready.has_sleep_mode,
            is_asleep=ready.is_asleep,
        )
        try:
            self._sleep.check_worker(worker)
            self._dispatcher.add_worker(worker)
        except TeacherError as error:
            logger.warning("refused worker %s: %s", ready.name, error)
            send_to_peer(self._backend, identity, protocol.encode(Failure(0, error)))
            return
        self._tracker.record_registration(identity, now)
        logger.info(
            "worker %s joined with %s", ready.name, _summary(ready.info), extra={"fields": {"worker": ready.name}}
        )
        send_to_peer(self._backend, identity, protocol.encode(Welcome()))
        if self._sleep.adopt_state_of(worker):
            logger.warning(
                "worker %s registered asleep, so the service sleeps; see `python -m teacher wake`", worker.name
            )
            self._clients.refuse_waiting()
        self._clients.answer_hellos()

    def _request_registration(self, identity: bytes, now: float) -> None:
        """Send Reregister, and not again until the worker has had time to receive it."""
        if self._next_reregister_at.get(identity, 0.0) <= now:
            self._next_reregister_at[identity] = now + WORKER_HEARTBEAT.timeout_s
            send_to_peer(self._backend, identity, protocol.encode(Reregister()))

    def forget_reregistrations(self, now: float) -> None:
        """Drop the records of old Reregister messages, to bound their memory."""
        self._next_reregister_at = {key: at for key, at in self._next_reregister_at.items() if at > now}

    # --- assignment and loss ---

    def assign(self) -> None:
        """Send waiting requests to the workers with room. Clients that do not read are paused."""
        while (assignment := self._dispatcher.assign(self._clients.blocked_clients)) is not None:
            worker, job = assignment
            job.assigned_at = time.monotonic()
            remaining_s = max(_MIN_REMAINING_S, job.deadline - job.assigned_at)
            frames = protocol.readdress(job.frames, job.job_id, remaining_s)
            if not send_to_peer(self._backend, worker.identity, frames):
                self.remove(worker.identity, CONNECTION_LOST)

    def send_state_commands(self, now: float) -> None:
        """Send the changes between awake and asleep that workers are to begin."""
        for worker, change, timeout_s in list(self._sleep.commands(now)):
            logger.info("worker %s: %s", worker.name, worker.state)
            frames = protocol.encode(SetAsleep(change.change_id, timeout_s, asleep=change.asleep))
            if not send_to_peer(self._backend, worker.identity, frames):
                self.remove(worker.identity, CONNECTION_LOST)

    def remove(self, identity: bytes, reason: str, *, signed_off: bool = False) -> None:
        """Remove a worker and requeue its requests. An unknown worker is ignored.

        Args:
            identity: ZeroMQ identity of the worker.
            reason: Cause, for the log and the status.
            signed_off: True if it ended gracefully, so that none of its requests can be the cause.
        """
        worker = self._dispatcher.workers.get(identity)
        if worker is None:
            return
        if not signed_off:
            self._sleep.on_lost(worker, reason)
        removed = self._dispatcher.remove_worker(identity, reason, signed_off=signed_off)
        n_requeued, n_workers = len(removed.requeued), len(self._dispatcher.workers)
        logger.log(
            logging.INFO if signed_off else logging.WARNING,
            "worker %s was removed, %d of its requests wait again: %s",
            worker.name,
            n_requeued,
            reason,
            extra={"fields": {"worker": worker.name, "requeued": n_requeued, "workers": n_workers}},
        )
        self._tracker.record_removal(
            identity, signed_off=signed_off, n_requeued=n_requeued, n_rejected=len(removed.rejected)
        )
        for job, error in removed.rejected:
            self._clients.reply_error(job.key, error)
        if self._drain.is_active:
            self._clients.return_waiting()


def _summary(info: ModelInfo) -> str:
    return f"{info.model_name} ({info.engine}), top {info.n_logprobs} of {info.n_tokens}, {info.max_model_len} tokens"

"""Peers that send any message to a proxy, and wait until it was handled."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from teacher.wire.messages import (
    AsleepSet,
    Failure,
    Hello,
    Message,
    Reregister,
    Score,
    ScoreReply,
    SetAsleep,
    StatusRequest,
    Welcome,
)
from tests._support.teacher_requests import RawPeer
from tests.fuzz.hostile import Frames, readdressed
from tests.fuzz.messages import READY, SEQUENCES, scores
from tests.fuzz.proxy_process import DEADLINE_S, ProxyProcess

_BARRIER_ID = 1 << 45
_POLL_S = 0.02
_ALIVE_POLL_S = 0.5


def _receive(peer: RawPeer, proxy: ProxyProcess) -> Message:
    """Return the next message of a proxy, which must live."""
    deadline = time.monotonic() + DEADLINE_S
    while (message := peer.receive_or_none(_ALIVE_POLL_S)) is None:
        proxy.ensure_alive()
        assert time.monotonic() < deadline, "the proxy sent no message"
    return message


class HostileClient:
    """Client that sends messages. A status request follows them, whose reply shows that they were handled."""

    def __init__(self, proxy: ProxyProcess) -> None:
        self._proxy, self._peer, self._n_barriers = proxy, RawPeer(proxy.port), 0

    def send(self, messages: list[Frames]) -> None:
        """Send messages, and return when the proxy has handled them."""
        self._n_barriers += 1
        for frames in messages:
            self._peer.socket.send_multipart(readdressed(frames, self._n_barriers) or [b""])
        barrier_id = _BARRIER_ID + self._n_barriers
        self._peer.send(StatusRequest(barrier_id, DEADLINE_S))
        while getattr(_receive(self._peer, self._proxy), "request_id", 0) != barrier_id:
            pass

    def close(self) -> None:
        """Close the connection."""
        self._peer.close()


class HostileWorker:
    """Worker with a request that sends messages. A message that workers do not send follows them, and is refused."""

    def __init__(self, proxy: ProxyProcess) -> None:
        self._proxy, self._peer = proxy, RawPeer(proxy.backend_port)
        self._is_registered, self._n_barriers, self._job_id = False, 0, 0
        self._request: Future[Any] | None = None

    def send(self, messages: list[Frames]) -> None:
        """Send messages as the reply to a request, and return when the proxy has handled them."""
        self._ensure_job()
        for frames in messages:
            self._peer.socket.send_multipart(readdressed(frames, self._job_id) or [b""])
        self._barrier()

    def check_serves(self) -> None:
        """Check that a valid worker can register and score."""
        self._proxy.ensure_alive()
        self._is_registered = False
        self._ensure_job()
        self._peer.send(ScoreReply(self._job_id, scores(SEQUENCES)))
        assert self._request is not None
        assert len(self._request.result(timeout=DEADLINE_S)) == len(SEQUENCES)

    def _ensure_job(self) -> None:
        """Register again if the last messages ended the registration, and get a request if there is none."""
        deadline = time.monotonic() + DEADLINE_S
        while not self._has_job():
            assert time.monotonic() < deadline, "a worker could not register, or got no request"

    def _has_job(self) -> bool:
        if not self._is_registered:
            self._peer.send(READY)
            self._is_registered, self._job_id = True, 0
            self._barrier()
        if self._request is None or self._request.done():
            self._proxy.client.submit_wake()  # a changed Ready may have let the service sleep
            self._request, self._job_id = self._proxy.client.submit(SEQUENCES), 0
        if not self._job_id:
            message = self._peer.receive_or_none(_POLL_S)
            if message is None:
                self._is_registered = False  # a changed Goodbye has no reply
            else:
                self._follow(message)
        return self._is_registered and self._job_id != 0

    def _barrier(self) -> None:
        """Wait until the proxy has read everything before."""
        self._n_barriers += 1
        barrier_id = _BARRIER_ID + self._n_barriers
        self._peer.send(Hello(barrier_id, DEADLINE_S))
        while getattr(message := _receive(self._peer, self._proxy), "request_id", 0) != barrier_id:
            self._follow(message)

    def _follow(self, message: Message) -> None:
        """Update the state of the worker by a message of the proxy."""
        if isinstance(message, Reregister) or (isinstance(message, Failure) and message.request_id == 0):
            self._is_registered = False
        elif isinstance(message, Score):
            self._job_id = message.request_id
        elif isinstance(message, Welcome):
            self._is_registered, self._job_id = True, 0
        elif isinstance(message, SetAsleep):
            self._peer.send(AsleepSet(message.request_id, asleep=message.asleep, n_workers=1))

    def close(self) -> None:
        """Close the connection."""
        self._peer.close()

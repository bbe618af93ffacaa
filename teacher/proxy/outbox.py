"""What is sent to clients, also to one that does not read: bounded, and without holding up the others.

ZeroMQ keeps a few messages for each client. When those are not read, the rest waits here, and the client is in
`unread`: no more of its requests are dealt until it has read, so what waits is at most what was in flight for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import KeysView

import zmq

from teacher.wire.frames import Frame
from teacher.wire.sockets import send

_RETRY_S = 0.001
_MAX_WAITING = 1 << 20  # messages: answers are bounded by what was in flight, what else there is has about 100 bytes


class Outbox:
    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        self._waiting: dict[bytes, deque[list[Frame]]] = {}
        self._retry_at = 0.0

    @property
    def unread(self) -> KeysView[bytes]:
        return self._waiting.keys()

    def send(self, client: bytes, frames: list[Frame]) -> bool:
        """False if the client has gone."""
        if client in self._waiting:
            self._waiting[client].append(frames)
            return True
        try:
            send(self._socket, [client, *frames])
        except zmq.Again:
            self._waiting[client] = deque([frames])
            self._retry_at = time.monotonic() + _RETRY_S
        except zmq.ZMQError:
            return False
        return True

    def next_try(self) -> float | None:
        return self._retry_at if self._waiting else None

    def flush(self) -> list[bytes]:
        """Send what is read by now. Returns the clients that have gone, or never read."""
        if not self._waiting or time.monotonic() < self._retry_at:
            return []
        gone = []
        for client, waiting in list(self._waiting.items()):
            try:
                while waiting:
                    send(self._socket, [client, *waiting[0]])
                    waiting.popleft()
                del self._waiting[client]
            except zmq.Again:
                if len(waiting) > _MAX_WAITING:
                    gone.append(client)
            except zmq.ZMQError:
                gone.append(client)
        self._retry_at = time.monotonic() + _RETRY_S
        return gone

    def forget(self, client: bytes) -> None:
        self._waiting.pop(client, None)

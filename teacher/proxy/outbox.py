"""Replies to clients, with bounded memory and without waiting for a client that does not read.

ZeroMQ queues a few messages for each client. If they are not read, further messages wait here, and the client is in
``blocked_clients``. No requests of such a client are assigned until it has read, so its waiting messages are bounded
by its requests in flight.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import KeysView

import zmq

from teacher.wire.frames import Frame
from teacher.wire.sockets import send

_RETRY_S = 0.001
_MAX_WAITING_MESSAGES = 1 << 20  # replies are bounded by the requests in flight; other messages have about 100 bytes


class Outbox:
    """Messages that wait because their client does not read."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        self._waiting: dict[bytes, deque[list[Frame]]] = {}
        self._retry_at = 0.0

    @property
    def blocked_clients(self) -> KeysView[bytes]:
        """Clients with waiting messages."""
        return self._waiting.keys()

    def send(self, client: bytes, frames: list[Frame]) -> bool:
        """Send a message, or keep it until the client reads. Return False if the client is disconnected."""
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

    def retry_at(self) -> float | None:
        """Return the time at which ``flush`` is to be called, None if no message waits."""
        return self._retry_at if self._waiting else None

    def flush(self) -> list[bytes]:
        """Send waiting messages. Return the clients that are disconnected or have too many waiting messages."""
        if not self._waiting or time.monotonic() < self._retry_at:
            return []
        lost = []
        for client, waiting in list(self._waiting.items()):
            try:
                while waiting:
                    send(self._socket, [client, *waiting[0]])
                    waiting.popleft()
                del self._waiting[client]
            except zmq.Again:
                if len(waiting) > _MAX_WAITING_MESSAGES:
                    lost.append(client)
            except zmq.ZMQError:
                lost.append(client)
        self._retry_at = time.monotonic() + _RETRY_S
        return lost

    def forget(self, client: bytes) -> None:
        """Drop the waiting messages of a client."""
        self._waiting.pop(client, None)

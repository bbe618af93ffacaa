"""Requests to a teacher service, and a raw peer that speaks the protocol."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import zmq

from teacher.records import TeacherSequence
from teacher.wire import protocol
from teacher.wire.messages import Message, Probe, Score
from tests._support.waiting import PATIENCE_S


def make_sequence(*token_ids: int, prompt_len: int = 1) -> TeacherSequence:
    """Return a sequence of these tokens."""
    return TeacherSequence(np.array(token_ids, np.int32), prompt_len)


class RawPeer:
    """Client or worker that sends and receives single messages. Unlike ``TeacherClient``, it shows every reply."""

    def __init__(self, port: int, **options: int | bytes) -> None:
        """Connect to a port of a proxy. ``options`` are ZeroMQ socket options by name."""
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(f"tcp://127.0.0.1:{port}")

    def submit(self, request_id: int, sequences: list[TeacherSequence], timeout_s: float = PATIENCE_S) -> None:
        """Send a score request."""
        self.send(Score(request_id, timeout_s, sequences))

    def send(self, message: Message) -> None:
        """Send a message."""
        self.socket.send_multipart(protocol.encode(message))

    def receive(self, timeout_s: float = PATIENCE_S) -> Message:
        """Return the next message that is no probe, and fail the test at the deadline."""
        message = self.receive_or_none(timeout_s)
        assert message is not None, f"no message within {timeout_s} s"
        return message

    def receive_or_none(self, timeout_s: float) -> Message | None:
        """Return the next message that is no probe, None if there is none before the timeout."""
        while self.socket.poll(int(1000 * max(0.0, timeout_s))):
            message = protocol.decode(self.socket.recv_multipart())
            if not isinstance(message, Probe):
                return message
        return None

    def close(self) -> None:
        """Close the socket without sending queued messages."""
        self._context.destroy(linger=0)


@contextmanager
def raw_peer(port: int, **options: int | bytes) -> Iterator[RawPeer]:
    """Yield a raw peer of a port, and close it."""
    peer = RawPeer(port, **options)
    try:
        yield peer
    finally:
        peer.close()

"""A service whose messages are written by the test, one by one."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import zmq

from teacher.records import ScoredSequence, TeacherSequence
from teacher.wire import protocol
from teacher.wire.auth import ServerKeys
from teacher.wire.messages import Message, Score, ScoreReply
from teacher.wire.sockets import CLIENT_HEARTBEAT, make_socket
from tests._support.waiting import PATIENCE_S

M = TypeVar("M", bound=Message)


class ScriptedService:
    """A ROUTER socket. Each receive has a time limit of 5 s by default.

    Attributes:
        port: Frontend port.
        client: Identity of the client that sent the last message.
    """

    def __init__(self, port: int = 0, keys: ServerKeys | None = None) -> None:
        self.context = zmq.Context()
        self._socket = make_socket(
            self.context, zmq.ROUTER, max_frame_bytes=1 << 30, heartbeat=CLIENT_HEARTBEAT, keys=keys
        )
        self._socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        self.port = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self.client = b""

    def __enter__(self) -> ScriptedService:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.context.destroy(linger=0)

    def receive(self, kind: type[M], timeout_s: float = PATIENCE_S) -> M:
        message = self.receive_any(timeout_s)
        assert isinstance(message, kind), message
        return message

    def receive_any(self, timeout_s: float = 5.0) -> Message | None:
        """Return the next message, or None if none arrives in time."""
        if not self._socket.poll(int(1000 * timeout_s)):
            return None
        self.client, *frames = self._socket.recv_multipart()
        return protocol.decode(frames)

    def send(self, message: Message | list[bytes]) -> None:
        frames = protocol.encode(message) if isinstance(message, Message) else message
        self._socket.send_multipart([self.client, *frames])

    def reply(self, request: Score) -> None:
        scores = [expected_scores(one).reduced(request.top_k, request.wire_dtype) for one in request.sequences]
        self.send(ScoreReply(request.request_id, scores))


def sequence(n_tokens: int, first: int = 0, prompt_len: int = 1) -> TeacherSequence:
    return TeacherSequence(np.arange(first, first + n_tokens, dtype=np.int32), prompt_len)


def expected_scores(sequence: TeacherSequence, k: int = 6) -> ScoredSequence:
    """Return scores that depend on every response token, so that exchanged results are noticed."""
    response_T = sequence.scored_ids_T
    topk_ids_TK = response_T[:, None] + np.arange(k, dtype=np.int32)
    return ScoredSequence(-topk_ids_TK.astype(np.float32) / 7, topk_ids_TK, -response_T.astype(np.float32) / 3)


def assert_scores(results: list[ScoredSequence], sequences: list[TeacherSequence], k: int = 6) -> None:
    for got, sequence in zip(results, sequences, strict=True):
        want = expected_scores(sequence, k)
        np.testing.assert_array_equal(got.topk_ids_TK, want.topk_ids_TK)
        np.testing.assert_array_equal(got.topk_logps_TK, want.topk_logps_TK)
        np.testing.assert_array_equal(got.sampled_logps_T, want.sampled_logps_T)

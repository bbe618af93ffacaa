"""A real client and a real worker in threads of this process, whose service sends them any messages."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from teacher.client import TeacherClient
from teacher.errors import TeacherAsleep, TeacherClosed, TeacherError, TeacherProtocolError, TeacherRequestError
from teacher.records import LogitSettings, ScoredSequence, TeacherSequence
from teacher.wire.messages import AsleepSet, Failure, Message, Ready, Score, ScoreReply, SetAsleep, Welcome
from teacher.wire.protocol import decode  # the function itself, so that a decoder planted in the receiver is not used
from tests._support.fake_worker import FakeEngine, RunningWorker
from tests._support.scripted_service import ScriptedService
from tests.fuzz.hostile import Frames, header_of, readdressed
from tests.fuzz.messages import MODEL, SEQUENCES, scores

DEADLINE_S = 20.0
_POLL_S = 0.2
_WAKE_ID = 1 << 40


class StrictEngine(FakeEngine):
    """Engine that refuses what the real one refuses, and returns prepared scores for everything else."""

    def __init__(self) -> None:
        super().__init__(MODEL)

    def set_logits(self, settings: LogitSettings) -> None:
        self.logits = settings

    def check(self, sequence: TeacherSequence, settings: LogitSettings) -> None:
        ids, n_ids = sequence.token_ids, settings.n_ids or self.info.n_tokens
        if len(ids) > self.info.max_model_len or settings.n_ids > self.info.n_tokens:
            raise TeacherRequestError(f"{len(ids)} tokens or {settings.n_ids} ids are too many")
        if ids.min() < 0 or ids.max() >= n_ids:
            raise TeacherRequestError(f"token ids must be 0 to {n_ids - 1}")

    def step(self) -> list[tuple[int, ScoredSequence | TeacherRequestError]]:
        key, sequence = self._waiting.popitem()
        return [(key, scores([sequence])[0])]


class ClientReceiver:
    """A ``TeacherClient`` that receives messages. Each is followed by an error reply, which ends the call."""

    def __init__(self) -> None:
        self._service = ScriptedService()
        self._client = TeacherClient(server_port=self._service.port, timeout_s=3 * DEADLINE_S)
        self._last_id = 0

    def handle(self, frames: Frames) -> None:
        """Start the call that fits the message, send the message as its reply, and wait for the call's end."""
        try:
            future = self._call(header_of(frames).get("kind"))
            request_id = self._receive_id()
            self._service.send(readdressed(frames, request_id))
            self._service.send(Failure(request_id, TeacherRequestError("the call was ended")))
            future.result(timeout=DEADLINE_S)
        except TeacherError as error:
            assert not isinstance(error, TeacherClosed), str(error)

    def _receive_id(self) -> int:
        """Return the id of the new request. Cancellations and repetitions of earlier ones are dropped."""
        request: Any = self._service.receive_any(DEADLINE_S)
        while request.request_id <= self._last_id:
            request = self._service.receive_any(DEADLINE_S)
        self._last_id = request.request_id
        return self._last_id

    def _call(self, kind: object) -> Future[Any]:
        match kind:
            case "info":
                return self._client.submit_hello()
            case "status":
                return self._client.submit_status(DEADLINE_S)
            case "asleep_set":
                return self._client.submit_sleep()
        return self._client.submit(SEQUENCES[:1])  # one request, whatever model the client was told

    def close(self) -> None:
        """End the client and its service."""
        self._client.close()
        self._service.close()


class WorkerReceiver:
    """A ``Worker`` that receives messages. Each is followed by a valid request, which it must score."""

    def __init__(self) -> None:
        self._n_requests = 0
        self._start()

    def _start(self) -> None:
        self._service = ScriptedService()
        self._worker = RunningWorker(self._service.port, StrictEngine())
        self._service.receive(Ready, DEADLINE_S)
        self._service.send(Welcome())

    def handle(self, frames: Frames) -> None:
        """Send the message and a valid request, and wait for its scores."""
        self._ensure_alive()
        self._service.send(frames)
        if _is_refused_registration(frames):
            self._worker.thread.join(timeout=DEADLINE_S)
            assert isinstance(self._worker.error, TeacherError), "a refused worker did not end in order"
            self.close()
            self._start()
        request_id = self._request()
        while not isinstance(message := self._receive(), ScoreReply) or message.request_id != request_id:
            match message:
                case Ready():
                    self._service.send(Welcome())
                    request_id = self._request()
                case AsleepSet(request_id=id) if id == _WAKE_ID:
                    request_id = self._request()
                case Failure(request_id=id, error=error) if id == request_id:
                    assert isinstance(error, TeacherAsleep), f"a valid request was refused: {error}"
                    self._service.send(SetAsleep(_WAKE_ID, DEADLINE_S, asleep=False))

    def _ensure_alive(self) -> None:
        assert self._worker.thread.is_alive(), f"the worker ended: {self._worker.error!r}"

    def _request(self) -> int:
        self._n_requests += 1
        self._service.send(Score(_WAKE_ID + self._n_requests, DEADLINE_S, SEQUENCES))
        return _WAKE_ID + self._n_requests

    def _receive(self) -> Message:
        deadline = time.monotonic() + DEADLINE_S
        while (message := self._service.receive_any(_POLL_S)) is None:
            self._ensure_alive()
            assert time.monotonic() < deadline, "the worker sent no message"
        return message

    def close(self) -> None:
        """End the worker and its service."""
        self._worker.stop()
        self._service.close()


def _is_refused_registration(frames: Frames) -> bool:
    """Return True for the refusal of a worker, which ends it."""
    try:
        message = decode(frames)
    except TeacherProtocolError:
        return False
    return isinstance(message, Failure) and message.request_id == 0

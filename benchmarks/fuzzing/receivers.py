"""Targets that run a real client or a real worker in this process, with a fuzzed service.

The service is a ROUTER socket of this module. After each mutated message the receiver must still handle a valid one.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import zmq

from fuzzing import seeds
from fuzzing.coverage import ArcTracer
from fuzzing.decoders import header_of
from fuzzing.engine import EndSignal, PreparedEngine
from fuzzing.memory import resident_bytes
from fuzzing.mutations import set_request_id
from fuzzing.targets import HANG_S, Defect, Frames, Hang
from teacher.client import TeacherClient
from teacher.errors import TeacherAsleep, TeacherClosed, TeacherError, TeacherProtocolError, TeacherRequestError
from teacher.wire import protocol
from teacher.wire.messages import AsleepSet, Failure, Message, Ready, Score, ScoreReply, SetAsleep, Welcome
from teacher.worker import Worker

_RENEWAL_INPUTS = 5000
"""Inputs after which a receiver is replaced, so that the start and the end are traced too."""
_BARRIER_ID = 1 << 40
_NO_ANSWER_S = 10.0
"""Time after which a receiver that does not answer is regarded as dead, not slow."""


class LoggedErrors(logging.Handler):
    """Collector of the tracebacks that the threads of ``teacher`` log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []
        logger = logging.getLogger("teacher")
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        """Store the exception of a record."""
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])

    def raise_first(self) -> None:
        """Raise the first error, and forget all."""
        if self.errors:
            error = self.errors[0]
            self.errors.clear()
            raise error

    def close(self) -> None:
        """Stop collecting."""
        logging.getLogger("teacher").removeHandler(self)
        super().close()


class Router:
    """Service that sends arbitrary frames to one peer.

    Attributes:
        port: Port.
        peer: Identity of the peer that sent the last message.
    """

    def __init__(self) -> None:
        """Bind to a free port."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.peer = b""

    def send(self, frames: list[Any]) -> None:
        """Send frames to the peer."""
        self._socket.send_multipart([self.peer, *frames])

    def receive(self, timeout_s: float = _NO_ANSWER_S) -> Message:
        """Return the next message.

        Raises:
            Hang: There is none.
            Defect: The peer sent a message that its receiver refuses.
        """
        if not self._socket.poll(int(1000 * timeout_s)):
            raise Hang(f"no message within {timeout_s:g} s")
        self.peer, *frames = self._socket.recv_multipart()
        try:
            return protocol.decode(frames)
        except TeacherProtocolError as error:
            raise Defect(f"a message was sent that its receiver refuses: {str(error)[:60]}") from error

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)


class ClientTarget:
    """A ``TeacherClient`` that receives mutated replies. Each is followed by an error reply, which ends the call."""

    name, is_message, is_stateful = "client", True, True

    def __init__(self) -> None:
        """Start a client."""
        self.seeds = seeds.to_clients()
        self._tracer, self._log = ArcTracer(), LoggedErrors()
        self._n_inputs = 0
        self._open()

    def _open(self) -> None:
        self._router = Router()
        self._tracer.start()  # the client's thread inherits the trace function
        self._client = TeacherClient(server_port=self._router.port, timeout_s=60.0)
        self._tracer.stop()

    def run(self, frames: Frames) -> bool:
        """Start the call that fits the reply, reply, and wait for the result."""
        self._n_inputs += 1
        if self._n_inputs % _RENEWAL_INPUTS == 0:
            self.reset()
        self._tracer.start()
        try:
            future = self._call(header_of(frames).get("kind"))
        finally:
            self._tracer.stop()
        request = self._router.receive()
        request_id = getattr(request, "request_id", 0)
        self._router.send(set_request_id(frames, seeds.REQUEST_ID, request_id))
        self._router.send(protocol.encode(Failure(request_id, TeacherRequestError("the call was ended"))))
        return self._result(future)

    def _call(self, kind: object) -> Future[Any]:
        match kind:
            case "info":
                return self._client.submit_hello()
            case "status":
                return self._client.submit_status(60.0)
            case "asleep_set":
                return self._client.submit_sleep()
        return self._client.submit(seeds.SEQUENCES)

    def _result(self, future: Future[Any]) -> bool:
        """Return True if the call has a result, False if it has a documented error."""
        try:
            future.result(timeout=HANG_S)
            accepted = True
        except TeacherError as error:  # before the next clause: a TeacherTimeout is a TimeoutError
            accepted = False
            if isinstance(error, TeacherClosed):
                self._log.raise_first()
                raise Defect("the client's thread ended") from error
        except FutureTimeout:
            self._log.raise_first()  # the cause, if the client's thread has ended without a result of the call
            raise Hang(f"the client had no result after {HANG_S:g} s") from None
        self._log.raise_first()
        return accepted

    def n_arcs(self) -> int:
        """Return the number of arcs."""
        return len(self._tracer.arcs)

    def resident_bytes(self) -> int | None:
        """Return the memory of this process."""
        return resident_bytes()

    def reset(self) -> None:
        """Replace client and service."""
        self._client.close()
        self._router.close()
        self._log.errors.clear()
        self._open()

    def close(self) -> None:
        """Close client and service."""
        self._client.close()
        self._router.close()
        self._log.close()


class WorkerTarget:
    """A ``Worker`` that receives mutated messages. Each is followed by a valid request, which it must score."""

    name, is_message, is_stateful = "worker", True, True

    def __init__(self) -> None:
        """Start a worker."""
        self.seeds = seeds.to_workers()
        self._tracer, self._log = ArcTracer(), LoggedErrors()
        self._n_barriers = 0
        self._router = Router()
        self._start()

    def _start(self) -> None:
        self._end = EndSignal()
        self._error: BaseException | None = None
        self._tracer.start()
        worker = Worker(PreparedEngine(), backend_port=self._router.port)
        self._thread = threading.Thread(target=self._run_worker, args=(worker,), daemon=True)
        self._thread.start()
        self._tracer.stop()
        self._finish_registration(self._router.receive())

    def _run_worker(self, worker: Worker) -> None:
        try:
            worker.run(self._end)
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the target
            self._error = error

    def _finish_registration(self, message: Message) -> None:
        if not isinstance(message, Ready):
            raise Defect(f"expected Ready, got {type(message).__name__}")
        self._router.send(protocol.encode(Welcome()))

    def run(self, frames: Frames) -> bool:
        """Send the message and a valid request, and wait for its scores."""
        self._router.send(frames)
        if self._is_refused_registration(frames):
            self._join()
            self._start()
            return True
        accepted = _is_valid(frames)
        self._score()
        self._log.raise_first()
        return accepted

    def _is_refused_registration(self, frames: Frames) -> bool:
        """Return True for the refusal of this worker, which ends it."""
        try:
            message = protocol.decode(frames)
        except TeacherProtocolError:
            return False
        return isinstance(message, Failure) and message.request_id == 0

    def _score(self) -> None:
        """Send a valid request until the worker, which may register again or sleep, scores it."""
        barrier_id = self._send_request()
        while True:
            try:
                message = self._router.receive()
            except Hang:
                if not self._thread.is_alive() and self._error is not None:
                    raise self._error from None
                raise
            if isinstance(message, Ready):
                self._finish_registration(message)
                barrier_id = self._send_request()
            elif isinstance(message, ScoreReply) and message.request_id == barrier_id:
                return
            elif isinstance(message, Failure) and message.request_id == barrier_id:
                if not isinstance(message.error, TeacherAsleep):
                    raise Defect(f"a valid request was refused: {str(message.error)[:100]}")
                self._router.send(protocol.encode(SetAsleep(_BARRIER_ID, 5.0, asleep=False)))
            elif isinstance(message, AsleepSet) and message.request_id == _BARRIER_ID:
                barrier_id = self._send_request()
            elif type(message).__name__ == "Goodbye":
                self._thread.join(timeout=HANG_S)
                raise self._error or Defect("the worker signed off")

    def _send_request(self) -> int:
        self._n_barriers += 1
        request_id = _BARRIER_ID + self._n_barriers
        self._router.send(protocol.encode(Score(request_id, 5.0, seeds.SEQUENCES)))
        return request_id

    def _join(self) -> None:
        """Wait for the worker's end, and raise its error if it is not a documented one."""
        self._thread.join(timeout=_NO_ANSWER_S)
        if self._thread.is_alive():
            raise Hang("the worker did not end after its registration was refused")
        self._end.close()
        self._drain()
        if self._error is not None and not isinstance(self._error, TeacherError):
            raise self._error

    def _drain(self) -> None:
        """Drop the messages of the ended worker by replacing the service."""
        self._router.close()
        self._router = Router()

    def n_arcs(self) -> int:
        """Return the number of arcs."""
        return len(self._tracer.arcs)

    def resident_bytes(self) -> int | None:
        """Return the memory of this process."""
        return resident_bytes()

    def reset(self) -> None:
        """Replace worker and service."""
        self._end.set()
        self._thread.join(timeout=_NO_ANSWER_S)
        self._end.close()
        self._drain()
        self._log.errors.clear()
        self._start()

    def close(self) -> None:
        """End worker and service."""
        self._end.set()
        self._thread.join(timeout=_NO_ANSWER_S)
        self._end.close()
        self._router.close()
        self._log.close()


def _is_valid(frames: Frames) -> bool:
    try:
        protocol.decode(frames)
    except TeacherProtocolError:
        return False
    return True

"""The trainer's side of the teacher service: many calls at once over one connection, each with its own deadline.

`pieces` cuts a submit into requests, `inflight` decides when each is sent, and `exchange` is the thread that does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType

from teacher.client.calls import Question
from teacher.client.exchange import Exchange
from teacher.client.pieces import Scoring
from teacher.errors import TeacherRequestError
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence
from teacher.status import ServiceStatus
from teacher.wire import protocol
from teacher.wire.connection import CLIENT, Connection
from teacher.wire.messages import LIMITS, Info, Status, WireDtype, check_top_k, check_wire_dtype
from teacher.wire.sockets import FRONTEND_PORT

DEFAULT_TIMEOUT_S = 600.0
STATUS_TIMEOUT_S = 10.0


class TeacherClient:
    """Asks one teacher service. Thread-safe; use it as a context manager or call `close`.

    The service may go away and come back, or be full for a while: requests wait for it until their deadline. Not usable
    in a forked child (the thread stays with the parent): make a new client there.
    """

    def __init__(
        self,
        server_ip: str = "127.0.0.1",
        server_port: int = FRONTEND_PORT,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        auth_dir: str | Path | None = None,
        top_k: int | None = None,
        wire_dtype: WireDtype = "float32",
    ) -> None:
        """Connects in the background; a service that is not there yet shows in the first request.

        So does one that refuses this client's key: it may be restarted with the right ones, and so may what it
        should know of this client be put in its folder. The log says it at once, the error at the deadline.

        Args:
            timeout_s: deadline of each call that names none.
            auth_dir: folder with this client's keys, for a service that was started with some.
            top_k: how many logprobs a position are wanted; None for all that the teacher returns.
            wire_dtype: how they travel; float16 takes a quarter off the bytes (ids stay int32), with an error of at
                most 2^-11 of a logprob.

        Raises: TeacherError if the address is malformed, keys are missing, or an argument is out of range.
        """
        self._timeout_s = _checked_timeout_s(timeout_s)
        check_top_k(top_k)
        self._top_k, self._wire_dtype = top_k, check_wire_dtype(wire_dtype)
        self._met: TeacherInfo | None = None
        self._exchange = Exchange(Connection(CLIENT, server_ip, server_port, auth_dir))
        self.address = self._exchange.address

    def __enter__(self) -> TeacherClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hello(self, timeout_s: float | None = None) -> TeacherInfo:
        """What the service is; waits for its first worker if there is none yet.

        From then on this client's requests are for that model: a service that was started again with another refuses
        them with TeacherChanged.

        Raises: TeacherUnavailable if nobody is there, or no worker registers, within `timeout_s`; TeacherTimeout if
            something takes the connection but never answers.
        """
        return self.submit_hello(timeout_s).result()  # bounded: each future is settled at its deadline

    def status(self, timeout_s: float = STATUS_TIMEOUT_S) -> ServiceStatus:
        """Workers, queue, clients and totals of the service. Raises like `hello`, but waits for no worker."""
        return self.submit_status(timeout_s).result()

    def submit(
        self, sequences: Sequence[TeacherSequence], timeout_s: float | None = None, *, temperature: float = 1.0
    ) -> Future[list[ScoredSequence]]:
        """Have `sequences` scored, with log_softmax(logits / temperature); the answers keep their order.

        They travel in pieces of `pieces.PIECE_TOKENS`, so they are dealt evenly to the workers; up to 4096 sequences.
        The first piece that fails fails the whole. A worker scores one temperature at a time: requests of another
        wait until it has finished those before them.

        `cancel()` works until the answer is there, and the service then drops what it has not scored yet.

        Every failure of a request arrives through its future: TeacherRequestError (this request is at fault),
        TeacherTimeout, TeacherUnavailable, TeacherChanged, TeacherProtocolError. Callbacks of the future run in the I/O
        thread: keep them short.

        Raises: TeacherError only if the client is closed or belongs to another process.
        """
        try:
            call = Scoring(
                sequences,
                self._checked_timeout_s(timeout_s),
                temperature=temperature,
                top_k=self._top_k,
                wire_dtype=self._wire_dtype,
                met=self._met,
            )
        except TeacherRequestError as error:
            refused: Future[list[ScoredSequence]] = Future()
            refused.set_exception(error)
            return refused
        self._exchange.start(call)
        return call.future

    def submit_hello(self, timeout_s: float | None = None) -> Future[TeacherInfo]:
        """`hello` as a future. Raises: TeacherError if the timeout is out of range or the client is closed."""
        call = Question("hello", self._checked_timeout_s(timeout_s), protocol.encode_hello, Info, self._meet)
        self._exchange.start(call)
        return call.future

    def _meet(self, answer: Info) -> TeacherInfo:
        self._met = answer.info
        return answer.info

    def submit_status(self, timeout_s: float = STATUS_TIMEOUT_S) -> Future[ServiceStatus]:
        """`status` as a future. Raises: TeacherError if the timeout is out of range or the client is closed."""
        call = Question(
            "status",
            _checked_timeout_s(timeout_s),
            protocol.encode_status_request,
            Status,
            lambda answer: answer.status,
        )
        self._exchange.start(call)
        return call.future

    def close(self) -> None:
        """Fail what is in flight and tell the service so, end the thread, free the socket. May be called twice."""
        self._exchange.close()

    def _checked_timeout_s(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else _checked_timeout_s(timeout_s)


def _checked_timeout_s(timeout_s: float) -> float:
    if not 0 < timeout_s <= LIMITS.timeout_s:
        raise TeacherRequestError(f"timeout_s must be above 0 and at most {LIMITS.timeout_s:.0f}, got {timeout_s!r}")
    return float(timeout_s)

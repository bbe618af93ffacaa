"""Calls of a client: a future, and the requests (one message each) that resolve it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from teacher.errors import TeacherError, TeacherProtocolError
from teacher.wire import protocol
from teacher.wire.frames import Frame
from teacher.wire.messages import Message

R = TypeVar("R")


class Call(ABC, Generic[R]):
    """One method call of a client, resolved once by the I/O thread.

    The future can be canceled until the call is resolved.

    Attributes:
        uses_queue: True if the requests wait in the service's queue, which can be full.
        description: Subject of error messages, such as ``"scoring 8 sequences"``.
        timeout_s: Time limit of the whole call, in seconds.
        deadline: End of the time limit, in `time.monotonic` seconds. It applies to all requests of the call.
        future: Result of the call.
        request_ids: Ids of the requests. They are consecutive, and empty before the call is started.
        is_resolved: True once the future has a result or an error, or its cancellation is confirmed.
    """

    uses_queue: bool

    def __init__(self, description: str, timeout_s: float, n_requests: int) -> None:
        """Create a call and start its time limit."""
        self.description, self.timeout_s, self.n_requests = description, timeout_s, n_requests
        self.deadline = time.monotonic() + timeout_s
        self.future: Future[R] = Future()
        self.request_ids = range(0)
        self.is_resolved = False

    @abstractmethod
    def encode(self, request_id: int, timeout_s: float) -> list[Frame]:
        """Return the message of one request. A request can be sent several times.

        Args:
            request_id: One of `request_ids`.
            timeout_s: Time that the service gets, in seconds.
        """

    @abstractmethod
    def accept(self, request_id: int, message: Message) -> None:
        """Store the reply to one request, and resolve the call with the last one.

        Raises:
            TeacherProtocolError: The message is not a valid reply to that request.
        """

    def locate_error(self, request_id: int, error: TeacherError) -> TeacherError:
        """Return the service's error about one request as an error about the whole call."""
        return error

    def succeed(self, result: R) -> None:
        """Set the result. A call that is already resolved or canceled is left unchanged."""
        if self._resolve():
            self.future.set_result(result)

    def fail(self, error: TeacherError) -> None:
        """Set the error. A call that is already resolved or canceled is left unchanged."""
        if self._resolve():
            self.future.set_exception(error)

    def confirm_cancellation(self) -> None:
        """Wake up `concurrent.futures.wait`, which returns only after a canceled future is marked as notified."""
        self._resolve()

    def _resolve(self) -> bool:
        """Return False if the call is already resolved or was canceled."""
        if self.is_resolved:
            return False
        self.is_resolved = True
        return self.future.set_running_or_notify_cancel()


class ProxyCall(Call[R]):
    """A call that the proxy itself answers: one request, one reply of a fixed type."""

    uses_queue = False

    def __init__(
        self,
        description: str,
        timeout_s: float,
        request: Callable[[int, float], Message],
        expected: type[Message],
        read: Callable[[Any], R],
    ) -> None:
        """Create the call.

        Args:
            description: Subject of error messages.
            timeout_s: Time limit, in seconds.
            request: Function from request id and timeout to the request.
            expected: Type of the reply.
            read: Function from the reply to the result of the call.
        """
        super().__init__(description, timeout_s, n_requests=1)
        self._request, self._expected, self._read = request, expected, read

    def encode(self, request_id: int, timeout_s: float) -> list[Frame]:
        """Return the message of the request."""
        return protocol.encode(self._request(request_id, timeout_s))

    def accept(self, request_id: int, message: Message) -> None:
        """Resolve the call with the reply.

        Raises:
            TeacherProtocolError: The reply has another type.
        """
        if not isinstance(message, self._expected):
            raise TeacherProtocolError(
                f"expected {self._expected.__name__}, got {type(message).__name__}", entry="kind"
            )
        self.succeed(self._read(message))

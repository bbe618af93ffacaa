"""What one caller of the client waits for: a future, and the requests (one message each) that it takes to settle it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from teacher.errors import TeacherError, TeacherProtocolError
from teacher.wire.frames import Frame
from teacher.wire.messages import Message

R = TypeVar("R")


class Call(ABC, Generic[R]):
    """Settled once, by the I/O thread. Until then its future can be cancelled. Its requests have consecutive ids.

    Attributes:
        what: for messages to people.
        deadline: of all its requests, in time.monotonic().
        takes_place: whether its requests wait in the service's queue, which may be full.
    """

    takes_place: bool

    def __init__(self, what: str, timeout_s: float, n_requests: int) -> None:
        self.what, self.timeout_s, self.n_requests = what, timeout_s, n_requests
        self.deadline = time.monotonic() + timeout_s
        self.future: Future[R] = Future()
        self.request_ids = range(0)
        self.is_settled = False

    @abstractmethod
    def encode(self, request_id: int, timeout_s: float) -> list[Frame]:
        """The message of one of its requests; may be called again, because a request may be sent again."""

    @abstractmethod
    def accept(self, request_id: int, message: Message) -> None:
        """Take what came for one of its requests; succeed if that was the last.

        Raises: TeacherProtocolError if it is no answer to that request.
        """

    def explain(self, request_id: int, text: str) -> str:
        """The service's words about one request, as words about the whole."""
        return text

    def succeed(self, result: R) -> None:
        if self._settle():
            self.future.set_result(result)

    def fail(self, error: TeacherError) -> None:
        if self._settle():
            self.future.set_exception(error)

    def end_canceled(self) -> None:
        """Tell who waits for a cancelled future (`concurrent.futures.wait`) that it is."""
        self._settle()

    def _settle(self) -> bool:
        """False if it is settled already, or was cancelled."""
        if self.is_settled:
            return False
        self.is_settled = True
        return self.future.set_running_or_notify_cancel()


class Question(Call[R]):
    """A question to the proxy itself: one request, one answer of type `expected`."""

    takes_place = False

    def __init__(
        self,
        what: str,
        timeout_s: float,
        encode: Callable[[int, float], list[Frame]],
        expected: type[Message],
        read: Callable[[Any], R],
    ) -> None:
        super().__init__(what, timeout_s, n_requests=1)
        self._encode, self._expected, self._read = encode, expected, read

    def encode(self, request_id: int, timeout_s: float) -> list[Frame]:
        return self._encode(request_id, timeout_s)

    def accept(self, request_id: int, message: Message) -> None:
        if not isinstance(message, self._expected):
            raise TeacherProtocolError(f"expected {self._expected.__name__}, got {type(message).__name__}")
        self.succeed(self._read(message))

"""Clients that scoring workers use, and their descriptions, which the driver sends to the workers.

`teacher.client` has both for a teacher service, `teacher.client.http` for plain inference servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence


class ScoringClient(Protocol):
    """Client of one teacher in a scoring worker.

    Attributes:
        address: Addresses of the teacher, for messages.
    """

    address: str

    def submit_hello(self, timeout_s: float | None = None) -> Future[TeacherInfo]:
        """Return the future of the model and limits of the teacher."""
        ...

    def submit(
        self,
        sequences: Sequence[TeacherSequence],
        timeout_s: float | None = None,
        *,
        temperature: float = 1.0,
        as_float32: bool = True,
    ) -> Future[list[ScoredSequence]]:
        """Start to score sequences; see `recipe_gkd.teachers.backends.TeacherBackend`.

        Args:
            as_float32: Convert the log-probabilities to float32. Otherwise they have the type in which they arrived.
        """
        ...

    def close(self) -> None:
        """Fail the open requests and free all resources."""
        ...


class ClientDescription(Protocol):
    """Description of a client that can be sent to another process. It may contain secrets."""

    @property
    def model(self) -> TeacherInfo | None:
        """The only model that the client accepts, None for any."""
        ...

    @property
    def is_loopback(self) -> bool:
        """True if only processes of the teacher's own machine can reach it."""
        ...

    @property
    def n_columns(self) -> int:
        """Size of the top k of one position."""
        ...

    @property
    def entry_bytes(self) -> int:
        """Bytes of an id with its log-probability."""
        ...

    def open(self) -> ScoringClient:
        """Return a new client that fits this description."""
        ...


@runtime_checkable
class RemoteBackend(Protocol):
    """Backend whose requests other processes can send too. Others run in the driver's process.

    Attributes:
        address: Addresses of the teacher, for messages.
    """

    address: str

    def hello(self, timeout_s: float | None = None) -> TeacherInfo:
        """Return the model and limits of the teacher."""
        ...

    def spec(self) -> ClientDescription:
        """Return the description of an equal client."""
        ...

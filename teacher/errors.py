"""Errors between a client and the teacher service, as data: received and expected value, place and remedy."""

from __future__ import annotations

from dataclasses import dataclass, field

from teacher.common.detailed_error import DetailedError


@dataclass(eq=False, repr=False)
class TeacherError(DetailedError):
    """Base class of all errors of the teacher service and its client.

    Attributes:
        teacher: Name of the teacher in the run, or its address. Empty if there is only one.
    """

    teacher: str = field(default="", kw_only=True)


@dataclass(eq=False, repr=False)
class TeacherChanged(TeacherError):
    """The service serves another model than the one that this client connected to with ``hello``."""


@dataclass(eq=False, repr=False)
class TeacherTimeout(TeacherError, TimeoutError):
    """The service is connected but did not finish a request before its deadline."""


@dataclass(eq=False, repr=False)
class TeacherProtocolError(TeacherError):
    """The received bytes are not a valid message of this protocol version."""


@dataclass(eq=False, repr=False)
class TeacherRequestError(TeacherError):
    """One request was refused or failed. Other requests are not affected, and the service continues.

    Attributes:
        sequence: Position of the sequence that was refused in its request, starting at 0.
    """

    sequence: int | None = field(default=None, kw_only=True)


@dataclass(eq=False, repr=False)
class TeacherUnavailable(TeacherError):
    """There is no service at the address, or it has no worker."""


def short(value: object) -> str:
    """Return a value's representation in at most 120 characters, for error messages."""
    try:
        shown = str(value) if isinstance(value, Exception) else repr(value)
    except RecursionError:  # msgpack allows deeper nesting than the remaining Python stack
        shown = f"a deeply nested {type(value).__name__}"
    return shown if len(shown) <= 120 else shown[:117] + "..."

"""Errors between a client and the teacher service.

Every message names the received and the expected value and a remedy. Every class takes one message string, so that
errors can be pickled between processes.
"""


class TeacherError(Exception):
    """Base class of all errors of the teacher service and its client."""


class TeacherChanged(TeacherError):
    """The service serves another model than the one that this client connected to with ``hello``."""


class TeacherTimeout(TeacherError, TimeoutError):
    """The service is connected but did not finish a request before its deadline."""


class TeacherProtocolError(TeacherError):
    """The received bytes are not a valid message of this protocol version."""


class TeacherRequestError(TeacherError):
    """One request was refused or failed. Other requests are not affected, and the service continues."""


class TeacherUnavailable(TeacherError):
    """There is no service at the address, or it has no worker."""


def short(value: object) -> str:
    """Return a value's representation in at most 120 characters, for error messages."""
    try:
        shown = str(value) if isinstance(value, Exception) else repr(value)
    except RecursionError:  # msgpack allows deeper nesting than the remaining Python stack
        shown = f"a deeply nested {type(value).__name__}"
    return shown if len(shown) <= 120 else shown[:117] + "..."

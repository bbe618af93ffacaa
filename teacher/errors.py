"""What can go wrong between a client and the teacher service.

Each message says what was got, what was expected and what to do. Every class takes one message string, so that an error
survives pickling between processes.
"""


class TeacherError(Exception):
    """Anything that the teacher service or its client reports."""


class TeacherChanged(TeacherError):
    """The service serves another model than the one that this client met in `hello`."""


class TeacherTimeout(TeacherError, TimeoutError):
    """The service is there, but a request did not get its answer before its deadline."""


class TeacherProtocolError(TeacherError):
    """Bytes that are no valid message of this protocol version."""


class TeacherRequestError(TeacherError):
    """This request was refused or failed; other requests are not affected and the service goes on."""


class TeacherUnavailable(TeacherError):
    """Nobody answers at the address, or the proxy has no worker that could do the work."""

"""Fields of an error in a message, and the codes of the error classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from teacher.errors import (
    TeacherAsleep,
    TeacherChanged,
    TeacherError,
    TeacherProtocolError,
    TeacherRequestError,
    TeacherTimeout,
    TeacherUnavailable,
    TeacherWithoutWorker,
    short,
)
from teacher.wire import header as checked
from teacher.wire.header import Header
from teacher.wire.messages import LIMITS

MAX_COUNT = 2**40

_ERROR_OF_CODE: dict[str, type[TeacherError]] = {
    "changed": TeacherChanged,
    "timeout": TeacherTimeout,
    "protocol": TeacherProtocolError,
    "request": TeacherRequestError,
    "unavailable": TeacherUnavailable,
    "no_worker": TeacherWithoutWorker,
    "asleep": TeacherAsleep,
}
_CODE_OF_ERROR = {error: code for code, error in _ERROR_OF_CODE.items()}

_LONG_TEXTS = ("what", "remedy")
# Fields of an error that cross the network. The receiver of an error adds the others, such as the address.
_READ_FIELD: dict[str, Callable[[Header, str], object]] = {
    **dict.fromkeys(_LONG_TEXTS, checked.text),
    **dict.fromkeys(("worker", "stage", "entry", "argument"), checked.name),
    **dict.fromkeys(("details", "workers", "options"), checked.texts),
    "sequence": lambda data, name: checked.integer(data, name, 0, LIMITS.sequences - 1),
    **dict.fromkeys(("n_losses", "peer_version"), lambda data, name: checked.integer(data, name, 0, MAX_COUNT)),
}


def to_wire(error: TeacherError) -> tuple[str, dict[str, object]]:
    """Return the code of an error, and its fields that have a value. Long texts and lists are cut to the limits.

    An error class without a code is sent as ``TeacherRequestError``.
    """
    error_type = type(error) if type(error) in _CODE_OF_ERROR else TeacherRequestError
    values = {name: _within_limits(name, getattr(error, name, None)) for name in _names(error_type)}
    return _CODE_OF_ERROR[error_type], {name: value for name, value in values.items() if value not in (None, "", [])}


def from_wire(code: object, data: object) -> TeacherError:
    """Return the error of a received code and received fields.

    Raises:
        TeacherProtocolError: A field does not belong to the class of the code, or has a wrong type or size.
    """
    if not isinstance(data, dict):
        raise TeacherProtocolError(f"error must be a map, got {short(data)}", entry="error")
    error_type = type_of(code)
    checked.expect_keys(data, _names(error_type))
    return error_type().replaced(**{name: _READ_FIELD[name](data, name) for name in data})


def type_of(code: object) -> type[TeacherError]:
    """Return the class of a received code, ``TeacherRequestError`` for an unknown code."""
    return _ERROR_OF_CODE.get(code, TeacherRequestError) if isinstance(code, str) else TeacherRequestError


def _within_limits(name: str, value: object) -> object:
    if isinstance(value, str):
        return value[: LIMITS.text_chars if name in _LONG_TEXTS else checked.MAX_NAME_CHARS]
    if isinstance(value, tuple):
        return [str(text)[: LIMITS.list_text_chars] for text in value[: LIMITS.list_texts]]
    return value


def _names(error_type: type[TeacherError]) -> frozenset[str]:
    """Return the names of the fields that an error of a class has in a message."""
    return frozenset(_READ_FIELD) & {field.name for field in fields(error_type)}

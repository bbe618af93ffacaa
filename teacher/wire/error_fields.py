"""Wire type of an error: its code, its text for other protocol versions, and its fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

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
from teacher.wire.fields import MAX_COUNT, MAX_NAME_CHARS, Content, Integer, ListOf, Text, WireType
from teacher.wire.frames import expect_keys
from teacher.wire.limits import LIMITS

ERROR_OF_CODE: dict[str, type[TeacherError]] = {
    "changed": TeacherChanged,
    "timeout": TeacherTimeout,
    "protocol": TeacherProtocolError,
    "request": TeacherRequestError,
    "unavailable": TeacherUnavailable,
    "no_worker": TeacherWithoutWorker,
    "asleep": TeacherAsleep,
}
"""Errors that a message can contain, by their code."""
_CODE_OF_ERROR = {error: code for code, error in ERROR_OF_CODE.items()}

TEXT = Text(kept_chars=LIMITS.text_chars)
"""Text for logs and errors. The sender cuts it to the limit."""
_NAME = Text(MAX_NAME_CHARS, kept_chars=MAX_NAME_CHARS)
_TEXTS = ListOf(Text(LIMITS.list_text_chars, kept_chars=LIMITS.list_text_chars), LIMITS.list_texts, is_cut=True)
# Fields of an error that cross the network. The receiver of an error adds the others, such as the address.
_FIELDS: dict[str, WireType] = {
    **dict.fromkeys(("what", "remedy"), TEXT),
    **dict.fromkeys(("worker", "stage", "entry", "argument"), _NAME),
    **dict.fromkeys(("details", "workers", "options"), _TEXTS),
    "sequence": Integer(0, LIMITS.sequences - 1),
    **dict.fromkeys(("n_losses", "peer_version"), Integer(0, MAX_COUNT)),
}


class ErrorFields(WireType):
    """A ``TeacherError``: the fields that have a value. An error class without a code is a ``TeacherRequestError``."""

    entries = ("code", "message", "error")

    def store(self, content: Content, name: str, value: Any) -> None:
        """Add code, text and fields. Long texts and lists are cut to the limits."""
        error_type = type(value) if type(value) in _CODE_OF_ERROR else TeacherRequestError
        types = fields_of(error_type)
        found = {name: getattr(value, name, None) for name in types}
        content.header |= {
            "code": _CODE_OF_ERROR[error_type],
            "message": TEXT.write(value),
            "error": {name: types[name].write(one) for name, one in found.items() if one not in (None, "", ())},
        }

    def load(self, content: Content, name: str) -> TeacherError:
        """Return the error.

        Raises:
            TeacherProtocolError: A field does not belong to the class of the code, or has a wrong type or size.
        """
        TEXT.load(content, "message")  # the proxy passes on only the data
        data = content.header.get("error")
        if not isinstance(data, dict):
            raise TeacherProtocolError(f"error must be a map, got {short(data)}", entry="error")
        error_type = _type_of(content.header.get("code"))
        types = fields_of(error_type)
        expect_keys(data, frozenset(types))
        return error_type().replaced(**{name: types[name].read(value, name) for name, value in data.items()})

    def load_text(self, content: Content) -> TeacherError:
        """Return the error of another protocol version, whose fields may be others."""
        return _type_of(content.header.get("code"))(TEXT.load(content, "message"))

    def __str__(self) -> str:
        return f"class, {TEXT}, and map of fields"


def _type_of(code: object) -> type[TeacherError]:
    """Return the class of a received code, ``TeacherRequestError`` for an unknown code."""
    return ERROR_OF_CODE.get(code, TeacherRequestError) if isinstance(code, str) else TeacherRequestError


def fields_of(error_type: type[TeacherError]) -> dict[str, WireType]:
    """Return the wire types of the fields that an error of a class has in a message."""
    names = {field.name for field in fields(error_type)}
    return {name: wire_type for name, wire_type in _FIELDS.items() if name in names}

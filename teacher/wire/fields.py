"""Wire types: form, limits and validation of the fields of messages and records.

A field declares its wire type once, ``n_workers: Annotated[int, Integer(0, 10)]``. Encoding, decoding and the table of
messages in the documentation are derived from it. ``read`` returns a valid value of the expected type and range, or
raises ``TeacherProtocolError``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np

from teacher.errors import TeacherProtocolError, TeacherRequestError, short
from teacher.wire.frames import Header
from teacher.wire.limits import LIMITS

MAX_COUNT = 2**40
MAX_NAME_CHARS = 1024  # requests contain names, and their texts are limited too
_LARGEST = 2**62


@dataclass
class Content:
    """Content of a message: the header, and the arrays in the order of their frames."""

    header: Header
    arrays: list[np.ndarray]


class WireType:
    """Form of a field in a message. Most types are one header entry, and implement ``read`` and ``__str__``.

    Attributes:
        entries: Header entries that the field is stored in. Empty: the one with the name of the field.
    """

    entries: tuple[str, ...] = ()

    def read(self, value: object, entry: str) -> Any:
        """Return the valid value of a received entry."""
        raise NotImplementedError

    def write(self, value: Any) -> object:
        """Return the value as it is sent."""
        return value

    def load(self, content: Content, name: str) -> Any:
        """Return the valid value of a field of a received message."""
        (entry,) = self.entries or (name,)
        return self.read(content.header.get(entry), entry)

    def store(self, content: Content, name: str, value: Any) -> None:
        """Add a field to a message."""
        (entry,) = self.entries or (name,)
        content.header[entry] = self.write(value)


@dataclass(frozen=True)
class Integer(WireType):
    """Integer in [low, high]."""

    low: int
    high: int
    entries: tuple[str, ...] = ()

    def read(self, value: object, entry: str) -> int:
        """Return the integer."""
        if type(value) is not int or not self.low <= value <= self.high:  # isinstance would accept True
            raise TeacherProtocolError(f"{entry} must be an {self}, got {short(value)}", entry=entry)
        return value

    def __str__(self) -> str:
        return f"integer from {self.low} to {self.high}"


@dataclass(frozen=True)
class Number(WireType):
    """Number in (low, high], as float."""

    low: float
    high: float

    def read(self, value: object, entry: str) -> float:
        """Return the number."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not self.low < value <= self.high:  # or NaN
            raise TeacherProtocolError(f"{entry} must be a {self}, got {short(value)}", entry=entry)
        return float(value)

    def __str__(self) -> str:
        return f"number above {self.low:g}, at most {self.high:.0f}"


class Flag(WireType):
    """Boolean."""

    def read(self, value: object, entry: str) -> bool:
        """Return the Boolean."""
        if not isinstance(value, bool):
            raise TeacherProtocolError(f"{entry} must be {self}, got {short(value)}", entry=entry)
        return value

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True)
class Text(WireType):
    """Text of limited length.

    Attributes:
        max_chars: Length above which a received text is refused.
        kept_chars: Length to which both sides cut the text, None to leave it unchanged.
    """

    max_chars: int = LIMITS.text_chars
    kept_chars: int | None = None

    def read(self, value: object, entry: str) -> str:
        """Return the text."""
        if not isinstance(value, str) or len(value) > self.max_chars:
            raise TeacherProtocolError(f"{entry} must be a {self}, got {short(value)}", entry=entry)
        return value[: self.kept_chars]

    def write(self, value: Any) -> str:
        """Return the text as it is sent."""
        return str(value)[: self.kept_chars]

    def __str__(self) -> str:
        return f"text of at most {self.max_chars} characters"


@dataclass(frozen=True)
class ListOf(WireType):
    """List of at most ``max_items`` values, as a tuple. With ``is_cut``, further values are not sent."""

    item: WireType
    max_items: int
    is_cut: bool = False

    def read(self, value: object, entry: str) -> tuple[Any, ...]:
        """Return the values."""
        if not isinstance(value, list | tuple) or len(value) > self.max_items:
            raise TeacherProtocolError(f"{entry} must be a {self}, got {short(value)}", entry=entry)
        return tuple(self.item.read(one, entry) for one in value)

    def write(self, value: Any) -> list[object]:
        """Return the values as they are sent."""
        return [self.item.write(one) for one in (value[: self.max_items] if self.is_cut else value)]

    def __str__(self) -> str:
        return f"list of at most {self.max_items} items, each: {self.item}"


@dataclass(frozen=True)
class Record(WireType):
    """Dataclass, sent as a map of its fields."""

    record: type

    def read(self, value: object, entry: str) -> Any:
        """Return the record."""
        types = wire_types(self.record)
        if not isinstance(value, dict) or set(value) != set(types):
            raise TeacherProtocolError(f"{entry} must have the keys {sorted(types)}, got {short(value)}", entry=entry)
        return self.record(**{name: wire_type.read(value[name], name) for name, wire_type in types.items()})

    def write(self, value: Any) -> dict[str, object]:
        """Return the map."""
        return {name: wire_type.write(getattr(value, name)) for name, wire_type in wire_types(self.record).items()}

    def __str__(self) -> str:
        return f"`{self.record.__name__}`"


class Checked(WireType):
    """Argument of a request, validated by its sender and its receiver with the same function."""

    def __init__(self, check: Callable[[Any], Any], description: str) -> None:
        """Store a function that returns the valid value or raises ``TeacherRequestError``."""
        self._check, self._description = check, description

    def write(self, value: Any) -> object:
        """Return the value.

        Raises:
            TeacherRequestError: It is invalid.
        """
        return self._check(value)

    def read(self, value: object, entry: str) -> Any:
        """Return the value. Its error is one of a received message."""
        try:
            return self._check(value)
        except TeacherRequestError as error:
            raise as_received(error) from None

    def __str__(self) -> str:
        return self._description


def as_received(error: TeacherRequestError) -> TeacherProtocolError:
    """Return the error of an argument as the error of a received message."""
    place = {"sequence": error.sequence, "options": error.options, "remedy": error.remedy}
    return TeacherProtocolError(error.what, entry=error.argument, **place)  # type: ignore[arg-type]


Name = Annotated[str, Text(MAX_NAME_CHARS)]
Count = Annotated[int, Integer(1, MAX_COUNT)]

_STATUS_TYPES: dict[type, WireType] = {
    bool: Flag(),
    str: Text(LIMITS.status_bytes),
    int: Integer(-_LARGEST, _LARGEST),
    float: Number(-_LARGEST, _LARGEST),
}
"""Wire types of fields without an annotation. They suffice for a service status, which is limited as a whole."""


@cache
def wire_types(record: type) -> dict[str, WireType]:
    """Return the wire types of the fields of a dataclass."""
    hints = get_type_hints(record, include_extras=True)
    return {field.name: _wire_type(hints[field.name]) for field in fields(record)}


def _wire_type(hint: Any) -> WireType:
    if get_origin(hint) is Annotated:
        return next(entry for entry in hint.__metadata__ if isinstance(entry, WireType))
    if get_origin(hint) is tuple:
        return ListOf(_wire_type(get_args(hint)[0]), LIMITS.status_bytes)
    return Record(hint) if is_dataclass(hint) else _STATUS_TYPES[hint]  # type: ignore[arg-type]

"""Checked reads of the values of a message's header: whatever is there, a value of the right kind or an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from teacher.errors import TeacherProtocolError
from teacher.records import ModelInfo
from teacher.wire.messages import LIMITS

Header = dict[str, Any]


def expect_keys(header: Header, known: set[str]) -> None:
    if unknown := set(header) - known:
        raise TeacherProtocolError(f"unknown keys {short(sorted(map(str, unknown)))}, expected {sorted(known)} only")


def request_id(header: Header) -> int:
    return integer(header, "id", 0, 2**63 - 1)


def integer(header: Header, key: str, low: int, high: int) -> int:
    value = header.get(key)
    if type(value) is not int or not low <= value <= high:  # `type`, because True is an int for isinstance
        raise TeacherProtocolError(f"{key} must be an integer from {low} to {high}, got {short(value)}")
    return value


def number(header: Header, key: str, low: float, high: float) -> float:
    """Above `low`, at most `high`."""
    value = header.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low < value <= high:  # false for NaN
        raise TeacherProtocolError(f"{key} must be above {low:g} and at most {high:.0f}, got {short(value)}")
    return float(value)


def boolean(header: Header, key: str) -> bool:
    value = header.get(key)
    if not isinstance(value, bool):
        raise TeacherProtocolError(f"{key} must be true or false, got {short(value)}")
    return value


def text(header: Header, key: str) -> str:
    value = header.get(key)
    if not isinstance(value, str) or len(value) > LIMITS.text_chars:
        raise TeacherProtocolError(
            f"{key} must be a text of at most {LIMITS.text_chars} characters, got {short(value)}"
        )
    return value


def timeout_s(header: Header) -> float:
    return number(header, "timeout_s", 0, LIMITS.timeout_s)


def record(header: Header, kind: type[ModelInfo]) -> dict[str, Any]:
    """The arguments of a `ModelInfo`, or of a record derived from it."""
    info = header.get("info")
    names = {field.name: field.type for field in fields(kind)}
    if not isinstance(info, dict) or set(info) != set(names):
        raise TeacherProtocolError(f"info must have the keys {sorted(names)}, got {short(info)}")
    # The annotations, which are texts in that module.
    read: dict[Any, Callable[[Header, str], Any]] = {
        "str": text,
        "int": lambda info, name: integer(info, name, 0, 2**40),
        "tuple[int, ...]": _token_ids,
    }
    return {name: read[kind](info, name) for name, kind in names.items()}


def _token_ids(header: Header, key: str) -> tuple[int, ...]:
    ids = header.get(key)
    if (
        not isinstance(ids, list)
        or len(ids) > LIMITS.eos_token_ids
        or any(type(token_id) is not int or not 0 <= token_id < LIMITS.vocab_size for token_id in ids)
    ):
        raise TeacherProtocolError(f"{key} must be at most {LIMITS.eos_token_ids} token ids, got {short(ids)}")
    return tuple(ids)


def short(value: object) -> str:
    try:
        shown = str(value) if isinstance(value, Exception) else repr(value)
    except RecursionError:  # nested as deep as msgpack lets it be, on a stack that is deep already
        shown = f"a deeply nested {type(value).__name__}"
    return shown if len(shown) <= 120 else shown[:117] + "..."

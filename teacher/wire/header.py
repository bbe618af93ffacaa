"""Validated access to the values of a decoded message header.

Each function returns a value of the expected type and range, or raises ``TeacherProtocolError``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from teacher.errors import TeacherProtocolError, short
from teacher.records import LastToken, ModelInfo
from teacher.wire.messages import LIMITS

Header = dict[str, Any]

_MAX_COUNT = 2**40
MAX_NAME_CHARS = 1024
_MAX_TOKEN_CHARS = 1024


def expect_keys(header: Header, allowed: set[str] | frozenset[str]) -> None:
    """Check that a header has no other keys than the allowed ones."""
    if unknown := set(header) - allowed:
        names = sorted(map(str, unknown))
        raise TeacherProtocolError(
            f"unknown keys {short(names)}, expected {sorted(allowed)} only", entry=names[0][:MAX_NAME_CHARS]
        )


def request_id(header: Header) -> int:
    """Return the request id."""
    return integer(header, "id", 0, 2**63 - 1)


def integer(header: Header, key: str, low: int, high: int) -> int:
    """Return an integer in [low, high]."""
    value = header.get(key)
    if type(value) is not int or not low <= value <= high:  # isinstance would accept True
        raise TeacherProtocolError(f"{key} must be an integer from {low} to {high}, got {short(value)}", entry=key)
    return value


def number(header: Header, key: str, low: float, high: float) -> float:
    """Return a number in (low, high] as float."""
    value = header.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low < value <= high:  # False for NaN
        raise TeacherProtocolError(f"{key} must be above {low:g} and at most {high:.0f}, got {short(value)}", entry=key)
    return float(value)


def boolean(header: Header, key: str) -> bool:
    """Return a Boolean."""
    value = header.get(key)
    if not isinstance(value, bool):
        raise TeacherProtocolError(f"{key} must be true or false, got {short(value)}", entry=key)
    return value


def text(header: Header, key: str) -> str:
    """Return a text of limited length."""
    value = header.get(key)
    if not isinstance(value, str) or len(value) > LIMITS.text_chars:
        raise TeacherProtocolError(
            f"{key} must be a text of at most {LIMITS.text_chars} characters, got {short(value)}", entry=key
        )
    return value


def texts(header: Header, key: str) -> tuple[str, ...]:
    """Return a list of texts of limited number and length."""
    value = header.get(key)
    if (
        not isinstance(value, list)
        or len(value) > LIMITS.list_texts
        or any(not isinstance(one, str) or len(one) > LIMITS.list_text_chars for one in value)
    ):
        raise TeacherProtocolError(
            f"{key} must be at most {LIMITS.list_texts} texts of at most {LIMITS.list_text_chars} characters, "
            f"got {short(value)}",
            entry=key,
        )
    return tuple(value)


def timeout_s(header: Header) -> float:
    """Return the timeout of a request in seconds."""
    return number(header, "timeout_s", 0, LIMITS.timeout_s)


def record(header: Header, record_type: type[ModelInfo]) -> dict[str, Any]:
    """Return the arguments of a ``ModelInfo``, or of a derived record, from the ``info`` entry of a header."""
    info = header.get("info")
    types = {field.name: field.type for field in fields(record_type)}
    if not isinstance(info, dict) or set(info) != set(types):
        raise TeacherProtocolError(f"info must have the keys {sorted(types)}, got {short(info)}", entry="info")
    # Field types are strings because the records module postpones the evaluation of annotations.
    read_by_type: dict[Any, Callable[[Header, str], Any]] = {
        "str": name,
        "int": lambda info, name: integer(info, name, int(name != "n_workers"), _MAX_COUNT),
        "tuple[int, ...]": _token_ids,
        "tuple[LastToken, ...]": _last_tokens,
    }
    return {name: read_by_type[type_name](info, name) for name, type_name in types.items()}


def name(header: Header, key: str) -> str:
    """Return a name of limited length."""
    value = text(header, key)
    if len(value) > MAX_NAME_CHARS:  # requests contain names, and their texts are limited too
        raise TeacherProtocolError(f"{key} must have at most {MAX_NAME_CHARS} characters, got {len(value)}", entry=key)
    return value


def _token_ids(header: Header, key: str) -> tuple[int, ...]:
    ids = header.get(key)
    if (
        not isinstance(ids, list)
        or len(ids) > LIMITS.eos_token_ids
        or any(type(token_id) is not int or not 0 <= token_id < LIMITS.vocab_size for token_id in ids)
    ):
        raise TeacherProtocolError(
            f"{key} must be at most {LIMITS.eos_token_ids} token ids, got {short(ids)}", entry=key
        )
    return tuple(ids)


def _last_tokens(header: Header, key: str) -> tuple[LastToken, ...]:
    tokens = header.get(key)
    if not isinstance(tokens, list) or len(tokens) > LIMITS.last_tokens:
        raise TeacherProtocolError(f"{key} must be at most {LIMITS.last_tokens} tokens, got {short(tokens)}", entry=key)
    return tuple(_last_token(token) for token in tokens)


def _last_token(token: object) -> LastToken:
    if not isinstance(token, dict) or set(token) != {"id", "text", "fingerprint"}:
        raise TeacherProtocolError(
            f"a token must have the keys id, text and fingerprint, got {short(token)}", entry="last_tokens"
        )
    values = {name: text(token, name) for name in ("text", "fingerprint")}
    if max(map(len, values.values())) > _MAX_TOKEN_CHARS:
        raise TeacherProtocolError(
            f"a token's texts have at most {_MAX_TOKEN_CHARS} characters, got {short(values)}", entry="last_tokens"
        )
    return LastToken(integer(token, "id", 0, LIMITS.vocab_size), **values)

"""Fields of the schema: :func:`key` describes a key and its range, :func:`timeout` a deadline."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from recipe_gkd.config.limits import MAX_TIMEOUT_S, MIN_TIMEOUT_S

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


def key(doc: str, **bounds: Any) -> Any:
    """Return a field with the description ``doc``; ``bounds`` are pydantic's ``ge``, ``gt``, ``le`` and ``lt``."""
    return Field(description=doc, **bounds)


def timeout(doc: str, longest_s: float = MAX_TIMEOUT_S) -> Any:
    """Return a field for a deadline in seconds. ``doc`` continues the words "Timeout of"."""
    return key(f"Timeout of {doc}", ge=MIN_TIMEOUT_S, le=longest_s)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else null_to_list(value)


def null_to_list(value: Any) -> Any:
    """Return an empty list for null, which other projects write for it."""
    return [] if value is None else value


Files = Annotated[list[str], BeforeValidator(_as_list)]  # a single string is accepted as a list of one
